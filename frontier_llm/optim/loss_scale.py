"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740); a scale of 1 that never moves for other types."""

from __future__ import annotations

from dataclasses import dataclass

from frontier_llm.config import PrecisionConfig


@dataclass
class LossScaler:
    """Halves on overflow, doubles after `window` clean steps; the same on every rank, since all see the same gradient norm."""

    scale: float
    window: int
    minimum: float
    dynamic: bool
    clean_steps: int = 0

    @classmethod
    def create(cls, precision: PrecisionConfig) -> LossScaler:
        """The scaler for a run's precision."""
        dynamic = precision.dtype == "fp16"
        return cls(precision.initial_loss_scale if dynamic else 1.0, precision.loss_scale_window, precision.min_loss_scale, dynamic)

    def update(self, overflowed: bool) -> None:
        """Account for one step."""
        if not self.dynamic:
            return
        self.clean_steps = 0 if overflowed else self.clean_steps + 1
        if overflowed:
            self.scale = max(self.scale / 2, self.minimum)
        elif self.clean_steps % self.window == 0:
            self.scale *= 2
