"""Learning-rate schedule and dynamic loss scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

from frontier_llm.config import OptimizerConfig, RunConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of step `step` (counted from 0) of a run of `total_steps`.

    After a linear warm-up over warmup_steps, `schedule` selects the shape: cosine (Loshchilov & Hutter 2017, as in
    Megatron), linear, constant, or wsd. wsd (warm-up-stable-decay, Hu et al. 2024) is constant, with a linear decay
    over the last decay_steps.
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
    """Return the first step of wsd's decay. If `decay_steps` is None, the decay takes the last tenth of the run."""
    return total_steps - (total_steps // 10 if decay_steps is None else decay_steps)


# The gradient of a logit is (p - 1 or p) x scale / tokens of the batch. With a loss scale of 1024 per token, the
# largest such gradient is a factor of 32 below fp16's largest number. For probabilities p down to 6e-8 the gradient is
# above fp16's smallest normal number. Matrix products of MI200 flush smaller numbers to zero.
SCALE_PER_TOKEN = 1024


def initial_loss_scale(config: RunConfig) -> float:
    """Return the loss scale of a run's first step.

    It is 1 unless the dtype is fp16. For fp16 it is a power of two unless the configuration sets another value.
    """
    precision = config.precision
    if precision.dtype != "fp16":
        return 1.0
    tokens = config.batch.global_batch * config.model.sequence_length
    return precision.initial_loss_scale or 2.0 ** math.ceil(math.log2(SCALE_PER_TOKEN * tokens))


@dataclass
class LossScaler:
    """Dynamic loss scale: halves on overflow, and doubles after `window` clean steps.

    It is the same on every rank, because all ranks have the same gradient norm.
    """

    scale: float
    window: int
    minimum: float
    dynamic: bool
    clean_steps: int = 0

    @classmethod
    def create(cls, config: RunConfig) -> LossScaler:
        """Return the scaler for a run's precision and batch."""
        precision = config.precision
        return cls(
            initial_loss_scale(config),
            precision.loss_scale_window,
            precision.min_loss_scale,
            precision.dtype == "fp16",
        )

    def update(self, overflowed: bool) -> None:
        """Update the scale after one step."""
        if not self.dynamic:
            return
        self.clean_steps = 0 if overflowed else self.clean_steps + 1
        if overflowed:
            self.scale = max(self.scale / 2, self.minimum)
        elif self.clean_steps % self.window == 0:
            self.scale *= 2
