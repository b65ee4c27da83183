"""Divides a run into phases.

A phase is the run's configuration with a few keys changed. Mesh and weights stay the same. A run without `train.phases`
is one phase.

Steps are counted over the whole run, so learning rate, checkpoints and intervals do not depend on phases. The position
in the data is not computed from phases, because checkpoints record the position (`data/position.py`).

This module also counts the checkpoints that a run writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from frontier_llm.config.schema import PhaseConfig, RunConfig, Section, TrainConfig
from frontier_llm.units import format_count


@dataclass(frozen=True)
class RunPhase:
    """Steps first … end − 1 of a run, counted from 0."""

    number: int  # Counted from 1.
    config: RunConfig  # Configuration of this phase's steps, without train.phases.
    first: int
    end: int

    @property
    def steps(self) -> int:
        """Number of steps of the phase."""
        return self.end - self.first

    @property
    def tokens_per_step(self) -> int:
        """Global batch × sequence length."""
        return self.config.batch.global_batch * self.config.model.sequence_length

    def describe(self) -> str:
        """Return text such as 'phase 2: steps 101 to 120, 1.31M tokens, sequences of 32768, batch 2'."""
        tokens = format_count(self.steps * self.tokens_per_step)
        where = f"phase {self.number}: steps {self.first + 1} to {self.end}, {tokens} tokens"
        return f"{where}, sequences of {self.config.model.sequence_length}, batch {self.config.batch.global_batch}"


def phases_of(run: RunConfig) -> tuple[RunPhase, ...]:
    """Return the phases that start before train.steps. The last phase in the run file extends to train.steps."""
    if not run.train.phases:
        return (RunPhase(1, run, 0, run.train.steps),)
    configs = [_changed(run, phase) for phase in run.train.phases]
    borders = [
        min(step, run.train.steps) for step in accumulate((phase.steps for phase in run.train.phases), initial=0)
    ]
    borders[-1] = run.train.steps
    phases: list[RunPhase] = []
    for number, (config, (first, end)) in enumerate(zip(configs, pairwise(borders), strict=True), 1):
        if first < end:
            phases.append(RunPhase(number, config, first, end))
    return tuple(phases)


def phase_at(phases: tuple[RunPhase, ...], done: int) -> RunPhase:
    """Return the phase of the step after `done` steps. At the end of the run this is the last phase."""
    return next((phase for phase in phases if done < phase.end), phases[-1])


def longest_phase(run: RunConfig) -> RunPhase:
    """Return the phase with the longest sequences. A layout is planned for this phase."""
    return max(phases_of(run), key=lambda phase: phase.config.model.sequence_length)


def planned_tokens(phases: tuple[RunPhase, ...]) -> int:
    """Return the number of tokens of a complete run that starts at step 0."""
    return sum(phase.steps * phase.tokens_per_step for phase in phases)


def _changed(run: RunConfig, phase: PhaseConfig) -> RunConfig:
    def on_top(section: Section, changes: Section) -> Section:
        return section.model_copy(update={key: value for key, value in changes if value is not None})

    sections = {name: on_top(getattr(run, name), getattr(phase, name)) for name in ("model", "batch", "data")}
    return run.model_copy(update={**sections, "train": run.train.model_copy(update={"phases": ()})})


# Model → run file and batch script that train this model on real data. The run saves at the planner's interval.
PRODUCTION = {"gpt-22b": "pretrain_22b", "gpt-175b": "pretrain_175b", "gpt-1t": "pretrain_1t"}


def saves_between(train: TrainConfig, done: int, until: int) -> int:
    """Return the largest number of checkpoints that steps done + 1 … until write. A stop before the last step may write
    one more checkpoint.
    """
    last_inner = min(until, train.steps - 1)  # the last step is counted separately
    reaches_end = done < train.steps <= until
    saves = _multiples(train.save_interval, done, last_inner)
    if train.save_final and reaches_end:
        saves += 1
    if train.keep_best:  # a checkpoint is saved at once after an evaluation with the best loss so far
        saves += _multiples(train.eval_interval, done, last_inner) + reaches_end
    return saves


def expired_steps(steps: Sequence[int], keep_checkpoints: int, keep_every: int) -> list[int]:
    """Return the steps whose checkpoints are neither among the newest nor kept by `keep_every`.

    `steps` are sorted newest first. The result can contain the step with the best loss, whose checkpoint the caller
    must keep.
    """
    older = steps[keep_checkpoints:]
    return [step for step in older if not (keep_every and step % keep_every == 0)]


def saves_nothing(train: TrainConfig) -> bool:
    """Return True if a run that reaches its last step writes no checkpoint."""
    return saves_between(train, 0, train.steps) == 0


def _multiples(interval: int, first: int, last: int) -> int:
    """Count the multiples of `interval` in (first, last]. The result is 0 if `interval` is 0."""
    return max(0, last // interval - first // interval) if interval else 0
