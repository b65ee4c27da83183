"""Elementwise optimizers: AdamW and Lion. The update of an element depends on no other element.

AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101): one fused kernel unscales and clips the gradient, updates the master
weights, and rounds them to the working weights.

Lion (Chen et al. 2023, arXiv:2302.06675) moves each weight by the sign of an interpolated momentum.

    W <- W - lr (sign(beta1 M + (1 - beta1) G) + decay W),   M <- beta2 M + (1 - beta2) G

Lion's state is half as large as AdamW's. Every element changes by lr. Therefore lr should be a third to a tenth of the
value for AdamW, and the weight decay should be larger by the same factor. The paper uses betas of 0.9 and 0.99.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frontier_llm.blueprint.optimizers import ADAMW, LION
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
