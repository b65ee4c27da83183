"""Matrix products of a layer and of the head, which the step's benchmark and the calibration time one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from frontier_llm.blueprint.items import Phase, Product, Software
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.work import block_work, head_work
from frontier_llm.config import ModelConfig
from frontier_llm.ops.reference import Ops

Call = Callable[[], Any]


def gemm_shapes(model: ModelConfig, tokens: int, tp: int) -> list[tuple[str, int, int, int, int]]:
    """Return (name, M, N, K, count per microbatch) of the forward products on one tensor-parallel rank.

    The backward pass has twice the FLOPs. Products of experts are left out, because their sizes depend on the router.
    """
    layout = Layout(tp=tp, micro_batch=tokens // model.sequence_length)
    software = Software()
    return [
        (one.parameter.removeprefix("layers.0.").removesuffix(".weight"), one.m, one.n, one.k, count)
        for items, count in (
            (block_work(model, layout, software), model.layers),
            (head_work(model, layout, software), 1),
        )
        for one in (item.work for item in items if item.phase is Phase.F)
        if isinstance(one, Product) and one.parameter and one.batch == 1
    ]


def product_calls(ops: Ops, x_MK: Tensor, w_NK: Tensor, g_MN: Tensor) -> dict[str, tuple[Call, Call]]:
    """Return a product and its two gradients by name, each as this project's call and as torch's call.

    The weight gradient is added to an fp32 buffer.
    """
    total_NK = torch.zeros(w_NK.shape, device=w_NK.device)
    return {
        "linear": (lambda: ops.linear(x_MK, w_NK, None), lambda: x_MK @ w_NK.T),
        "linear_input_gradient": (lambda: ops.linear_input_gradient(g_MN, w_NK), lambda: g_MN @ w_NK),
        "weight_gradient": (
            lambda: ops.accumulate_weight_gradient_(total_NK, g_MN, x_MK),
            lambda: total_NK.add_(g_MN.T @ x_MK),
        ),
    }


def operands(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return random input (M, K), weight (N, K) and output gradient (M, N) of a product."""
    x, w, g = (torch.randn(shape, dtype=dtype, device=device) for shape in ((M, K), (N, K), (M, N)))
    return x, w, g
