"""Back-end for matrix products with weights on a GPU: hipBLASLt or cuBLAS through torch.

It has run on an H200 (docs/benchmarks/h200.md), and never on an AMD GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from frontier_llm import log
from frontier_llm.blueprint.items import WeightGradients

# Number of elements. BLAS and the cross-entropy kernels use 16-byte accesses only if each row begins at a multiple of
# this number.
_ROW_ALIGNMENT = 16


def linear(x: Tensor, weight_ok: Tensor, bias_o: Tensor | None) -> Tensor:
    """Return x @ weightᵀ + bias.

    If the output's width is not a multiple of `_ROW_ALIGNMENT` (logits of a vocabulary), its rows are padded in memory.
    With a bias or with autograd the output is contiguous, because autograd does not support padded rows.
    """
    width = weight_ok.shape[0]
    if width % _ROW_ALIGNMENT == 0 or bias_o is not None or torch.is_grad_enabled():
        return F.linear(x, weight_ok, bias_o)
    shape = x.shape[:-1]
    step = -(-width // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    strides = torch.empty(*shape, step, device="meta").stride()
    # `out` is not a view, so an autograd function can return it
    out = x.new_empty_strided(shape + weight_ok.shape[:1], strides)
    torch.mm(x.reshape(-1, x.shape[-1]), weight_ok.t(), out=out.view(-1, width))
    return out


def linear_input_gradient(grad_output: Tensor, weight_ok: Tensor) -> Tensor:
    """Return grad_output @ weight."""
    return grad_output @ weight_ok


def accumulate_weight_gradient_(main_grad_ok: Tensor, grad_output_No: Tensor, x_Nk: Tensor) -> None:
    """Add grad_outputᵀ @ x to main_grad, with the first of the methods below that this build of torch supports."""
    with torch.no_grad():
        grad_oN = grad_output_No.reshape(-1, grad_output_No.shape[-1]).t()
        x_Nk = x_Nk.reshape(-1, x_Nk.shape[-1])
        if grad_oN.dtype == main_grad_ok.dtype:
            main_grad_ok.addmm_(grad_oN, x_Nk)
        else:
            method = weight_gradient_method(grad_oN.dtype, grad_oN.device)
            _METHODS[method](main_grad_ok, grad_oN, x_Nk)


def _in_the_product(main_grad_ok: Tensor, grad_oN: Tensor, x_Nk: Tensor) -> None:
    """Add the gradient in the matrix product itself, which has an fp32 output."""
    torch.addmm(main_grad_ok, grad_oN, x_Nk, out_dtype=torch.float32, out=main_grad_ok)


def _fp32_product(main_grad_ok: Tensor, grad_oN: Tensor, x_Nk: Tensor) -> None:
    """Compute the product in fp32, then add it to `main_grad_ok`."""
    main_grad_ok.add_(torch.mm(grad_oN, x_Nk, out_dtype=torch.float32))


def _rounded_product(main_grad_ok: Tensor, grad_oN: Tensor, x_Nk: Tensor) -> None:
    """Round the product to 16 bits, then add it in fp32, as Megatron-LM does without its fused kernel.

    Before pull request 162600 (September 2025), torch for ROCm supports only this method. It adds one rounding error of
    2^-9 per microbatch. An fp32 product of converted inputs would avoid the rounding, but it runs at a quarter of the
    matrix rate (MI250X: 47.9 instead of 191.5 TFLOP/s).
    """
    main_grad_ok.add_(grad_oN @ x_Nk)


_METHODS: dict[WeightGradients, Callable[[Tensor, Tensor, Tensor], None]] = {
    "in-product": _in_the_product,
    "fp32-product": _fp32_product,
    "rounded-product": _rounded_product,
}


@functools.cache
def weight_gradient_method(dtype: torch.dtype, device: torch.device) -> WeightGradients:
    """Return the first method that adds gradients of this type correctly to fp32 on this device.

    Methods are tested once per dtype. If only "rounded-product" is available, this is logged.
    """
    if dtype == torch.float32:
        return "in-product"
    exact: tuple[WeightGradients, ...] = ("in-product", "fp32-product")
    for method in exact:
        total = torch.ones(16, 16, device=device)
        ones = torch.ones(16, 16, dtype=dtype, device=device)
        try:
            _METHODS[method](total, ones, ones)
        except (RuntimeError, TypeError):  # torch does not support the method; includes NotImplementedError
            continue
        if bool((total == 17).all()):
            return method
    log.info(
        f"this torch cannot return products of {dtype} in fp32: the weight gradients of each microbatch are rounded "
        f"before they are added"
    )
    return "rounded-product"
