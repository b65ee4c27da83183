"""The face of the fused ops: each in plain torch, which says what it means and what every other back-end is tested
against in float64.

Statistics and sums are taken in fp32 (fp64 for fp64 inputs) and the result is rounded once to the input's type, which
is also what the fused back-ends do. Differentiable ops get their backward from autograd.
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
from .groups import accumulate_grouped_gradient_, gather_rows, grouped_input_gradient, grouped_linear
from .routing import route


@dataclass(frozen=True)
class Scores:
    """How a query scores the keys of its own and earlier positions: scale * q·k.

    ALiBi (arXiv:2108.12409) adds -slope * (i - j) to score (i, j). Positions see each other only within one document
    id. Queries and keys may be two stretches of a sequence: query i then stands `offset` + i behind the first key.
    """

    scale: float
    alibi_slopes_a: Tensor | None = None
    documents_BS: Tensor | None = None
    offset: int = 0
    key_documents_BK: Tensor | None = None  # None = those of the queries
    window: int = 0  # positions that a query sees, its own included; 0 = all before it
    softcap: float = 0.0  # x in x tanh(scale * q·k / x), before anything is added; 0 = none


@dataclass(frozen=True)
class AdamWUpdate:
    """One update of AdamW (arXiv:1711.05101). grad * grad_scale is the gradient: the inverse loss scale times the
    clip factor.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int  # from 1
    grad_scale: Tensor | float = 1.0

    @property
    def step_size(self) -> float:
        """What exp_avg is multiplied by: the learning rate, exp_avg's bias corrected."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root(self) -> float:
        """What sqrt(exp_avg_sq) is multiplied by to correct its bias."""
        return float(1 - self.beta2**self.step) ** -0.5

    @property
    def decay(self) -> float:
        """Share of a weight that decoupled weight decay subtracts in this update."""
        return self.lr * self.weight_decay


def attention(q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
    """Causal softmax attention with the whole score matrix in memory, o_SBaD.

    Query head i reads kv head i // (a // g).
    """
    logits_BaSS, v_BaSD = _logits(q_SBaD, k_SBgD, v_SBgD, scores)
    return (torch.softmax(logits_BaSS, dim=-1) @ v_BaSD).permute(2, 0, 1, 3).to(q_SBaD.dtype)


def attention_block(q_SBaD: Tensor, kv_KBgD: tuple[Tensor, ...], scores: Scores) -> tuple[Tensor, Tensor]:
    """(o_SBaD, logsumexp_BaS) of queries to one stretch of keys and values, without a graph; the logarithms in fp32
    (fp64).

    Outputs over several stretches merge by their logarithms. A query that sees none of these keys has the output 0 and
    the logarithm -inf.
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
    """What one stretch of keys adds to the gradient of the queries, and the queries to those of the keys and values.

    `o` and `logsumexp` are those over all keys that the queries see, whichever stretch this is.
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
    """Attention over two sets of keys from attention over each: outputs weighed by their share of the sum, in fp32
    (fp64).
    """
    o_QBaD = o_QBaD.to(statistics_dtype(o_QBaD.dtype))
    if merged is None:
        return o_QBaD, logsumexp_BaQ
    total_BaQ = torch.logaddexp(merged[1], logsumexp_BaQ)
    # a row that has seen nothing yet: -inf - -inf is no number
    safe_BaQ = total_BaQ.masked_fill(total_BaQ == -torch.inf, 0)
    before, now = ((part - safe_BaQ).exp().permute(2, 0, 1)[..., None] for part in (merged[1], logsumexp_BaQ))
    return merged[0] * before + o_QBaD * now, total_BaQ


def _by_head(x_KBgD: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[B, a, K, D]: a key/value head for each query head that reads it."""
    return x_KBgD.permute(1, 2, 0, 3).to(dtype).repeat_interleave(heads // x_KBgD.shape[2], dim=1)


def _logits(q_SBaD: Tensor, k_KBgD: Tensor, v_KBgD: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """(masked scores [B, a, S, K], values [B, a, K, D]) in the type of the statistics."""
    dtype = statistics_dtype(q_SBaD.dtype)
    heads = q_SBaD.shape[2]
    k_BaKD = _by_head(k_KBgD, heads, dtype)
    v_BaKD = _by_head(v_KBgD, heads, dtype)
    scores_BaSK = softcapped(
        scores.scale * (q_SBaD.permute(1, 2, 0, 3).to(dtype) @ k_BaKD.transpose(-2, -1)), scores.softcap
    )
    return scores_BaSK + score_bias(q_SBaD.shape[0], k_KBgD.shape[0], scores, dtype, q_SBaD.device), v_BaKD


def softcapped(x: Tensor, cap: float) -> Tensor:
    """cap tanh(x / cap): nearly x while that is small, never beyond cap (arXiv:2408.00118); x itself where cap is 0."""
    return cap * torch.tanh(x / cap) if cap else x


def _probabilities(logits_BaSK: Tensor, logsumexp_BaS: Tensor) -> Tensor:
    """e^(logits - logsumexp), 0 where a row sees nothing."""
    return (logits_BaSK - logsumexp_BaS.masked_fill(logsumexp_BaS == -torch.inf, 0)[..., None]).exp()


def score_bias(queries: int, keys: int, scores: Scores, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to the scores, broadcastable to [B, a, S, K]: -inf where the mask forbids, ALiBi's line
    elsewhere.
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
    """x / sqrt(mean(x²) + eps) * weight over the last dim (arXiv:1910.07467)."""
    wide = x.to(statistics_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim; variance divides by H (arXiv:1607.06450)."""
    wide = x.to(statistics_dtype(x.dtype))
    return F.layer_norm(
        wide, wide.shape[-1:], weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype), eps
    ).to(x.dtype)


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual); `kind` is "rmsnorm" or "layernorm". The sum is rounded before it is
    normed.
    """
    total = x + residual
    if kind == "rmsnorm":
        return rms_norm(total, weight, eps), total
    return layer_norm(total, weight, bias, eps), total


def rope(x_SBaD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotary embedding in the rotate-half convention (arXiv:2104.09864); dims past 2R pass through.

    cos and sin are [S, R], or [S, B, R] where positions restart at documents.
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
    """(q_SBaD, k_SBgD, v_SBgD), each by itself, of a projection with each key/value head's queries, key and value;
    `rope` of queries and keys.
    """
    q_SBgqD, k_SBgqD, v_SBgqD = qkv_SBgqD.split((qkv_SBgqD.shape[-2] - 2, 1, 1), dim=-2)
    return (
        rope(q_SBgqD.flatten(2, 3), cos_SR, sin_SR),
        rope(k_SBgqD.squeeze(-2), cos_SR, sin_SR),
        v_SBgqD.squeeze(-2).contiguous(),
    )


def swiglu(x_2f: Tensor, weights: Tensor | None = None) -> Tensor:
    """silu(gate) * up for x[..., 2, f] = [gate, up] (arXiv:2002.05202), times the row's weight, which is fp32
    (fp64).
    """
    gate, up = x_2f.to(statistics_dtype(x_2f.dtype)).unbind(-2)
    return _weighted(F.silu(gate) * up, weights).to(x_2f.dtype)


def gelu(x: Tensor, bias: Tensor | None, approximate: bool, weights: Tensor | None = None) -> Tensor:
    """GELU of x + bias (arXiv:1606.08415), exact by erf or approximated by tanh; times the row's weight, which is
    fp32 (fp64).
    """
    wide = x.to(statistics_dtype(x.dtype))
    wide = wide if bias is None else wide + bias.to(wide.dtype)
    return _weighted(F.gelu(wide, approximate="tanh" if approximate else "none"), weights).to(x.dtype)


def _weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows if weights is None else rows * weights[..., None]


def cross_entropy_stats(logits_Nv: Tensor, targets_N: Tensor, first_vocab: int) -> Tensor:
    """This shard's part of the loss, stats_3N: row max, sum of exp(logit - max), logit of the target or 0 when it is
    elsewhere.

    fp32 (fp64 for fp64 logits). The caller combines shards: m = max, s = sum s_r exp(m_r - m), t = sum t_r, loss = m +
    log s - t.
    """
    wide_Nv = logits_Nv.detach().to(statistics_dtype(logits_Nv.dtype))
    max_N = wide_Nv.amax(-1)
    sum_N = (wide_Nv - max_N[:, None]).exp().sum(-1)
    column_N, mine_N = _local_targets(targets_N, first_vocab, logits_Nv.shape[1])
    return torch.stack((max_N, sum_N, torch.where(mine_N, wide_Nv.gather(1, column_N[:, None])[:, 0], 0)))


def cross_entropy_backward_(
    logits_Nv: Tensor, targets_N: Tensor, first_vocab: int, logsumexp_N: Tensor, grad_loss_N: Tensor
) -> Tensor:
    """Overwrite the logits with their gradient (softmax - onehot) * grad_loss and return them."""
    with torch.no_grad():
        dtype = statistics_dtype(logits_Nv.dtype)
        grad_Nv = (logits_Nv.to(dtype) - logsumexp_N.to(dtype)[:, None]).exp()
        column_N, mine_N = _local_targets(targets_N, first_vocab, logits_Nv.shape[1])
        grad_Nv.scatter_add_(1, column_N[:, None], -mine_N.to(dtype)[:, None])
        return logits_Nv.copy_(grad_Nv * grad_loss_N.to(dtype)[:, None])


def _local_targets(targets_N: Tensor, first_vocab: int, columns: int) -> tuple[Tensor, Tensor]:
    """Column of each target in this shard (0 where it is elsewhere) and whether it is here."""
    column_N = targets_N.long() - first_vocab
    mine_N = (column_N >= 0) & (column_N < columns)
    return torch.where(mine_N, column_N, 0), mine_N


def adamw_(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, weights_out: Tensor, update: AdamWUpdate
) -> None:
    """One update of flat slices, in place: master, exp_avg, exp_avg_sq and, rounded to its type, weights_out (which
    may be master itself).
    """
    with torch.no_grad():
        g = grad.to(master.dtype) * update.grad_scale
        exp_avg.lerp_(g, 1 - update.beta1)
        exp_avg_sq.mul_(update.beta2).addcmul_(g, g, value=1 - update.beta2)
        denominator = (exp_avg_sq.sqrt() * update.root).add_(update.eps)
        # update and decay are added before the weight is rounded: fp32 rounds 1 - decay to 1 below 6e-8
        master.sub_((master * update.decay).addcdiv_(exp_avg, denominator, value=update.step_size))
        if weights_out.data_ptr() != master.data_ptr():
            weights_out.copy_(master)


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of x² as a 0-dim fp64 tensor, accumulated in fp64."""
    return torch.linalg.vector_norm(x.detach(), dtype=torch.float64).square()


def linear(x: Tensor, weight_ok: Tensor, bias_o: Tensor | None) -> Tensor:
    """x @ weightᵀ + bias for x [..., k]."""
    return F.linear(x, weight_ok, bias_o)


def linear_input_gradient(grad_output: Tensor, weight_ok: Tensor) -> Tensor:
    """grad_output @ weight: what `linear` passes back to its input, for backwards that are written by hand."""
    return grad_output @ weight_ok


def accumulate_weight_gradient_(main_grad_ok: Tensor, grad_output_No: Tensor, x_Nk: Tensor) -> None:
    """main_grad += grad_outputᵀ @ x, summed in main_grad's type (fp32, or fp64); leading dims are flattened to N."""
    with torch.no_grad():
        grad_output_No = grad_output_No.reshape(-1, grad_output_No.shape[-1]).to(main_grad_ok.dtype)
        main_grad_ok.addmm_(grad_output_No.t(), x_Nk.reshape(-1, x_Nk.shape[-1]).to(main_grad_ok.dtype))


def accumulate_(main_grad: Tensor, grad: Tensor) -> None:
    """main_grad += grad."""
    with torch.no_grad():
        main_grad.add_(grad)


def embedding_backward_(main_grad_vH: Tensor, token_ids_N: Tensor, grad_N_H: Tensor, first_vocab: int) -> None:
    """main_grad[token - first_vocab] += grad row, for the tokens of this shard; leading dims are flattened to N."""
    with torch.no_grad():
        column_N, mine_N = _local_targets(token_ids_N.reshape(-1), first_vocab, main_grad_vH.shape[0])
        rows_NH = grad_N_H.reshape(-1, grad_N_H.shape[-1]).to(main_grad_vH.dtype)
        main_grad_vH.index_add_(0, column_N, torch.where(mine_N[:, None], rows_NH, 0))


Op = Callable[..., Any]  # of a back-end
GROUPS: dict[str, tuple[str, ...]] = {}  # the ops that each flag of `OpsConfig` chooses a back-end for
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _op(group: str, meaning: Callable[_P, _R]) -> staticmethod[_P, _R]:
    GROUPS[group] = (*GROUPS.get(group, ()), meaning.__name__)
    return staticmethod(meaning)


class Ops:
    """One function per op, chosen once, with the parameters and the meaning of the one above: what model,
    tensor_parallel and optim call.

    A trailing underscore says that the first argument is written in place; those ops take no part in autograd, nor do
    attention's blocks, experts' and drop.
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
    embedding_backward_ = _op("accumulate", embedding_backward_)

    def __init__(self, **functions: Op) -> None:
        if functions.keys() != {op for ops in GROUPS.values() for op in ops}:
            raise TypeError(f"a function for each op is wanted, not {sorted(functions)}")
        vars(self).update(functions)

    def gated(self, x_2f: Tensor, activation: str, weights: Tensor | None = None) -> Tensor:
        """The gate's non-linearity times the other half: swiglu, or geglu_tanh (arXiv:2002.05202), which has no
        kernel of its own.
        """
        if activation == "swiglu":
            return self.swiglu(x_2f, weights)
        gate, up = x_2f.unbind(-2)
        return self.gelu(gate.contiguous(), None, True, weights) * up

    def but(self, **functions: Op) -> Ops:
        """These ops, some of them replaced."""
        return Ops(**{**vars(self), **functions})
