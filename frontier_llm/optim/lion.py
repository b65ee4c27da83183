"""Lion (Chen et al. 2023, arXiv:2302.06675): moves each weight by the sign of an interpolated momentum.

    W <- W - lr (sign(beta1 M + (1 - beta1) G) + decay W),   M <- beta2 M + (1 - beta2) G

Its state is half as large as AdamW's. Every element moves by lr. Therefore lr should be a third to a tenth of AdamW's,
and the weight decay larger by the same factor. The paper uses betas of 0.9 and 0.99.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frontier_llm.blueprint.optimizers import LION
from frontier_llm.config import OptimizerConfig
from frontier_llm.ops import Ops
from frontier_llm.optim.registry import Slice, register


class Lion:
    """Update by Lion (implements `SliceUpdate`)."""

    def __init__(self, config: OptimizerConfig, ops: Ops) -> None:
        self._config = config

    @torch.no_grad()
    def update(self, part: Slice, lr: float, step: int, grad_scale: float | Tensor) -> None:
        """Update `part` in place with step number `step`, counted from 1."""
        beta1, beta2 = self._config.betas
        momentum = part.states["momentum"]
        gradient = part.gradient * grad_scale
        direction = momentum.lerp(gradient, 1 - beta1).sign_()
        part.apply(direction, step_size=lr, decay=lr * self._config.weight_decay)
        momentum.lerp_(gradient, 1 - beta2)


register(LION, Lion)
