"""How many checkpoints a run writes, and which shipped runs write them."""

from __future__ import annotations

from frontier_llm.config.schema import TrainConfig

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
