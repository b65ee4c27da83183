"""A run as its phases: each is the run's own configuration with a few keys changed, over the same mesh and the same
weights.

A run without `train.phases` is one phase. Steps are counted over the whole run, so the learning rate, checkpoints and
intervals know nothing of phases. How much of its data a run has read is not computed from phases: it is recorded
(`data/position.py`).

Also counts the checkpoints that a run writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from frontier_llm.config.schema import PhaseConfig, RunConfig, Section, TrainConfig
from frontier_llm.units import format_count


@dataclass(frozen=True)
class RunPhase:
    """Steps first … end − 1 of a run."""

    number: int  # from 1
    config: RunConfig  # of these steps; says nothing of other phases
    first: int
    end: int

    @property
    def steps(self) -> int:
        """How many."""
        return self.end - self.first

    @property
    def tokens_per_step(self) -> int:
        """Global batch times sequence."""
        return self.config.batch.global_batch * self.config.model.sequence_length

    def describe(self) -> str:
        """'phase 2: steps 101 to 120, 1.31M tokens, sequences of 32768, batch 2'."""
        tokens = format_count(self.steps * self.tokens_per_step)
        where = f"phase {self.number}: steps {self.first + 1} to {self.end}, {tokens} tokens"
        return f"{where}, sequences of {self.config.model.sequence_length}, batch {self.config.batch.global_batch}"


def phases_of(run: RunConfig) -> tuple[RunPhase, ...]:
    """The phases that train.steps reaches, the last of them up to there."""
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
    """The phase of the step after `done` ones; the last one at the end of the run."""
    return next((phase for phase in phases if done < phase.end), phases[-1])


def planned_tokens(phases: tuple[RunPhase, ...]) -> int:
    """Tokens of a whole run that begins at step 0."""
    return sum(phase.steps * phase.tokens_per_step for phase in phases)


def _changed(run: RunConfig, phase: PhaseConfig) -> RunConfig:
    def on_top(section: Section, changes: Section) -> Section:
        return section.model_copy(update={key: value for key, value in changes if value is not None})

    sections = {name: on_top(getattr(run, name), getattr(phase, name)) for name in ("model", "batch", "data")}
    return run.model_copy(update={**sections, "train": run.train.model_copy(update={"phases": ()})})


# model → run file and batch script that train it: real data, and saves at the planner's interval
PRODUCTION = {"gpt-22b": "pretrain_22b", "gpt-175b": "pretrain_175b", "gpt-1t": "pretrain_1t"}


def saves_between(train: TrainConfig, done: int, until: int) -> int:
    """Largest number of checkpoints that steps done + 1 … until write. A stop before the last step may add one."""
    last_inner = min(until, train.steps - 1)  # the last step has its own rule
    reaches_end = done < train.steps <= until
    saves = _multiples(train.save_interval, done, last_inner)
    if train.save_final and reaches_end:
        saves += 1
    if train.keep_best:  # an evaluation that is the best so far saves at once
        saves += _multiples(train.eval_interval, done, last_inner) + reaches_end
    return saves


def saves_nothing(train: TrainConfig) -> bool:
    """True if a run that reaches its last step leaves no checkpoint."""
    return saves_between(train, 0, train.steps) == 0


def _multiples(interval: int, first: int, last: int) -> int:
    """Multiples of `interval` in (first, last]; 0 without an interval."""
    return max(0, last // interval - first // interval) if interval else 0
