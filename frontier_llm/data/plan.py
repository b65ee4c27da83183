"""Lists the data that a run will read, by phase: sources, sizes, tokenizers, epochs, and data that is repeated, never
read or left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from frontier_llm.config import RunConfig
from frontier_llm.data.identity import course, datasets_of
from frontier_llm.data.meta import read_meta
from frontier_llm.data.position import START, SYNTHETIC, Position, Stream
from frontier_llm.units import format_count


@dataclass(frozen=True)
class PlannedSource:
    """The tokens that one phase reads from one dataset."""

    phase: int
    first_step: int  # steps are counted from 1
    last_step: int
    path: str
    dataset_tokens: int  # 0 for synthetic data
    tokenizer: str  # '' if the dataset has no record
    sequence_length: int
    share: float  # fraction of the phase's samples
    tokens: int  # tokens read in the phase
    epochs: float | None  # epochs in the phase; None for synthetic data
    epochs_by_then: float | None  # epochs from the run's start to the end of the phase, over all sequence lengths


@dataclass(frozen=True)
class DataPlan:
    """Data that a run reads from a position to its end."""

    after_step: int  # number of steps done at the position from which the plan begins
    sources: tuple[PlannedSource, ...]
    notes: tuple[str, ...]  # data that is repeated, never read or left out


def data_plan(run: RunConfig, position: Position = START) -> DataPlan:
    """Return the plan of the data that the run reads from `position` on. Raises DataError for unreadable data."""
    begin = position
    datasets = datasets_of([run])
    sources: list[PlannedSource] = []
    for phase, after in course(run, position, datasets):
        total = sum(after.weights)
        for share in after.blend:
            stream = after.streams[share.stream]
            before = position.streams[share.stream].tokens_read if share.stream < len(position.streams) else 0
            tokens = stream.tokens_read - before
            meta = None if stream.dataset == SYNTHETIC else read_meta(stream.path)
            sources.append(
                PlannedSource(
                    phase=phase.number,
                    first_step=position.steps + 1,
                    last_step=phase.end,
                    path=stream.path,
                    dataset_tokens=stream.dataset_tokens,
                    tokenizer="" if meta is None else meta.tokenizer,
                    sequence_length=stream.sequence_length,
                    share=share.weight / total,
                    tokens=tokens,
                    epochs=tokens / stream.dataset_tokens if stream.dataset_tokens else None,
                    epochs_by_then=after.epochs_of(stream.dataset),
                )
            )
        position = after
    return DataPlan(begin.steps, tuple(sources), tuple(_notes(position)))


def _notes(end: Position) -> Iterator[str]:
    """Yield a note for each dataset that will be repeated, read in part or left out at the end of the run."""
    for dataset, last in end.datasets().items():
        epochs = end.epochs_of(dataset)
        if epochs is None:
            continue
        read = format_count(end.tokens_of(dataset))
        tokens = format_count(last.dataset_tokens)
        if epochs > 1:
            yield f"{last.path} is read {epochs:.3g} times: it has {tokens} tokens, and the run reads {read}"
        elif epochs < 1:
            yield f"{1 - epochs:.1%} of {last.path} is never read: it has {tokens} tokens, and the run reads {read}"
        streams = [stream for stream in end.streams if stream.dataset == dataset and stream.taken]
        if len(streams) > 1:
            parts = ", ".join(f"{format_count(stream.tokens_read)} {_order(stream)}" for stream in streams)
            yield f"{last.path} is read in {len(streams)} orders, so a token can be read twice: {parts}"
    for stream in end.streams:
        if stream.left_out:
            tokens = format_count(stream.samples_left_out * stream.sequence_length)
            ranges = ", ".join(f"{first} to {first + count - 1}" for first, count in stream.left_out[:5])
            yield f"{stream.path}: {stream.samples_left_out} samples ({tokens} tokens) were left out: {ranges}"


def _order(stream: Stream) -> str:
    if stream.retired:
        return f"at length {stream.sequence_length} (restarted)"
    return f"at length {stream.sequence_length}"
