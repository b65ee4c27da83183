"""MoE routing on the GPU. Each Triton program processes a few tokens, and keeps all their logits in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from frontier_llm.errors import BackendError
from frontier_llm.ops.differentiable import DifferentiableOps
from frontier_llm.ops.kernel_table import MOST_CHOICES, ROUTE_BLOCKS
from frontier_llm.ops.prebuilt import Kernels
from frontier_llm.ops.routing import Routing


def _variant(experts: int, top_k: int) -> str:
    if experts > ROUTE_BLOCKS[-1] or top_k > MOST_CHOICES:
        what = (
            f"the router chooses {top_k} of {experts} experts, and the kernel supports at most {MOST_CHOICES} of "
            f"{ROUTE_BLOCKS[-1]}"
        )
        raise BackendError(what, "set ops.experts=reference")
    return f"e{next(block for block in ROUTE_BLOCKS if block >= experts)}"


class GpuRouting(DifferentiableOps):
    """Implements the routing ops of `ops.reference` with one set of GPU kernels."""

    kernels: Kernels

    def route_forward(
        self, logits_NE: Tensor, bias_E: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, weights and experts. Raises BackendError for more experts or choices than the kernel has."""
        rows, count = logits_NE.shape
        top_k = routing.top_k
        scores = torch.empty_like(logits_NE)
        weights = logits_NE.new_empty(rows, top_k)
        experts = torch.empty(rows, top_k, dtype=torch.int64, device=logits_NE.device)
        variant = _variant(count, top_k)
        grid = (-(-rows // self.kernels.block("route_forward", variant, "BLOCK_N")), 1, 1)
        self.kernels.launch(
            "route_forward",
            logits_NE.dtype,
            variant,
            grid,
            logits=logits_NE,
            bias=bias_E,
            scores=scores,
            weights=weights,
            experts=experts,
            rows=rows,
            count=count,
            top_k=top_k,
            scale=routing.scale,
            sigmoid=int(routing.sigmoid),
            normalise=int(routing.normalise),
            has_bias=int(bias_E is not None),
        )
        return scores, weights, experts

    def route_backward(
        self, grad_scores_NE: Tensor, grad_weights_Nk: Tensor, scores_NE: Tensor, experts_Nk: Tensor, routing: Routing
    ) -> Tensor:
        """Return the gradient of the logits."""
        rows, count = scores_NE.shape
        top_k = routing.top_k
        grad_logits = torch.empty_like(scores_NE)
        variant = _variant(count, top_k)
        grid = (-(-rows // self.kernels.block("route_backward", variant, "BLOCK_N")), 1, 1)
        self.kernels.launch(
            "route_backward",
            scores_NE.dtype,
            variant,
            grid,
            grad_scores=grad_scores_NE,
            grad_weights=grad_weights_Nk,
            scores=scores_NE,
            experts=experts_Nk,
            grad_logits=grad_logits,
            rows=rows,
            count=count,
            top_k=top_k,
            scale=routing.scale,
            sigmoid=int(routing.sigmoid),
            normalise=int(routing.normalise),
        )
        return grad_logits
