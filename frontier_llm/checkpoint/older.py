"""Converts the data position of checkpoints with format version 3, by the formulas of the program that wrote them.

In version 3 the position was the number of steps. Each combination of a blend and a sequence length had its own sample
count. The order of samples depended on the number of the first phase that read the blend, and a rewind shifted all
later steps. If a change of batch, weights or data had missed or repeated samples, this was not recorded, and cannot be
recovered.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.config import RunConfig, phases_of
from frontier_llm.data.blend import blend_of, whole_weights
from frontier_llm.data.identity import Dataset, wanted
from frontier_llm.data.position import (
    START,
    SYNTHETIC,
    Position,
    Range,
    Share,
    Stream,
    Stretch,
    Wanted,
    derive_key,
    order_key,
)
from frontier_llm.errors import CheckpointError


@dataclass
class _Counted:
    """A stream in version 3: one blend at one sequence length, with one sample count."""

    wanted: Wanted
    number: int  # number of the first phase that read this blend
    next: int = 0  # index of the next sample
    trained: int = 0
    left_out: list[Range] = field(default_factory=list)

    def pass_over(self, sample: int) -> None:
        """Skip to sample `sample`. The samples before this sample are left out."""
        if sample > self.next:
            self.left_out.append((self.next, sample - self.next))
            self.next = sample

    def streams(self) -> list[Stream]:
        """Return one stream per source. The streams have the sample orders of version 3."""
        seed = self.wanted.seed
        if self.number > 1:
            seed = derive_key("phase", seed, self.number)
        blend = blend_of(self.weights)
        streams = []
        for place, source in enumerate(self.wanted.sources):
            key = order_key(self.wanted.packing, seed, place)
            if source.dataset == SYNTHETIC:
                key = order_key("synthetic", self.wanted.seed, self.number - 1)
            before = [
                (blend.before(first, place), blend.before(first + count, place)) for first, count in self.left_out
            ]
            streams.append(
                Stream(
                    dataset=source.dataset,
                    path=source.path,
                    dataset_tokens=source.tokens,
                    sequence_length=self.wanted.sequence_length,
                    packing=self.wanted.packing,
                    order=f"{key:016x}",
                    taken=blend.before(self.next, place),
                    left_out=tuple((first, end - first) for first, end in before if end > first),
                )
            )
        return streams

    @property
    def weights(self) -> tuple[int, ...]:
        """Integer weights, in the order of the configuration."""
        return tuple(whole_weights([source.weight for source in self.wanted.sources]))


def position_of(manifest: Manifest, datasets: Mapping[str, Dataset]) -> Position:
    """Return the data position of the run that wrote a checkpoint, or START for imported weights.

    `datasets` are the datasets that the run names now. They supply values that the manifest does not record. Raises
    CheckpointError if this version cannot read the manifest's configuration, or if its steps and rewinds contradict
    each other.
    """
    progress = manifest.progress
    if progress.position is not None:
        return progress.position
    if progress.step == 0:
        return START
    try:
        run = RunConfig.model_validate(manifest.config)
    except ValidationError as error:
        fix = "resume it once with the version of frontier_llm that wrote it"
        raise CheckpointError(
            "its configuration cannot be read, so its position in the data is unknown",
            fix,
        ) from error
    known = {path: Dataset(identity, _tokens(identity, datasets)) for path, identity in manifest.data.items()}
    try:
        return _counted(run, progress.step, _rewinds(progress.policy), _Known({**datasets, **known}))
    except (ValidationError, LookupError, TypeError, ValueError) as error:
        what = f"its steps and rewinds contradict each other: {type(error).__name__}"
        raise CheckpointError(what, "restore the checkpoint from a copy", "progress.policy.rewinds") from error


class _Known(dict[str, Dataset]):
    """Datasets by path. A path without a known identity counts as a dataset of its own."""

    def __missing__(self, path: str) -> Dataset:
        return Dataset(hashlib.sha256(path.encode()).hexdigest(), 0)


def _tokens(identity: str, datasets: Mapping[str, Dataset]) -> int:
    return next((dataset.tokens for dataset in datasets.values() if dataset.identity == identity), 0)


def _rewinds(policy: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (step, number of steps left out so far) of each rewind."""
    rewinds = [(int(entry["step"]), int(entry["left_out_steps"])) for entry in policy.get("rewinds", [])]
    total = int(policy.get("left_out_steps", 0))
    if not total or (rewinds and rewinds[-1][1] == total):
        return rewinds
    return [*rewinds, (0, total)]


def _counted(run: RunConfig, step: int, rewinds: list[tuple[int, int]], datasets: Mapping[str, Dataset]) -> Position:
    counted: dict[Any, _Counted] = {}
    stretches: list[Stretch] = []
    current = None
    for phase in phases_of(run):
        if phase.first >= step:
            break
        config = phase.config
        batch = phase.config.batch.global_batch
        # The last phase may be longer than in the configuration, because a run can be trained beyond its last step.
        end = step if phase is phases_of(run)[-1] else min(step, phase.end)
        one = counted.setdefault(
            (config.data.train, config.model.sequence_length),
            _Counted(wanted(config, datasets), phase.number),
        )
        current = one
        first_sample = one.trained
        done = phase.first
        for at, left_out in [*sorted(rewinds), (end, 0)]:
            stop = min(max(at, phase.first), end)
            one.next += (stop - done) * batch
            done = stop
            if left_out and (at < end or at == step):
                one.pass_over(first_sample + (stop - phase.first + left_out) * batch)
        one.trained += (end - phase.first) * batch
        stretches.append(Stretch(steps=end - phase.first, tokens_per_step=phase.tokens_per_step))
    assert current is not None
    return _joined(list(counted.values()), current, _merged(stretches))


def _joined(counted: list[_Counted], current: _Counted, stretches: tuple[Stretch, ...]) -> Position:
    """Return the position at which the streams of the current blend continue.

    If several blends contain the same dataset with the same samples, only the last of these streams continues.
    """
    streams: list[Stream] = []
    replaced: Counter[Any] = Counter()  # (dataset, length, packing) → number of such streams in later blends
    for one in reversed([*(other for other in counted if other is not current), current]):
        mentions: Counter[Any] = Counter()
        placed = []
        for stream in one.streams():
            kind = (stream.dataset, stream.sequence_length, stream.packing)
            mentions[kind] += 1
            placed.append(stream.model_copy(update={"retired": mentions[kind] <= replaced[kind]}))
        replaced |= mentions
        streams = placed + streams
    first = len(streams) - len(current.weights)
    blend = tuple(Share(stream=first + place, weight=weight) for place, weight in enumerate(current.weights))
    return Position(streams=tuple(streams), blend=blend, dealt=current.next, stretches=stretches)


def _merged(stretches: list[Stretch]) -> tuple[Stretch, ...]:
    merged: list[Stretch] = []
    for stretch in stretches:
        if merged and merged[-1].tokens_per_step == stretch.tokens_per_step:
            stretch = Stretch(steps=merged.pop().steps + stretch.steps, tokens_per_step=stretch.tokens_per_step)
        merged.append(stretch)
    return tuple(merged)
