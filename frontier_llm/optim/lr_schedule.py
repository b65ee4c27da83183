"""Learning rate as a pure function of the step, so that nothing has to be saved or restored."""

from __future__ import annotations

import math

from frontier_llm.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (0-based) of a run of `total_steps`.

    Linear warm-up over warmup_steps, then: cosine (Loshchilov & Hutter 2017, as in Megatron), linear, constant, or
    wsd = constant with a linear decay over the last decay_steps (warm-up-stable-decay, Hu et al. 2024).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        begin = decay_begin(config.decay_steps, total_steps)
        progress = (step + 1 - begin) / max(total_steps - begin, 1)
    else:
        end = config.decay_steps if config.decay_steps is not None else total_steps
        progress = (step + 1 - config.warmup_steps) / max(end - config.warmup_steps, 1)
    progress = min(max(progress, 0.0), 1.0)
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
    return config.min_lr + (config.lr - config.min_lr) * share


def decay_begin(decay_steps: int | None, total_steps: int) -> int:
    """The step from which on the learning rate of wsd falls; without a length of the decay it is the last tenth."""
    return total_steps - (total_steps // 10 if decay_steps is None else decay_steps)
