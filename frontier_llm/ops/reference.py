"""Interface and reference implementation of the fused ops, in plain torch.

These functions define the result of each op. Every other back-end is compared with them in float64.

Statistics and sums are computed in fp32 (fp64 for fp64 inputs), and the result is rounded once to the input's type. The
fused back-ends do the same. Autograd computes the backward of differentiable ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .dropout import drop
from .dtypes import statistics_dtype
from .routing import accumulate_grouped_gradient_, gather_rows, grouped_input_gradient, grouped_linear, route


@dataclass(frozen=True)
class Scores:
    """Options of causal attention scores. The score of a query for a key that it sees is scale * q·k.

    ALiBi (arXiv:2108.12409) adds -slope * (i - j) to score (i, j). With document ids, a query sees only keys with its
    own document id. Queries and keys may be two different parts of a sequence. Query i is then `offset` + i positions
    after the first key.
    """

    scale: float
    alibi_slopes_a: Tensor | None = None
    documents_BS: Tensor | None = None  # document ids of the queries
    offset: int = 0
    key_documents_BK: Tensor | None = None  # document ids of the keys; None = the ids of the queries
    window: int = 0  # number of positions that a query sees, including its own; 0 = all positions up to its own
    softcap: float = 0.0  # cap in cap tanh(scale * q·k / cap), computed before ALiBi is added; 0 = no cap


@dataclass(frozen=True)
class AdamWUpdate:
    """Parameters of one update of AdamW (arXiv:1711.05101).

    The update uses grad * grad_scale. `grad_scale` is the inverse loss scale times the clip factor.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int  # number of the update, counted from 1
    grad_scale: Tensor | float = 1.0

    @property
    def step_size(self) -> float:
        """Factor of exp_avg in the update: the learning rate, with the bias correction of exp_avg."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root(self) -> float:
        """Factor of sqrt(exp_avg_sq) that corrects its bias."""
        return float(1 - self.beta2**self.step) ** -0.5

    @property
    def decay(self) -> float:
        """Share of a weight that decoupled weight decay subtracts in this update."""
        return self.lr * self.weight_decay


def attention(q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
    """Return causal softmax attention o_SBaD. The complete score matrix is in memory.

    Query head i reads key/value head i // (a // g).
    """
    logits_BaSS, v_BaSD = _logits(q_SBaD, k_SBgD, v_SBgD, scores)
    return (torch.softmax(logits_BaSS, dim=-1) @ v_BaSD).permute(2, 0, 1, 3).to(q_SBaD.dtype)


def attention_block(q_SBaD: Tensor, kv_KBgD: tuple[Tensor, ...], scores: Scores) -> tuple[Tensor, Tensor]:
    """Return (o_SBaD, logsumexp_BaS) of queries over one range of keys and values, without a graph.

    The log-sum-exp is in fp32 (fp64). `merge` combines the outputs over several ranges of keys. If a query sees none of
    the keys, its output is 0 and its log-sum-exp is -inf.
    """
    with torch.no_grad():
        logits_BaSK, v_BaKD = _logits(q_SBaD, kv_KBgD[0], kv_KBgD[1], scores)
        logsumexp_BaS = logits_BaSK.logsumexp(-1)
        p_BaSK = _probabilities(logits_BaSK, logsumexp_BaS)
        return (p_BaSK @ v_BaKD).permute(2, 0, 1, 3).to(q_SBaD.dtype), logsumexp_BaS


def attention_block_backward(
    grad_SBaD: Tensor,
    q_SBaD: Tensor,
    kv_KBgD: tuple[Tensor, ...],
    o_SBaD: Tensor,
    logsumexp_BaS: Tensor,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v through one range of keys.

    The gradient of q is only the contribution of these keys, and the gradients of k and v are only the contributions of
    these queries. `o_SBaD` and `logsumexp_BaS` must cover all keys that the queries see, not only this range.
    """
    with torch.no_grad():
        k_KBgD, v_KBgD = kv_KBgD
        logits_BaSK, v_BaKD = _logits(q_SBaD, k_KBgD, v_KBgD, scores)
        p_BaSK = _probabilities(logits_BaSK, logsumexp_BaS.to(logits_BaSK.dtype))
        grad_BaSD, o_BaSD, q_BaSD = (x.permute(1, 2, 0, 3).to(p_BaSK.dtype) for x in (grad_SBaD, o_SBaD, q_SBaD))
        delta_BaS = (grad_BaSD * o_BaSD).sum(-1)
        ds_BaSK = scores.scale * p_BaSK * (grad_BaSD @ v_BaKD.transpose(-2, -1) - delta_BaS[..., None])
        k_BaKD = _by_head(k_KBgD, q_SBaD.shape[2], p_BaSK.dtype)
        if scores.softcap:
            capped_BaSK = softcapped(scores.scale * (q_BaSD @ k_BaKD.transpose(-2, -1)), scores.softcap)
            ds_BaSK *= 1 - (capped_BaSK / scores.softcap).square()
        grad_q_BaSD = ds_BaSK @ k_BaKD
        grad_k_BaKD = ds_BaSK.transpose(-2, -1) @ q_BaSD
        grad_v_BaKD = p_BaSK.transpose(-2, -1) @ grad_BaSD
        kv_heads = k_KBgD.shape[2]
        grad_k, grad_v = (x.unflatten(1, (kv_heads, -1)).sum(2).permute(2, 0, 1, 3) for x in (grad_k_BaKD, grad_v_BaKD))
        return grad_q_BaSD.permute(2, 0, 1, 3).to(q_SBaD.dtype), grad_k.to(k_KBgD.dtype), grad_v.to(v_KBgD.dtype)


def merge(merged: tuple[Tensor, Tensor] | None, o_QBaD: Tensor, logsumexp_BaQ: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two sets of keys. Returns output and log-sum-exp over all these keys, in fp32 (fp64).

    `merged` is the result for the first set, or None. The outputs are weighted by their shares of the softmax's sum.
    """
    o_QBaD = o_QBaD.to(statistics_dtype(o_QBaD.dtype))
    if merged is None:
        return o_QBaD, logsumexp_BaQ
    total_BaQ = torch.logaddexp(merged[1], logsumexp_BaQ)
    # If a query has seen no keys yet, -inf - -inf would be NaN.
    safe_BaQ = total_BaQ.masked_fill(total_BaQ == -torch.inf, 0)
    before, now = ((part - safe_BaQ).exp().permute(2, 0, 1)[..., None] for part in (merged[1], logsumexp_BaQ))
    return merged[0] * before + o_QBaD * now, total_BaQ


def _by_head(x_KBgD: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Return x as [B, a, K, D]: each key/value head is repeated for the query heads that read it."""
    return x_KBgD.permute(1, 2, 0, 3).to(dtype).repeat_interleave(heads // x_KBgD.shape[2], dim=1)


def _logits(q_SBaD: Tensor, k_KBgD: Tensor, v_KBgD: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return (masked scores [B, a, S, K], values [B, a, K, D]) in the type of the statistics."""
    dtype = statistics_dtype(q_SBaD.dtype)
    heads = q_SBaD.shape[2]
    k_BaKD = _by_head(k_KBgD, heads, dtype)
    v_BaKD = _by_head(v_KBgD, heads, dtype)
    scores_BaSK = softcapped(
        scores.scale * (q_SBaD.permute(1, 2, 0, 3).to(dtype) @ k_BaKD.transpose(-2, -1)), scores.softcap
    )
    return scores_BaSK + score_bias(q_SBaD.shape[0], k_KBgD.shape[0], scores, dtype, q_SBaD.device), v_BaKD


def softcapped(x: Tensor, cap: float) -> Tensor:
    """Return cap tanh(x / cap) (arXiv:2408.00118), or x if cap is 0.

    The result is near x for small x, and its absolute value is at most cap.
    """
    return cap * torch.tanh(x / cap) if cap else x


def _probabilities(logits_BaSK: Tensor, logsumexp_BaS: Tensor) -> Tensor:
    """Return e^(logits - logsumexp), and 0 for rows that see no keys."""
    return (logits_BaSK - logsumexp_BaS.masked_fill(logsumexp_BaS == -torch.inf, 0)[..., None]).exp()


def score_bias(queries: int, keys: int, scores: Scores, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the bias that is added to the scores, broadcastable to [B, a, S, K].

    It is -inf for masked scores, and ALiBi's bias (or 0) for the others.
    """
    distance_SK = scores.offset + torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
    forbidden_BaSK = (distance_SK < 0)[None, None]
    if scores.window:
        forbidden_BaSK = forbidden_BaSK | (distance_SK >= scores.window)
    if (documents_BS := scores.documents_BS) is not None:
        documents_BK = documents_BS if scores.key_documents_BK is None else scores.key_documents_BK
        forbidden_BaSK = forbidden_BaSK | (documents_BS[:, None, :, None] != documents_BK[:, None, None, :])
    bias_BaSK = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    if scores.alibi_slopes_a is not None:
        bias_BaSK = -scores.alibi_slopes_a.to(device=device, dtype=dtype)[None, :, None, None] * distance_SK
    return torch.where(forbidden_BaSK, -torch.inf, bias_BaSK)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) * weight over the last dim (arXiv:1910.07467)."""
    wide = x.to(statistics_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias over the last dim (arXiv:1607.06450).

    The variance is divided by H, not by H - 1.
    """
    wide = x.to(statistics_dtype(x.dtype))
    return F.layer_norm(
        wide, wide.shape[-1:], weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype), eps
    ).to(x.dtype)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual). `kind` is "rmsnorm" or "layernorm".

    The sum is rounded to x's type before it is normalised.
    """
    total = x + residual
    if kind == "rmsnorm":
        return rms_norm(total, weight, eps), total
    return layer_norm(total, weight, bias, eps), total


def rope(x_SBaD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Return the rotary embedding in the rotate-half convention (arXiv:2104.09864). Dims past 2R are unchanged.

    cos and sin are [S, R], or [S, B, R] if positions restart at documents.
    """
    half = cos_SR.shape[-1]
    dtype = statistics_dtype(x_SBaD.dtype)
    cos_SBaR, sin_SBaR = (
        (angle[:, None, None] if angle.dim() == 2 else angle[:, :, None]).to(dtype) for angle in (cos_SR, sin_SR)
    )
    first, second, rest = x_SBaD.split((half, half, x_SBaD.shape[-1] - 2 * half), dim=-1)
    first = first.to(dtype)
    second = second.to(dtype)
    rotated = (first * cos_SBaR - second * sin_SBaR, second * cos_SBaR + first * sin_SBaR)
    return torch.cat([part.to(x_SBaD.dtype) for part in rotated] + [rest], dim=-1)


def rotated_heads(qkv_SBgqD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into (q_SBaD, k_SBgD, v_SBgD), and apply `rope` to queries and keys.

    The projection's dim q has the queries, the key and the value of one key/value head. The results are contiguous.
    """
    q_SBgqD, k_SBgqD, v_SBgqD = qkv_SBgqD.split((qkv_SBgqD.shape[-2] - 2, 1, 1), dim=-2)
    return (
        rope(q_SBgqD.flatten(2, 3), cos_SR, sin_SR),
        rope(k_SBgqD.squeeze(-2), cos_SR, sin_SR),
        v_SBgqD.squeeze(-2).contiguous(),
    )


def swiglu(x_2f: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up for x[..., 2, f] = [gate, up] (arXiv:2002.05202), times the row's weight.

    The weights are fp32 (fp64).
    """
    gate, up = x_2f.to(statistics_dtype(x_2f.dtype)).unbind(-2)
    return _weighted(F.silu(gate) * up, weights).to(x_2f.dtype)


def gelu(x: Tensor, bias: Tensor | None, approximate: bool, weights: Tensor | None = None) -> Tensor:
    """Return GELU of x + bias (arXiv:1606.08415), times the row's weight.

    GELU is exact (erf), or with `approximate` the tanh formula. The weights are fp32 (fp64).
    """
    wide = x.to(statistics_dtype(x.dtype))
    wide = wide if bias is None else wide + bias.to(wide.dtype)
    return _weighted(F.gelu(wide, approximate="tanh" if approximate else "none"), weights).to(x.dtype)


def _weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows if weights is None else rows * weights[..., None]


def cross_entropy_stats(logits_Nv: Tensor, targets_N: Tensor, first_vocab: int) -> Tensor:
    """Return this vocabulary shard's part of the loss, stats_3N, in fp32 (fp64 for fp64 logits).

    The three rows are the max, the sum of exp(logit - max), and the target's logit (0 if another shard has the target).
    The caller combines shards: m = max m_r, s = sum s_r exp(m_r - m), t = sum t_r, loss = m + log s - t.
    """
    wide_Nv = logits_Nv.detach().to(statistics_dtype(logits_Nv.dtype))
    max_N = wide_Nv.amax(-1)
    sum_N = (wide_Nv - max_N[:, None]).exp().sum(-1)
    column_N, mine_N = _local_targets(targets_N, first_vocab, logits_Nv.shape[1])
    return torch.stack((max_N, sum_N, torch.where(mine_N, wide_Nv.gather(1, column_N[:, None])[:, 0], 0)))


def cross_entropy_backward_(
    logits_Nv: Tensor, targets_N: Tensor, first_vocab: int, logsumexp_N: Tensor, grad_loss_N: Tensor
) -> Tensor:
    """Overwrite the logits with their gradient (softmax - onehot) * grad_loss, and return them."""
    with torch.no_grad():
        dtype = statistics_dtype(logits_Nv.dtype)
        grad_Nv = (logits_Nv.to(dtype) - logsumexp_N.to(dtype)[:, None]).exp()
        column_N, mine_N = _local_targets(targets_N, first_vocab, logits_Nv.shape[1])
        grad_Nv.scatter_add_(1, column_N[:, None], -mine_N.to(dtype)[:, None])
        return logits_Nv.copy_(grad_Nv * grad_loss_N.to(dtype)[:, None])


def _local_targets(targets_N: Tensor, first_vocab: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the column of each target in this shard (0 if it is in another shard), and whether it is in this shard."""
    column_N = targets_N.long() - first_vocab
    mine_N = (column_N >= 0) & (column_N < columns)
    return torch.where(mine_N, column_N, 0), mine_N


def adamw_(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, weights_out: Tensor, update: AdamWUpdate
) -> None:
    """Update flat slices in place: master, exp_avg and exp_avg_sq.

    weights_out gets the rounded master weights. It may be the same memory as master.
    """
    with torch.no_grad():
        g = grad.to(master.dtype) * update.grad_scale
        exp_avg.lerp_(g, 1 - update.beta1)
        exp_avg_sq.mul_(update.beta2).addcmul_(g, g, value=1 - update.beta2)
        denominator = (exp_avg_sq.sqrt() * update.root).add_(update.eps)
        # Add update and decay before the weight is rounded, because fp32 rounds 1 - decay to 1 if decay is below 6e-8.
        master.sub_((master * update.decay).addcdiv_(exp_avg, denominator, value=update.step_size))
        if weights_out.data_ptr() != master.data_ptr():
            weights_out.copy_(master)


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of x² as a 0-dim fp64 tensor, accumulated in fp64."""
    return torch.linalg.vector_norm(x.detach(), dtype=torch.float64).square()


def linear(x: Tensor, weight_ok: Tensor, bias_o: Tensor | None) -> Tensor:
    """Return x @ weightᵀ + bias for x [..., k]."""
    return F.linear(x, weight_ok, bias_o)


def linear_input_gradient(grad_output: Tensor, weight_ok: Tensor) -> Tensor:
    """Return grad_output @ weight, the input gradient of `linear`, for backwards without autograd."""
    return grad_output @ weight_ok


def accumulate_weight_gradient_(main_grad_ok: Tensor, grad_output_No: Tensor, x_Nk: Tensor) -> None:
    """Add grad_outputᵀ @ x to main_grad, summed in main_grad's type (fp32 or fp64). Leading dims are flattened to N."""
    with torch.no_grad():
        grad_output_No = grad_output_No.reshape(-1, grad_output_No.shape[-1]).to(main_grad_ok.dtype)
        main_grad_ok.addmm_(grad_output_No.t(), x_Nk.reshape(-1, x_Nk.shape[-1]).to(main_grad_ok.dtype))


def accumulate_(main_grad: Tensor, grad: Tensor) -> None:
    """Add grad to main_grad."""
    with torch.no_grad():
        main_grad.add_(grad)


def accumulate_rows_(main_grad: Tensor, rows_RC: Tensor) -> None:
    """Add the sum of the rows to main_grad, which has C elements. Both have the type of main_grad."""
    with torch.no_grad():
        main_grad.add_(rows_RC.sum(0).view_as(main_grad))


def embedding_backward_(main_grad_vH: Tensor, token_ids_N: Tensor, grad_N_H: Tensor, first_vocab: int) -> None:
    """Add each token's gradient to main_grad[token - first_vocab], for the tokens of this shard.

    Leading dims are flattened to N.
    """
    with torch.no_grad():
        column_N, mine_N = _local_targets(token_ids_N.reshape(-1), first_vocab, main_grad_vH.shape[0])
        rows_NH = grad_N_H.reshape(-1, grad_N_H.shape[-1]).to(main_grad_vH.dtype)
        main_grad_vH.index_add_(0, column_N, torch.where(mine_N[:, None], rows_NH, 0))


Op = Callable[..., Any]  # function of a back-end
GROUPS: dict[str, tuple[str, ...]] = {}  # flag of `OpsConfig` → ops whose back-end the flag chooses
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _op(group: str, meaning: Callable[_P, _R]) -> staticmethod[_P, _R]:
    GROUPS[group] = (*GROUPS.get(group, ()), meaning.__name__)
    return staticmethod(meaning)


class Ops:
    """The functions of the chosen back-end for each op. Model, tensor parallelism and optimizer call these functions.

    Parameters and meaning are the same as in this module's functions. A trailing underscore means that the first
    argument is written in place. Ops with an underscore, the attention_block ops, the grouped products, gather_rows and
    drop do not support autograd.
    """

    attention = _op("attention", attention)
    attention_block = _op("attention", attention_block)
    attention_block_backward = _op("attention", attention_block_backward)
    rms_norm = _op("norm", rms_norm)
    layer_norm = _op("norm", layer_norm)
    add_norm = _op("norm", add_norm)
    rope = _op("rope", rope)
    rotated_heads = _op("rope", rotated_heads)
    swiglu = _op("activation", swiglu)
    gelu = _op("activation", gelu)
    drop = _op("activation", drop)
    cross_entropy_stats = _op("cross_entropy", cross_entropy_stats)
    cross_entropy_backward_ = _op("cross_entropy", cross_entropy_backward_)
    adamw_ = _op("adamw", adamw_)
    sum_of_squares = _op("adamw", sum_of_squares)
    linear = _op("linear", linear)
    linear_input_gradient = _op("linear", linear_input_gradient)
    accumulate_weight_gradient_ = _op("linear", accumulate_weight_gradient_)
    grouped_linear = _op("experts", grouped_linear)
    grouped_input_gradient = _op("experts", grouped_input_gradient)
    accumulate_grouped_gradient_ = _op("experts", accumulate_grouped_gradient_)
    gather_rows = _op("experts", gather_rows)
    route = _op("experts", route)
    accumulate_ = _op("accumulate", accumulate_)
    accumulate_rows_ = _op("accumulate", accumulate_rows_)
    embedding_backward_ = _op("accumulate", embedding_backward_)

    not_repeatable: str = ""  # names of chosen back-ends whose results may differ in the last bits between two runs

    def __init__(self, **functions: Op) -> None:
        if functions.keys() != {op for ops in GROUPS.values() for op in ops}:
            raise TypeError(f"exactly one function for each op is required, found {sorted(functions)}")
        vars(self).update(functions)

    def gated(self, x_2f: Tensor, activation: str, weights: Tensor | None = None) -> Tensor:
        """Return the gated activation: swiglu or geglu_tanh (arXiv:2002.05202). geglu_tanh has no separate kernel."""
        if activation == "swiglu":
            return self.swiglu(x_2f, weights)
        gate, up = x_2f.unbind(-2)
        return self.gelu(gate.contiguous(), None, True, weights) * up

    def but(self, **functions: Op) -> Ops:
        """Return a copy of these ops with some functions replaced."""
        return Ops(**{**vars(self), **functions})
