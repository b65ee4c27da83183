"""MoE on the GPU: routing, the matrix products of experts, and gathered rows.

A program of the router processes a few tokens, and keeps all their logits in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frontier_llm.errors import BackendError
from frontier_llm.ops.differentiable import DifferentiableOps
from frontier_llm.ops.driver import block_count
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
    """Implements the ops for experts in `ops.reference` with one set of GPU kernels."""

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

    def rows_grid(self, x: Tensor, kernel: str, variant: str) -> tuple[int, int, int]:
        """Return the grid with a program for each row and block of columns."""
        return (
            x.numel() // max(1, x.shape[-1]),
            block_count(x.shape[-1], self.kernels.block(kernel, variant, "BLOCK")),
            1,
        )

    def grouped_linear(self, x_Mk: Tensor, weight_Eok: Tensor, ends_E: Tensor) -> Tensor:
        """Return x @ weight[e]ᵀ for the rows of each group e, in bf16 or fp16.

        The host does not read `ends_E`. The grid has enough programs for any distribution of the rows over groups.
        """
        return self._grouped_product(x_Mk, weight_Eok, ends_E, "linear", weight_Eok.shape[1])

    def grouped_input_gradient(self, grad_Mo: Tensor, weight_Eok: Tensor, ends_E: Tensor) -> Tensor:
        """Return grad @ weight[e] for the rows of each group e."""
        return self._grouped_product(grad_Mo, weight_Eok, ends_E, "input-gradient", weight_Eok.shape[2])

    def _grouped_product(self, x: Tensor, weight_Eok: Tensor, ends_E: Tensor, variant: str, columns: int) -> Tensor:
        x = x.detach().contiguous()
        groups = len(ends_E)
        rows, width = (self.kernels.block("grouped_product", variant, f"BLOCK_{side}") for side in "MN")
        out = x.new_empty(len(x), columns)
        grid = (block_count(columns, width), len(x) // rows + groups, 1)
        self.kernels.launch(
            "grouped_product",
            x.dtype,
            variant,
            grid,
            x=x,
            weight=weight_Eok.detach(),
            ends=ends_E,
            out=out,
            groups=groups,
            columns=columns,
            depth=x.shape[1],
        )
        return out

    def accumulate_grouped_gradient_(
        self, main_grad_Eok: Tensor, grad_Mo: Tensor, x_Mk: Tensor, ends_E: Tensor
    ) -> None:
        """Add gradᵀ @ x over the rows of each group e to main_grad[e]. The rows are summed in registers."""
        groups, outputs, inputs = main_grad_Eok.shape
        height, width = (self.kernels.block("grouped_weight_gradient", "any", f"BLOCK_{side}") for side in "NK")
        self.kernels.launch(
            "grouped_weight_gradient",
            x_Mk.dtype,
            "any",
            (block_count(inputs, width), block_count(outputs, height), groups),
            grad=grad_Mo.detach().contiguous(),
            x=x_Mk.detach().contiguous(),
            ends=ends_E,
            main_grad=main_grad_Eok,
            outputs=outputs,
            inputs=inputs,
        )

    def gather_rows(self, x_NH: Tensor, places_Mf: Tensor) -> Tensor:
        """Return for each row of `places_Mf` the sum of the f rows of x that have these indices.

        A negative index adds nothing. The kernel needs no atomics and no zeroed output.
        """
        x = x_NH.detach().contiguous()
        rows, fan = places_Mf.shape
        columns = x_NH.shape[1]
        out = x.new_empty(rows, columns)
        self.kernels.launch(
            "gather_rows",
            x.dtype,
            "any",
            self.rows_grid(out, "gather_rows", "any"),
            x=x,
            places=places_Mf.contiguous(),
            out=out,
            fan=fan,
            columns=columns,
        )
        return out
