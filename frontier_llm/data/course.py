"""The rest of a run, phase by phase, as a series of positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from frontier_llm.config import RunConfig, RunPhase, phases_of
from frontier_llm.data.identity import Dataset, wanted
from frontier_llm.data.position import Position


def course(run: RunConfig, position: Position, datasets: Mapping[str, Dataset]) -> Iterator[tuple[RunPhase, Position]]:
    """(phase, position at its end) of each phase that a run at `position` has still to train in."""
    step = position.steps
    for phase in phases_of(run):
        steps = phase.end - max(phase.first, step)
        if steps > 0:
            position = position.enter(wanted(phase.config, datasets)).advance(phase.config.batch.global_batch, steps)
            yield phase, position
