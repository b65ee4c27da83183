"""The one face of the fused ops: what model, tensor_parallel and optim call, whatever back-end stands behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# The ops each flag of `OpsConfig` chooses a back-end for.
GROUPS: dict[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "norm": ("rms_norm", "layer_norm", "add_norm"),
    "rope": ("rope",),
    "activation": ("swiglu", "gelu"),
    "cross_entropy": ("cross_entropy_stats", "cross_entropy_backward_"),
    "adamw": ("adamw_", "sum_of_squares"),
    "linear": ("linear", "linear_input_gradient", "accumulate_weight_gradient_"),
    "accumulate": ("accumulate_", "embedding_backward_"),
}


@dataclass(frozen=True)
class Scores:
    """How a query scores the keys of its own and earlier positions: scale * q·k.

    ALiBi (arXiv:2108.12409) adds -slope * (i - j) to score (i, j). Positions see each other only within one document id.
    """

    scale: float
    alibi_slopes_a: Tensor | None = None
    documents_BS: Tensor | None = None


@dataclass(frozen=True)
class AdamWUpdate:
    """One update of AdamW (arXiv:1711.05101). grad * grad_scale is the gradient: the inverse loss scale times the clip factor."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int  # from 1
    grad_scale: Tensor | float = 1.0

    @property
    def step_size(self) -> float:
        """What exp_avg is multiplied by: the learning rate, exp_avg's bias corrected."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root(self) -> float:
        """What sqrt(exp_avg_sq) is multiplied by to correct its bias."""
        return float(1 - self.beta2**self.step) ** -0.5

    @property
    def keep(self) -> float:
        """What decay leaves of a weight."""
        return 1 - self.lr * self.weight_decay


Op = Callable[..., Any]  # of a back-end


@dataclass(frozen=True)
class Ops:
    """One function per op, chosen once; `ops.reference` names the parameters and says what each op means.

    A trailing underscore says that the first argument is written in place; those ops take no part in autograd.
    """

    attention: Callable[[Tensor, Tensor, Tensor, Scores], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, Tensor | None, float, str], tuple[Tensor, Tensor]]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    gelu: Callable[[Tensor, Tensor | None, bool], Tensor]
    cross_entropy_stats: Callable[[Tensor, Tensor, int], Tensor]
    cross_entropy_backward_: Callable[[Tensor, Tensor, int, Tensor, Tensor], Tensor]
    adamw_: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, AdamWUpdate], None]
    sum_of_squares: Callable[[Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    linear_input_gradient: Callable[[Tensor, Tensor], Tensor]
    accumulate_weight_gradient_: Callable[[Tensor, Tensor, Tensor], None]
    accumulate_: Callable[[Tensor, Tensor], None]
    embedding_backward_: Callable[[Tensor, Tensor, Tensor, int], None]
