"""Back-end with the ops of apex (fused norms, multi-tensor Adam), with the interface of `ops.reference`.

This code has never run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .reference import AdamWUpdate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last dim."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine  # type: ignore[import-not-found, unused-ignore]

    return fused_rms_norm_affine(x, weight, weight.shape, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return LayerNorm over the last dim. apex requires a bias, so a missing bias is replaced by zeros."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine  # type: ignore[import-not-found, unused-ignore]

    return fused_layer_norm_affine(x, weight, torch.zeros_like(weight) if bias is None else bias, weight.shape, eps)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual). apex has no fused add, so the sum is a separate pass."""
    total = x + residual
    if kind == "rmsnorm":
        return rms_norm(total, weight, eps), total
    return layer_norm(total, weight, bias, eps), total


def adamw_(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, weights_out: Tensor, update: AdamWUpdate
) -> None:
    """Update with multi_tensor_adam in AdamW mode. Gradient scaling and the rounded copy are separate passes."""
    import amp_C  # type: ignore[import-not-found, unused-ignore]
    from apex.multi_tensor_apply import multi_tensor_applier  # type: ignore[import-not-found, unused-ignore]

    overflow = torch.zeros(1, dtype=torch.int32, device=master.device)
    lists: list[list[Any]] = [[grad.float() * update.grad_scale], [master], [exp_avg], [exp_avg_sq]]
    options = (update.lr, update.beta1, update.beta2, update.eps, update.step)
    # trailing arguments: 1 = decoupled decay, 1 = bias correction, decay
    multi_tensor_applier(amp_C.multi_tensor_adam, overflow, lists, *options, 1, 1, update.weight_decay)
    if weights_out.data_ptr() != master.data_ptr():
        weights_out.copy_(master)


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of x², computed from apex's fp32 norm."""
    import amp_C  # type: ignore[import-not-found, unused-ignore]
    from apex.multi_tensor_apply import multi_tensor_applier  # type: ignore[import-not-found, unused-ignore]

    overflow = torch.zeros(1, dtype=torch.int32, device=x.device)
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [[x.detach()]], False)
    return norm.double().square().squeeze()
