"""Position of a run in its data: the samples that the run has taken from each dataset, and its next sample.

A stream is one dataset, cut into samples of one length with one packing, in one order. Its samples are read in order,
each at most once. A blend assigns the run's samples to streams. Three pure functions act on a position:

    enter    returns the position with other sources: streams that were read before continue, and new streams begin
    sample   returns the stream of the n-th sample after the position, and the sample's index in that stream
    advance  returns the position after steps of equal size

`enter` is called at the start of a phase, after a change of the configuration, and at a resume. A rewind calls
`returned_to`. A rewind and `--leave-out` call `leave_out`, which advances without training. The number of a sample in
the run is the number of samples assigned before it. Ranks, microbatches and restarts have no effect on a position.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from frontier_llm.data.blend import MAXIMUM_PERIOD, MAXIMUM_SOURCES, blend_of, whole_weights

Packing = Literal["concatenate", "best-fit"]


def derive_key(*parts: object) -> int:
    """Return a 64-bit key that is derived from a purpose and its parameters."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def order_key(kind: Packing | Literal["synthetic"], seed: int, number: int) -> int:
    """Return the key of the sample order of a run's stream `number`, or of source `number` of a held-out set."""
    if kind == "synthetic":
        first = derive_key("synthetic", seed)
        return first if number == 0 else derive_key("phase", first, number + 1)
    return derive_key("source" if kind == "concatenate" else "best-fit", seed, number)


SYNTHETIC = "synthetic"
MAXIMUM_RANGES = 1 << 16  # limit for the ranges of left-out samples of one stream

Count = Annotated[int, Field(ge=0, le=2**53)]
Size = Annotated[int, Field(gt=0, le=2**53)]
Range = tuple[Count, Size]


@dataclass(frozen=True)
class Source:
    """A dataset as one member of a blend."""

    dataset: str  # digest that identifies the dataset's tokens, or SYNTHETIC
    path: str
    tokens: int  # 0 for synthetic data
    weight: float


@dataclass(frozen=True)
class Wanted:
    """A blend as a configuration describes it."""

    sources: tuple[Source, ...]
    sequence_length: int
    packing: Packing
    seed: int  # determines the order of samples in sources that are read for the first time


class _Record(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        protected_namespaces=(),
    )


class Stream(_Record):
    """One dataset in samples of one length, in one order, and the number of samples that the run took from it."""

    dataset: Annotated[str, Field(pattern=r"^([0-9a-f]{64}|synthetic)$")]  # digest that identifies the dataset's tokens
    path: Annotated[str, Field(max_length=4096)]  # path of the dataset when it was last used
    dataset_tokens: Count  # 0 if synthetic or not known
    sequence_length: Size
    packing: Packing
    order: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]  # key of the samples' order
    taken: Count  # number of samples that the run has taken from this stream, including samples that were left out.
    # (first sample, number of samples) of each range without training
    left_out: Annotated[tuple[Range, ...], Field(max_length=MAXIMUM_RANGES)] = ()
    retired: bool = False  # True if another stream of the dataset has replaced it

    @property
    def key(self) -> int:
        """Key of the stream's order."""
        return int(self.order, 16)

    @property
    def samples_left_out(self) -> int:
        """Number of samples of this stream that rewinds and `--leave-out` have left out of training."""
        return sum(count for _, count in self.left_out)

    @property
    def tokens_read(self) -> int:
        """Number of targets that were trained on."""
        return (self.taken - self.samples_left_out) * self.sequence_length

    def is_of(self, dataset: str, sequence_length: int, packing: str) -> bool:
        """Return whether this stream continues if a blend names this dataset, sequence length and packing."""
        return not self.retired and (self.dataset, self.sequence_length, self.packing) == (
            dataset,
            sequence_length,
            packing,
        )

    def after(self, samples: int, left_out: bool) -> Stream:
        """Return the stream after `samples` more samples. With `left_out`, the samples count as not trained on."""
        if not samples:
            return self
        ranges = _joined([*self.left_out, (self.taken, samples)]) if left_out else self.left_out
        return self.model_copy(update={"taken": self.taken + samples, "left_out": ranges})


class Share(_Record):
    """A stream in a blend."""

    stream: Count  # index in `Position.streams`
    weight: Annotated[int, Field(gt=0, le=MAXIMUM_PERIOD)]


class Stretch(_Record):
    """Consecutive steps with the same number of samples and tokens."""

    steps: Size
    tokens_per_step: Size


class Position(_Record):
    """Samples that the run has read, and the blend that assigns the next samples. Saved in every checkpoint."""

    streams: Annotated[tuple[Stream, ...], Field(max_length=MAXIMUM_SOURCES)] = ()  # order of first use
    blend: Annotated[tuple[Share, ...], Field(max_length=MAXIMUM_SOURCES)] = ()  # same order as `streams`
    dealt: Count = 0  # Number of samples that this blend has assigned.
    # The steps done. Consecutive steps of equal size form one entry.
    stretches: Annotated[tuple[Stretch, ...], Field(max_length=1 << 16)] = ()

    @property
    def samples(self) -> int:
        """Number of samples of the run so far, including left-out ones.

        The next sample has this number, because samples are numbered from 0.
        """
        return sum(stream.taken for stream in self.streams)

    @property
    def samples_left_out(self) -> int:
        """Number of the run's samples that rewinds and `--leave-out` have left out."""
        return sum(stream.samples_left_out for stream in self.streams)

    @property
    def steps(self) -> int:
        """Number of optimizer steps done."""
        return sum(stretch.steps for stretch in self.stretches)

    @property
    def tokens(self) -> int:
        """Number of targets trained on."""
        return sum(stretch.steps * stretch.tokens_per_step for stretch in self.stretches)

    @property
    def steps_done(self) -> tuple[tuple[int, int], ...]:
        """Pairs (steps, tokens per step). A configuration counts its durations from these (`config/durations.py`)."""
        return tuple((stretch.steps, stretch.tokens_per_step) for stretch in self.stretches)

    @property
    def weights(self) -> tuple[int, ...]:
        """The blend's integer weights, in the order of its streams."""
        return tuple(share.weight for share in self.blend)

    @property
    def current(self) -> tuple[Stream, ...]:
        """Streams of the blend."""
        return tuple(self.streams[share.stream] for share in self.blend)

    def enter(self, wanted: Wanted) -> Position:
        """Return the position that continues with these sources.

        A source continues the stream of its dataset, length and packing. If the blend names a dataset several times,
        its n-th mention continues the n-th such stream. A source without such a stream starts a new stream. If the new
        blend has the streams and weights of the current blend, the current blend continues without a restart.
        """
        streams = list(self.streams)
        while streams and not streams[-1].taken:  # a stream without samples has not begun
            streams.pop()
        numbers: list[int] = []
        for source in wanted.sources:
            number = _stream_of(streams, source, wanted, numbers)
            if number is None:
                number = len(streams)
                streams.append(_new_stream(source, wanted, number))
            else:
                streams[number] = streams[number].model_copy(
                    update={"path": source.path, "dataset_tokens": source.tokens}
                )
            numbers.append(number)
        weights = whole_weights([source.weight for source in wanted.sources])
        blend = tuple(
            Share(stream=number, weight=weight) for number, weight in sorted(zip(numbers, weights, strict=True))
        )
        dealt = self.dealt if blend == self.blend else 0
        return self.model_copy(update={"streams": tuple(streams), "blend": blend, "dealt": dealt})

    def sample(self, offset: int) -> tuple[int, int]:
        """Return (index of its stream in `blend`, index in that stream) of a sample.

        `offset` is counted from the next sample of the run, which has offset 0.
        """
        blend = blend_of(self.weights)
        place, count = blend.locate(self.dealt + offset)
        return place, self.current[place].taken + count - blend.before(self.dealt, place)

    def advance(self, global_batch: int, steps: int = 1) -> Position:
        """Return the position after `steps` steps of `global_batch` samples. A position without a blend does not
        change.
        """
        if not self.blend or not steps:
            return self
        size = global_batch * self.current[0].sequence_length
        stretches = self.stretches
        if stretches and stretches[-1].tokens_per_step == size:
            steps_before = stretches[-1].steps
            stretches = (*stretches[:-1], Stretch(steps=steps_before + steps, tokens_per_step=size))
        else:
            stretches = (*stretches, Stretch(steps=steps, tokens_per_step=size))
        return self._dealt(steps * global_batch, left_out=False).model_copy(update={"stretches": stretches})

    def leave_out(self, samples: int) -> Position:
        """Return the position after `samples` samples without training. Each stream records its left-out samples."""
        return self._dealt(samples, left_out=True)

    def returned_to(self, earlier: Position) -> Position:
        """Return the position of a run that repeats its steps from `earlier` on with other data. The samples that
        were taken since `earlier` are left out.
        """
        streams = []
        for number, stream in enumerate(self.streams):
            taken: int = 0
            left_out: tuple[Range, ...] = ()
            if number < len(earlier.streams):
                taken = earlier.streams[number].taken
                left_out = earlier.streams[number].left_out
            before = stream.model_copy(update={"taken": taken, "left_out": left_out})
            streams.append(before.after(stream.taken - taken, left_out=True))
        return self.model_copy(update={"streams": tuple(streams), "stretches": earlier.stretches})

    def _dealt(self, samples: int, left_out: bool) -> Position:
        blend = blend_of(self.weights)
        streams = list(self.streams)
        for place, share in enumerate(self.blend):
            count = blend.before(self.dealt + samples, place) - blend.before(self.dealt, place)
            streams[share.stream] = streams[share.stream].after(count, left_out)
        return self.model_copy(update={"streams": tuple(streams), "dealt": self.dealt + samples})

    def restart(self, dataset: str) -> Position:
        """Return a position from which a later blend reads this dataset from its beginning, in another order."""
        streams = [
            stream.model_copy(update={"retired": True}) if stream.dataset == dataset else stream
            for stream in self.streams
        ]
        return self.model_copy(update={"streams": tuple(streams)})

    def tokens_of(self, dataset: str) -> int:
        """Return the number of a dataset's tokens that were trained on, at all lengths and with repetitions."""
        return sum(stream.tokens_read for stream in self.streams if stream.dataset == dataset)

    def datasets(self) -> dict[str, Stream]:
        """Return identity → last stream of each dataset that was read or will be, in the order of first use."""
        return {stream.dataset: stream for stream in self.streams}

    def epochs_of(self, dataset: str) -> float | None:
        """Return the number of epochs trained on a dataset, at all lengths. None for synthetic data and for an unknown
        size.
        """
        size = self.datasets()[dataset].dataset_tokens
        return self.tokens_of(dataset) / size if size else None

    def faults(self, step: int, samples: int, tokens: int) -> Iterator[str]:
        """Yield each contradiction in the position of a run after `step` steps, `samples` samples and `tokens` tokens.

        The types and bounds of the fields have been checked before.
        """
        for number, stream in enumerate(self.streams):
            name = f"position.streams.{number}"
            ranges = [*stream.left_out, (stream.taken, 1)]
            if any(first + count > after for (first, count), (after, _) in pairwise(ranges)):
                yield f"{name}.left_out is not a rising list of ranges below taken {stream.taken}"
            if stream.dataset == SYNTHETIC and stream.path != SYNTHETIC:
                yield f"{name}.path is {stream.path!r} of dataset {stream.dataset[:12]}"
        yield from self._blend_faults()
        trained = sum(stream.tokens_read for stream in self.streams)
        if self.steps != step:
            yield f"position.stretches have {self.steps} steps, progress.step is {step}"
        if self.tokens != trained:
            yield f"position.stretches have {self.tokens} tokens, position.streams {trained}"
        if self.tokens != tokens:
            yield f"position.stretches have {self.tokens} tokens, progress.tokens is {tokens}"
        if self.samples != samples:
            yield f"position.streams have taken {self.samples} samples, progress.consumed_samples is {samples}"

    def _blend_faults(self) -> Iterator[str]:
        numbers = [share.stream for share in self.blend]
        if not numbers and self.streams:
            yield "position.blend is empty although streams were read"
        if any(left >= right for left, right in pairwise(numbers)) or any(
            number >= len(self.streams) for number in numbers
        ):
            yield f"position.blend names streams {numbers}, but only {len(self.streams)} exist"
            return
        if len({(stream.sequence_length, stream.packing, stream.retired) for stream in self.current}) > 1:
            yield "position.blend mixes sequence lengths, packings or retired streams"
        if any(stream.retired for stream in self.current):
            yield "position.blend names a retired stream"
        period = sum(self.weights)
        if self.weights and (period > MAXIMUM_PERIOD or math.gcd(*self.weights) != 1):
            yield (
                f"position.blend has weights {list(self.weights)[:8]}, which are not reduced to the smallest whole "
                "numbers"
            )
        taken = sum(stream.taken for stream in self.current)
        if self.dealt > taken:
            yield f"position.dealt is {self.dealt}, but its streams have taken {taken}"
        for share, stream in zip(self.blend, self.current, strict=True):
            if stream.taken < self.dealt * share.weight // period:
                yield (
                    f"position.dealt is {self.dealt}, more than position.streams.{share.stream}.taken "
                    f"{stream.taken} allows"
                )


START = Position()


def _stream_of(streams: Sequence[Stream], source: Source, wanted: Wanted, used: Sequence[int]) -> int | None:
    """Return the number of the source's first stream that is not used yet."""
    for number, stream in enumerate(streams):
        if number not in used and stream.is_of(source.dataset, wanted.sequence_length, wanted.packing):
            return number
    return None


def _new_stream(source: Source, wanted: Wanted, number: int) -> Stream:
    kind: Packing | Literal["synthetic"] = "synthetic" if source.dataset == SYNTHETIC else wanted.packing
    return Stream(
        dataset=source.dataset,
        path=source.path,
        dataset_tokens=source.tokens,
        sequence_length=wanted.sequence_length,
        packing=wanted.packing,
        order=f"{order_key(kind, wanted.seed, number):016x}",
        taken=0,
    )


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Join adjacent ranges of a list in ascending order."""
    joined: list[Range] = []
    for first, count in ranges:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return tuple(joined)
