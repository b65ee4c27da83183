"""Attention back-end that uses torch's scaled_dot_product_attention (SDPA).

SDPA uses torch's own flash kernel on CPUs, AOTriton on ROCm, and flash-attention or cuDNN on NVIDIA GPUs.

Attention over parts of a sequence calls torch's flash kernels directly, because these return the log-sum-exp. The
kernels support rectangular blocks of scores without a mask, and square blocks with the causal mask. They do not support
documents, ALiBi or windows. The functions for parts of a sequence were compared with the reference on a CPU. These
functions have never run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frontier_llm.errors import BackendError

from .dtypes import statistics_dtype
from .reference import Scores, merge, score_bias

_aten: Any = torch.ops.aten


def attention(q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
    """Return causal attention o_SBaD on strided views, without copies of q, k and v.

    The result is that of `reference.attention`. ALiBi, documents and a window are passed as an additive bias
    [B, a, S, S] of the inputs' type. Without these options the causal mask of the kernel is used, which skips the upper
    triangle.
    """
    q_BaSD, k_BgSD, v_BgSD = (tensor.permute(1, 2, 0, 3) for tensor in (q_SBaD, k_SBgD, v_SBgD))
    bias_BaSS: Tensor | None = None
    if scores.alibi_slopes_a is not None or scores.documents_BS is not None or scores.window:
        bias_BaSS = score_bias(
            q_SBaD.shape[0], k_SBgD.shape[0], scores, statistics_dtype(q_SBaD.dtype), q_SBaD.device
        ).to(q_SBaD.dtype)
    o_BaSD = F.scaled_dot_product_attention(
        q_BaSD,
        k_BgSD,
        v_BgSD,
        attn_mask=bias_BaSS,
        is_causal=bias_BaSS is None,
        scale=scores.scale,
        enable_gqa=q_SBaD.shape[2] != k_SBgD.shape[2],
    )
    return o_BaSD.permute(2, 0, 1, 3)


def attention_block(q_SBaD: Tensor, kv_KBgD: tuple[Tensor, ...], scores: Scores) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over one range of keys.

    The keys must all be before the queries, or must end at the same position as the queries. Otherwise BackendError is
    raised.
    """
    merged: tuple[Tensor, Tensor] | None = None
    for keys, causal in _pieces(q_SBaD.shape[0], kv_KBgD[0].shape[0], scores.offset):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBaD, kv_KBgD[0][keys], kv_KBgD[1][keys]))
        flash = (
            _aten._scaled_dot_product_flash_attention_for_cpu if q.is_cpu else _aten._scaled_dot_product_flash_attention
        )
        o_BaSD, logsumexp_BaS, *_ = flash(query=q, key=k, value=v, is_causal=causal, scale=scores.scale)
        merged = merge(merged, o_BaSD.permute(2, 0, 1, 3), logsumexp_BaS.contiguous())
    assert merged is not None
    return merged[0].to(q_SBaD.dtype), merged[1]


def attention_block_backward(
    grad_SBaD: Tensor,
    q_SBaD: Tensor,
    kv_KBgD: tuple[Tensor, ...],
    o_SBaD: Tensor,
    logsumexp_BaS: Tensor,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the contributions of one range of keys to the gradients of q, k and v."""
    grad_q = torch.zeros_like(q_SBaD, dtype=statistics_dtype(q_SBaD.dtype))
    grad_k, grad_v = map(torch.empty_like, kv_KBgD)
    for keys, causal in _pieces(q_SBaD.shape[0], kv_KBgD[0].shape[0], scores.offset):
        grad, q, k, v, o = (
            x.permute(1, 2, 0, 3) for x in (grad_SBaD, q_SBaD, kv_KBgD[0][keys], kv_KBgD[1][keys], o_SBaD)
        )
        flash = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        options = {}
        # The cumulative lengths are None, because all sequences have equal length. Without dropout the kernel does not
        # read the random state.
        if not q.is_cpu:
            unread = torch.zeros(2, dtype=torch.int64, device=q.device)
            options = {
                "cum_seq_q": None,
                "cum_seq_k": None,
                "max_q": q.shape[2],
                "max_k": k.shape[2],
                "philox_seed": unread,
                "philox_offset": unread,
            }
            flash = _aten._scaled_dot_product_flash_attention_backward
        statistics = {"out": o, "logsumexp": logsumexp_BaS.contiguous()}
        parts = flash(
            grad_out=grad,
            query=q,
            key=k,
            value=v,
            **statistics,
            dropout_p=0.0,
            is_causal=causal,
            scale=scores.scale,
            **options,
        )
        part_q, grad_k[keys], grad_v[keys] = (part.permute(2, 0, 1, 3) for part in parts)
        grad_q += part_q
    return grad_q.to(q_SBaD.dtype), grad_k, grad_v


def _pieces(queries: int, keys: int, offset: int) -> Iterator[tuple[slice, bool]]:
    """Yield (range of keys, whether it has a causal mask) so that the ranges cover all visible scores.

    Raises BackendError for shapes that torch's flash kernels do not support.
    """
    if offset >= keys - 1:
        yield slice(keys), False
    elif 0 <= offset == keys - queries:
        if offset:
            yield slice(offset), False
        yield slice(offset, keys), True
    else:
        what = (
            f"{queries} queries from position {offset} attend to {keys} keys: torch's flash attention needs keys that "
            f"end before or with the queries"
        )
        raise BackendError(what, "set ops.attention=reference")


@cache
def blocks_missing(device: str = "cuda") -> str:
    """Return the reason why this GPU cannot compute `attention_block`, or '' (also if there is no GPU).

    The test is attention over two equal keys, whose log-sum-exp is ln 2. AOTriton before July 2025 (ROCm, torch before
    2.8) returns logarithms to the base 2, with which `merge` would compute wrong results.
    """
    if device == "cuda" and not torch.cuda.is_available():
        return ""
    keys = torch.zeros(2, 1, 1, 64, dtype=torch.bfloat16, device=device)
    try:
        logsumexp = attention_block(keys[1:], (keys, keys), Scores(1.0, offset=1))[1].item()
    except RuntimeError as error:
        return f"torch's flash attention does not run on this GPU: {str(error).splitlines()[0]}"
    return (
        ""
        if abs(logsumexp - math.log(2)) < 1e-3
        else f"torch's flash attention computes {logsumexp:.4f} instead of 0.6931 as the log-sum-exp of two zeros"
    )


@cache
def views_missing(device: str = "cuda") -> str:
    """Return the reason why this GPU's attention cannot read views of a fused QKV tensor, or '' (also without a GPU).

    On MI300X a version of torch computed wrong values if `v` was such a view (ROCm/pytorch#3230). Outputs and gradients
    are compared with the results for contiguous copies.
    """
    if device == "cuda" and not (torch.version.hip and torch.cuda.is_available()):
        return ""
    try:
        results = [_with_fused_qkv(device, copied) for copied in (False, True)]
    except (RuntimeError, AssertionError) as failed:  # torch's lazy start of CUDA fails by an assertion
        return f"torch's attention does not run on this GPU: {str(failed).splitlines()[0]}"
    for name, viewed, expected in zip(("output", "gradient"), *results, strict=True):
        error = ((viewed - expected).abs().max() / expected.abs().max()).item()
        if not error < 0.02:  # the limit allows a few rounding errors of bf16
            return f"torch's attention over views of a fused QKV has a wrong {name}: relative error {error:.2g}"
    return ""


def _with_fused_qkv(device: str, copied: bool) -> tuple[Tensor, Tensor]:
    """Return attention's output and the gradient of a fused QKV tensor, in fp32.

    q, k and v are views of it, or contiguous copies of these views.
    """
    fused_SBaXD = torch.arange(128 * 2 * 2 * 3 * 64, device=device).sin().view(128, 2, 2, 3, 64).bfloat16()
    leaf = fused_SBaXD.requires_grad_()
    q_SBaD, k_SBaD, v_SBaD = (part.contiguous() if copied else part for part in leaf.unbind(3))
    o_SBaD = attention(q_SBaD, k_SBaD, v_SBaD, Scores(0.125))
    o_SBaD.float().square().sum().backward()
    assert leaf.grad is not None
    return o_SBaD.detach().float(), leaf.grad.float()
