"""The one face of the fused ops: what model, tensor_parallel and optim call, whatever back-end stands behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

Op = Callable[..., Any]


@dataclass(frozen=True)
class Ops:
    """One function per op, chosen once; signatures and meaning are those of the functions in `ops.reference`.

    A trailing underscore says that the first argument is written in place; those ops take no part in autograd.
    """

    attention: Op
    rms_norm: Op
    layer_norm: Op
    add_norm: Op
    rope: Op
    swiglu: Op
    gelu: Op
    cross_entropy_stats: Op
    cross_entropy_backward_: Op
    adamw_: Op
    sum_of_squares: Op
    linear: Op
    linear_input_gradient: Op
    accumulate_weight_gradient_: Op
    accumulate_: Op
    embedding_backward_: Op
