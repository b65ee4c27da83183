"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101).

One fused kernel unscales, clips, updates, and rounds the weights.
"""

from __future__ import annotations

from torch import Tensor

from frontier_llm.blueprint.optimizers import ADAMW
from frontier_llm.config import OptimizerConfig
from frontier_llm.ops import AdamWUpdate, Ops
from frontier_llm.optim.registry import Slice, register


class AdamW:
    """Update by AdamW (implements `SliceUpdate`)."""

    def __init__(self, config: OptimizerConfig, ops: Ops) -> None:
        self._config = config
        self._ops = ops

    def update(self, part: Slice, lr: float, step: int, grad_scale: float | Tensor) -> None:
        """Update `part` in place with step number `step`, counted from 1."""
        decay = self._config.weight_decay if part.decay else 0.0
        update = AdamWUpdate(lr, *self._config.betas, self._config.eps, decay, step, grad_scale)
        self._ops.adamw_(
            part.master,
            part.gradient,
            part.states["exp_avg"],
            part.states["exp_avg_sq"],
            part.weights,
            update,
        )


register(ADAMW, AdamW)
