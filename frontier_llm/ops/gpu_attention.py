"""Flash attention on the prebuilt kernels: layouts without copies, grids, and the three kernels of the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from frontier_llm.errors import BackendError
from frontier_llm.ops.face import Scores
from frontier_llm.ops.kernel_table import HEAD_DIMS
from frontier_llm.ops.prebuilt import Kernels

ROWS_PER_PAD = 128  # of logsumexp, delta and documents; the kernels' _padded


def attention(kernels: Kernels, q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
    """o_SBaD; see `reference.attention`. Raises BackendError for a head dim that no kernel has."""
    head_dim = q_SBaD.shape[-1]
    if head_dim % 16 or head_dim > HEAD_DIMS[-1]:
        what = f"head dim {head_dim}: the prebuilt attention wants a multiple of 16 up to {HEAD_DIMS[-1]}"
        raise BackendError(what, "set ops.attention=sdpa, or another model.head_dim")
    slopes_a, documents_BS = scores.alibi_slopes_a, scores.documents_BS
    if slopes_a is not None or documents_BS is not None:  # one variant has both, so each gets its neutral value
        sequence, batch, heads = q_SBaD.shape[:3]
        slopes_a = q_SBaD.new_zeros(heads) if slopes_a is None else slopes_a.detach()
        documents_BS = q_SBaD.new_zeros(batch, sequence) if documents_BS is None else documents_BS
        # numbers of documents within a row are small, so exact in fp32, where a difference and its size are one instruction each
        documents_BS = pad(documents_BS.float(), (0, _padded(sequence) - sequence), value=-1.0)
        slopes_a = slopes_a.float().contiguous()
    return _Attention.apply(q_SBaD, k_SBgD, v_SBgD, scores.scale, slopes_a, documents_BS, kernels)


def _readable(x: Tensor) -> Tensor:
    """x itself when the kernels' 16-byte accesses can read it where it is, else a contiguous copy."""
    fits = x.stride(-1) == 1 and all(stride % 16 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        slopes: Tensor | None,
        documents: Tensor | None,
        kernels: Kernels,
    ) -> Tensor:
        q, k, v = _readable(q), _readable(k), _readable(v)
        sequence, batch, heads, head_dim = q.shape
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        logsumexp = torch.empty(batch, heads, _padded(sequence), dtype=torch.float32, device=q.device)
        variant = _variant(head_dim, documents is not None)
        grid = (-(-sequence // kernels.block("attention_forward", variant, "BLOCK_M")), batch * heads, 1)
        kernels.launch(
            "attention_forward", q.dtype, variant, grid, q, k, v, slopes, documents, o, logsumexp, scale, *_sizes(q, k),
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3],
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, logsumexp, slopes, documents)
        ctx.scale, ctx.kernels = scale, kernels
        return o

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, logsumexp, slopes, documents = ctx.saved_tensors
        grad_o, kernels = _readable(grad_outputs[0]), ctx.kernels
        sequence, batch, heads, head_dim = q.shape
        inputs = (q, k, v, slopes, documents, grad_o, logsumexp)
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad_o.stride()[:3])
        delta = torch.empty_like(logsumexp)
        plain, variant = _variant(head_dim, False), _variant(head_dim, documents is not None)

        def blocks(kernel: str, name: str, block: str) -> int:
            return -(-sequence // kernels.block(kernel, name, block))

        kernels.launch(
            "attention_delta", q.dtype, plain, (blocks("attention_delta", plain, "BLOCK_M"), batch * heads, 1),
            o, grad_o, delta, sequence, heads, head_dim, *o.stride()[:3], *grad_o.stride()[:3],
        )  # fmt: skip
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        kernels.launch(
            "attention_grad_kv", q.dtype, variant, (blocks("attention_grad_kv", variant, "BLOCK_N"), batch * k.shape[2], 1),
            *inputs, delta, grad_k, grad_v, ctx.scale, *_sizes(q, k), *strides, *grad_k.stride()[:3],
        )  # fmt: skip
        kernels.launch(
            "attention_grad_q", q.dtype, variant, (blocks("attention_grad_q", variant, "BLOCK_M"), batch * heads, 1),
            *inputs, delta, grad_q, ctx.scale, *_sizes(q, k), *strides, *grad_q.stride()[:3],
        )  # fmt: skip
        return grad_q, grad_k, grad_v, None, None, None, None


def _padded(sequence: int) -> int:
    """Positions that per-row statistics have room for: a multiple of every block, so the kernels read them whole and unmasked."""
    return -(-sequence // ROWS_PER_PAD) * ROWS_PER_PAD


def _variant(head_dim: int, extras: bool) -> str:
    padded = next(size for size in HEAD_DIMS if size >= head_dim)
    return f"d{padded}{'-extras' if extras else ''}"


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    return q.shape[0], q.shape[2], q.shape[2] // k.shape[2], q.shape[3]
