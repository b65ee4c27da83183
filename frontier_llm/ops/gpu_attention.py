"""Flash attention on the GPU: computes strides and grids, and launches one forward and two backward kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from frontier_llm.errors import BackendError
from frontier_llm.ops.differentiable import Attended, DifferentiableOps
from frontier_llm.ops.driver import Grid
from frontier_llm.ops.kernel_table import HEAD_DIMS, ROWS_PER_PAD
from frontier_llm.ops.prebuilt import Kernels
from frontier_llm.ops.reference import Scores

_HEAD_DIM_STEP = 16


class GpuAttention(DifferentiableOps):
    """Implements the attention ops of `ops.reference` with one set of GPU kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def attention_forward(self, q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Attended:
        """Compute `reference.attention` or `reference.attention_block`.

        `logsumexp` is in base 2 and padded. In the result q, k and v have the padded head dim. Raises BackendError for
        a head dim without a kernel, and for a negative `scores.offset`.
        """
        q = _readable(q_SBaD)
        k = _readable(k_SBgD)
        v = _readable(v_SBgD)
        sequence, batch, heads, head_dim = q.shape
        if head_dim > HEAD_DIMS[-1]:
            what = (
                f"head dim {q_SBaD.shape[-1]} is not supported: the prebuilt attention has head dims up to "
                f"{HEAD_DIMS[-1]}"
            )
            raise BackendError(what, "set ops.attention=sdpa, or change model.head_dim")
        if scores.offset < 0:
            what = (
                f"the queries begin {-scores.offset} positions before the keys: the prebuilt attention needs keys "
                "that begin at or before the first query"
            )
            raise BackendError(what, "set ops.attention=reference")
        slopes, documents, key_documents = _extras(q, k, scores)
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        logsumexp = torch.empty(batch, heads, _padded(sequence), dtype=torch.float32, device=q.device)
        variant = _variant(head_dim, documents is not None, scores.softcap)
        grid = (-(-sequence // self.kernels.block("attention_forward", variant, "BLOCK_M")), batch * heads, 1)
        self.kernels.launch(
            "attention_forward",
            q.dtype,
            variant,
            grid,
            q=q,
            k=k,
            v=v,
            slopes=slopes,
            documents=documents,
            key_documents=key_documents,
            o=o,
            logsumexp=logsumexp,
            **_numbers(scores, q, k),
            heads=heads,
            group=heads // k.shape[2],
            head_dim=head_dim,
            **_strides(q=q, k=k, v=v, o=o),
        )
        return Attended(
            q=q,
            k=k,
            v=v,
            o=_without_pad(o, q_SBaD.shape[-1]),
            logsumexp=logsumexp,
            slopes=slopes,
            documents=documents,
            key_documents=key_documents,
        )

    def attention_backward(self, grad_o: Tensor, saved: Attended, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        q, k, v, o, logsumexp, slopes, documents, key_documents = saved
        unpadded = grad_o.shape[-1]
        grad_o = _readable(grad_o)
        o = _readable(o)
        delta = torch.empty_like(logsumexp)
        _, batch, heads, head_dim = q.shape
        group = heads // k.shape[2]
        variant = _variant(head_dim, documents is not None, scores.softcap)

        def grid(kernel: str, block: str, x: Tensor) -> Grid:
            return -(-len(x) // self.kernels.block(kernel, variant, block)), batch * x.shape[2], 1

        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self.kernels.launch(
            "attention_grad_q",
            q.dtype,
            variant,
            grid("attention_grad_q", "BLOCK_M", q),
            q=q,
            k=k,
            v=v,
            slopes=slopes,
            documents=documents,
            key_documents=key_documents,
            grad_o=grad_o,
            o=o,
            logsumexp=logsumexp,
            delta=delta,
            grad_q=grad_q,
            **_numbers(scores, q, k),
            heads=heads,
            group=group,
            head_dim=head_dim,
            **_strides(q=q, k=k, v=v, g=grad_o, o=o, gq=grad_q),
        )
        self.kernels.launch(
            "attention_grad_kv",
            q.dtype,
            variant,
            grid("attention_grad_kv", "BLOCK_N", k),
            q=q,
            k=k,
            v=v,
            slopes=slopes,
            documents=documents,
            key_documents=key_documents,
            grad_o=grad_o,
            logsumexp=logsumexp,
            delta=delta,
            grad_k=grad_k,
            grad_v=grad_v,
            **_numbers(scores, q, k),
            heads=heads,
            group=group,
            head_dim=head_dim,
            **_strides(q=q, k=k, v=v, g=grad_o, gk=grad_k),
        )
        return _without_pad(grad_q, unpadded), _without_pad(grad_k, unpadded), _without_pad(grad_v, unpadded)

    def attention_block(self, q_SBaD: Tensor, kv_KBgD: tuple[Tensor, ...], scores: Scores) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp over one range of keys."""
        saved = self.attention_forward(q_SBaD, kv_KBgD[0], kv_KBgD[1], scores)
        return saved.o, saved.logsumexp[:, :, : len(q_SBaD)] * math.log(2)

    def attention_block_backward(
        self,
        grad_SBaD: Tensor,
        q_SBaD: Tensor,
        kv_KBgD: tuple[Tensor, ...],
        o_SBaD: Tensor,
        logsumexp_BaS: Tensor,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the contributions of one range of keys to the gradients of q, k and v."""
        q = _readable(q_SBaD)
        k, v = map(_readable, kv_KBgD)
        # The log-sum-exp of rows past the sequence and of rows that see no keys is infinite, so that their
        # probabilities are 0.
        logsumexp = torch.nan_to_num(
            logsumexp_BaS.float() / math.log(2), nan=math.nan, neginf=math.inf, posinf=math.inf
        )
        logsumexp = pad(logsumexp, (0, _padded(len(q)) - len(q)), value=math.inf).contiguous()
        saved = Attended(q, k, v, o_SBaD, logsumexp, *_extras(q, k, scores))
        return self.attention_backward(grad_SBaD, saved, scores)


def _extras(q: Tensor, k: Tensor, scores: Scores) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return slopes and the documents of queries and keys, as the kernels read them.

    One kernel variant has all of these options. An option that is not used gets a value without effect.
    """
    slopes = scores.alibi_slopes_a
    documents = scores.documents_BS
    key_documents = scores.key_documents_BK
    if slopes is None and documents is None and not scores.softcap:
        return None, None, None
    slopes = q.new_zeros(q.shape[2]) if slopes is None else slopes.detach()
    of_queries = _numbered(q, documents)
    same = key_documents is None and len(q) == len(k)
    of_keys = of_queries if same else _numbered(k, key_documents)
    return slopes.float().contiguous(), of_queries, of_keys


def _numbered(x_SBaD: Tensor, documents_BS: Tensor | None) -> Tensor:
    """Return documents as fp32, padded to complete blocks.

    Document numbers within a row are small and therefore exact in fp32. In fp32, a difference and an absolute value
    take one instruction each.
    """
    sequence, batch = x_SBaD.shape[:2]
    if documents_BS is None:
        documents_BS = x_SBaD.new_zeros(batch, sequence)
    return pad(documents_BS.float(), (0, _padded(sequence) - sequence), value=-1.0)


def _readable(x: Tensor) -> Tensor:
    """Return x itself if the kernels' 16-byte accesses can read it, otherwise a contiguous copy.

    The kernels need a head dim that is a multiple of `_HEAD_DIM_STEP`. Columns of zeros are added to any other head
    dim, for example to the 200 of the 1T model. They change neither scores nor outputs.
    """
    if missing := -x.shape[-1] % _HEAD_DIM_STEP:
        return pad(x, (0, missing)).contiguous()
    fits = x.stride(-1) == 1 and all(stride % 16 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


def _without_pad(x: Tensor, head_dim: int) -> Tensor:
    """Return x without the columns that `_readable` adds to the head dim."""
    return x if x.shape[-1] == head_dim else x[..., :head_dim]


def _padded(sequence: int) -> int:
    """Return the padded length of per-row statistics, as `padded_length` in triton/attention_scores.py."""
    return -(-sequence // ROWS_PER_PAD) * ROWS_PER_PAD


def _variant(head_dim: int, extras: bool = False, softcap: float = 0.0) -> str:
    padded = next(size for size in HEAD_DIMS if size >= head_dim)
    return f"d{padded}{'-softcap' if softcap else '-extras' if extras else ''}"


def _numbers(scores: Scores, q: Tensor, k: Tensor) -> dict[str, float]:
    window = scores.window or scores.offset + len(q)  # without a window: number of keys of the last query
    lengths = {"sequence": len(q), "keys": len(k), "offset": scores.offset}
    return {"scale": scores.scale, "softcap": scores.softcap, "window": window, **lengths}


_STRIDES = {name: (f"{name}_s", f"{name}_b", f"{name}_a") for name in ("q", "k", "v", "o", "g", "gk", "gq")}


def _strides(**tensors: Tensor) -> dict[str, int]:
    """Return sequence, batch and head stride of each tensor, by the names of the kernels' arguments."""
    named: dict[str, int] = {}
    for name, x in tensors.items():
        # The last stride is always 1 and is not an argument, so `_STRIDES` has only three names per tensor.
        named.update(zip(_STRIDES[name], x.stride(), strict=False))
    return named
