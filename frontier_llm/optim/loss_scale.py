"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740); a scale of 1 that never moves for
other types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from frontier_llm.config import RunConfig

# A logit's gradient is (p - 1 or p) x scale / tokens of the batch. This much per token stays a factor of 32 below
# fp16's largest number, and
# keeps probabilities down to 6e-8 above its smallest normal one: MI200's matrix products take what is below for zero.
SCALE_PER_TOKEN = 1024


def initial_loss_scale(config: RunConfig) -> float:
    """What the loss of a run's first step is multiplied by; a power of two unless the configuration says otherwise."""
    precision = config.precision
    if precision.dtype != "fp16":
        return 1.0
    tokens = config.batch.global_batch * config.model.sequence_length
    return precision.initial_loss_scale or 2.0 ** math.ceil(math.log2(SCALE_PER_TOKEN * tokens))


@dataclass
class LossScaler:
    """Halves on overflow, doubles after `window` clean steps; the same on every rank, since all see the same
    gradient norm.
    """

    scale: float
    window: int
    minimum: float
    dynamic: bool
    clean_steps: int = 0

    @classmethod
    def create(cls, config: RunConfig) -> LossScaler:
        """The scaler for a run's precision and batch."""
        precision = config.precision
        return cls(
            initial_loss_scale(config),
            precision.loss_scale_window,
            precision.min_loss_scale,
            precision.dtype == "fp16",
        )

    def update(self, overflowed: bool) -> None:
        """Account for one step."""
        if not self.dynamic:
            return
        self.clean_steps = 0 if overflowed else self.clean_steps + 1
        if overflowed:
            self.scale = max(self.scale / 2, self.minimum)
        elif self.clean_steps % self.window == 0:
            self.scale *= 2
