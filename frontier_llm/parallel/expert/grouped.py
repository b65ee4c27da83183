"""Matrix products of MoE layers: linear layers over rows that are grouped by expert, and the router's logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from frontier_llm.ops import statistics_dtype
from frontier_llm.parallel.tensor import Declared, Factor, LayerContext, ShardedParameter


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x_Mk: Tensor, weight: ShardedParameter, ends_E: Tensor, context: LayerContext) -> Tensor:
        ctx.context = context
        ctx.weight = weight
        ctx.ends_E = ends_E
        ctx.save_for_backward(x_Mk)
        return context.ops.grouped_linear(x_Mk, weight.detach().flatten(1, -2), ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_Mk,) = ctx.saved_tensors
        grad_Mo = grads[0].contiguous()
        ends_E = ctx.ends_E
        ops = ctx.context.ops
        grad_x = ops.grouped_input_gradient(grad_Mo, ctx.weight.detach().flatten(1, -2), ends_E)
        factors = Factor(grad_Mo), Factor(x_Mk)

        def accumulate(gradient: Tensor) -> None:
            grad_Mo, x_Mk = (factor.whole() for factor in factors)
            ops.accumulate_grouped_gradient_(gradient.flatten(1, -2), grad_Mo, x_Mk, ends_E)

        return grad_x, ctx.context.gradients.submit(ctx.weight, accumulate, factors), None, None


class GroupedLinear(nn.Module):
    """Linear layers without bias, one for each expert of this rank: (M, k) → (M, o).

    The rows of x must be sorted by expert.
    """

    def __init__(self, context: LayerContext, declared: Declared, name: str) -> None:
        super().__init__()
        self.context = context
        self.weight = declared[f"{name}.weight"].accumulated_by_layer()

    def forward(self, x_Mk: Tensor, ends_E: Tensor) -> Tensor:
        """Multiply the rows of each expert by its weight. The rows of expert e end before row `ends_E[e]`."""
        return _GroupedLinear.apply(x_Mk, self.weight, ends_E, self.context)


class _RouterProduct(Function):
    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, weight_EH: ShardedParameter, context: LayerContext) -> Tensor:
        ctx.context = context
        ctx.weight = weight_EH
        ctx.save_for_backward(x_NH)
        return x_NH.to(weight_EH.dtype) @ weight_EH.detach().t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_NH,) = ctx.saved_tensors
        (grad_NE,) = grads
        weight_EH = ctx.weight
        factors = Factor(grad_NE), Factor(x_NH)

        def accumulate(gradient_EH: Tensor) -> None:
            grad_NE, x_NH = (factor.whole() for factor in factors)
            gradient_EH.addmm_(grad_NE.t().to(gradient_EH.dtype), x_NH.to(gradient_EH.dtype))

        grad_x = (grad_NE @ weight_EH.detach()).to(x_NH.dtype)
        return grad_x, ctx.context.gradients.submit(weight_EH, accumulate, factors), None


def router_product(x_NH: Tensor, weight_EH: ShardedParameter, context: LayerContext) -> Tensor:
    """Compute the router's logits: (N, H) → (N, E), in fp32 (fp64 under fp64) for every working type.

    In bf16 or fp16, rounding would decide between experts with almost equal scores.
    """
    assert weight_EH.dtype == statistics_dtype(context.dtype)
    return _RouterProduct.apply(x_NH, weight_EH, context)
