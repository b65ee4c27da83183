"""Products with weights on a GPU: hipBLASLt or cuBLAS through torch. Untested here for want of a GPU."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight_ok: Tensor, bias_o: Tensor | None = None) -> Tensor:
    """x @ weightᵀ + bias."""
    return F.linear(x, weight_ok, bias_o)


def linear_input_gradient(grad_output: Tensor, weight_ok: Tensor) -> Tensor:
    """grad_output @ weight."""
    return grad_output @ weight_ok


def accumulate_weight_gradient_(main_grad_ok: Tensor, grad_output_No: Tensor, x_Nk: Tensor) -> None:
    """main_grad += grad_outputᵀ @ x with fp32 sums; the product leaves the GEMM in fp32 where the BLAS can."""
    with torch.no_grad():
        grad_oN = grad_output_No.reshape(-1, grad_output_No.shape[-1]).t()
        x_Nk = x_Nk.reshape(-1, x_Nk.shape[-1])
        if grad_oN.dtype == main_grad_ok.dtype:
            main_grad_ok.addmm_(grad_oN, x_Nk)
        elif _has_fp32_output(grad_oN.dtype):
            main_grad_ok.add_(torch.mm(grad_oN, x_Nk, out_dtype=torch.float32))
        else:
            main_grad_ok.addmm_(grad_oN.float(), x_Nk.float())


@functools.cache
def _has_fp32_output(dtype: torch.dtype) -> bool:
    """Whether torch.mm of half-precision inputs can return fp32 on this device; asked once."""
    probe = torch.zeros(16, 16, dtype=dtype, device="cuda")
    try:
        torch.mm(probe, probe, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True
