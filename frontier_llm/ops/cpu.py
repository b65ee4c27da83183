"""The C++ ops of csrc/cpu behind the face: autograd around torch.ops.frontier_llm, for fp32 and bf16 on the CPU.

Shapes and meaning are those of `ops.reference`. Import this module only after `native.load_cpu_library()` returned ''.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .reference import AdamWUpdate, Scores

_native: Any = torch.ops.frontier_llm


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
        slopes_a = None if scores.alibi_slopes_a is None else scores.alibi_slopes_a.float().contiguous()
        documents_BS = None if scores.documents_BS is None else scores.documents_BS.int().contiguous()
        o_SBaD, logsumexp_BaS = _native.attention(q_SBaD, k_SBgD, v_SBgD, scores.scale, slopes_a, documents_BS)
        ctx.save_for_backward(q_SBaD, k_SBgD, v_SBgD, o_SBaD, logsumexp_BaS, slopes_a, documents_BS)
        ctx.scale = scores.scale
        return o_SBaD

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, logsumexp, slopes, documents = ctx.saved_tensors
        return (*_native.attention_backward(grad_outputs[0], q, k, v, o, logsumexp, ctx.scale, slopes, documents), None)


def attention(q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Tensor:
    """Causal attention in blocks of 64 x 64 scores; 4.8 times as fast as SDPA's CPU kernel in bf16 (docs/ops.md)."""
    return _Attention.apply(q_SBaD, k_SBgD, v_SBgD, scores)


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Any:
        normed, total, mean, scale = _native.norm(x, residual, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), eps, centred)
        ctx.save_for_backward(total, weight, mean, scale)
        ctx.has_residual, ctx.bias_dtype = residual is not None, None if bias is None else bias.dtype
        return (normed, total) if residual is not None else normed

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, mean, scale = ctx.saved_tensors
        grad_total = grad_outputs[1] if ctx.has_residual else None
        grad_x, grad_weight, grad_bias = _native.norm_backward(
            grad_outputs[0], grad_total, total, weight.to(total.dtype), mean, scale, ctx.bias_dtype is not None
        )
        return (
            grad_x,
            grad_x if ctx.has_residual else None,
            grad_weight.to(weight.dtype),
            None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype),
            None,
            None,
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim."""
    return _Norm.apply(x, None, weight, None, eps, False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dim."""
    return _Norm.apply(x, None, weight, bias, eps, True)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual) in one pass."""
    return _Norm.apply(x, residual, weight, bias if kind == "layernorm" else None, eps, kind == "layernorm")


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x_SBaD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SR, sin_SR)
        return _native.rope(x_SBaD, cos_SR, sin_SR, 1.0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _native.rope(grad_outputs[0], *ctx.saved_tensors, -1.0), None, None


def rope(x_SBaD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotate-half embedding; the backward turns the gradient back by the same angles."""
    return _Rope.apply(x_SBaD, cos_SR, sin_SR)


class _Swiglu(Function):
    @staticmethod
    def forward(ctx: Any, x_2f: Tensor) -> Tensor:
        ctx.save_for_backward(x_2f)
        return _native.swiglu(x_2f)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return _native.swiglu_backward(grad_outputs[0], *ctx.saved_tensors)


def swiglu(x_2f: Tensor) -> Tensor:
    """silu(gate) * up; saves its input alone."""
    return _Swiglu.apply(x_2f)


class _Gelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, approximate: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.approximate = approximate
        return _native.gelu(x, None if bias is None else bias.to(x.dtype), approximate)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        grad_x, grad_bias = _native.gelu_backward(grad_outputs[0], x, None if bias is None else bias.to(x.dtype), ctx.approximate)
        return grad_x, None if bias is None else grad_bias.to(bias.dtype), None


def gelu(x: Tensor, bias: Tensor | None, approximate: bool) -> Tensor:
    """GELU of x + bias; saves x and bias, not their sum."""
    return _Gelu.apply(x, bias, approximate)


def cross_entropy_stats(logits_Nv: Tensor, targets_N: Tensor, first_vocab: int) -> Tensor:
    """stats_3N of this vocabulary shard, read from the logits in their own type."""
    return _native.cross_entropy_stats(_rows(logits_Nv.detach()), targets_N.long().contiguous(), first_vocab)


def cross_entropy_backward_(logits_Nv: Tensor, targets_N: Tensor, first_vocab: int, logsumexp_N: Tensor, grad_loss_N: Tensor) -> Tensor:
    """The gradient in the logits' own memory (in a copy when their rows are not contiguous)."""
    targets_N = targets_N.long().contiguous()
    with torch.no_grad():
        return _native.cross_entropy_backward_(
            _rows(logits_Nv.detach()), targets_N, first_vocab, logsumexp_N.float().contiguous(), grad_loss_N.float().contiguous()
        )


def _rows(logits_Nv: Tensor) -> Tensor:
    return logits_Nv if logits_Nv.stride(1) == 1 or logits_Nv.shape[1] == 1 else logits_Nv.contiguous()


def adamw_(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, weights_out: Tensor, update: AdamWUpdate) -> None:
    """Unscale, clip, AdamW and the rounded copy of the weights in one pass over fp32 slices."""
    _native.adamw_(
        master.detach(), grad.detach().float(), exp_avg, exp_avg_sq, weights_out.detach(),
        update.step_size, update.beta1, update.beta2, update.eps, update.keep, update.root, float(update.grad_scale),
    )  # fmt: skip


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of x² as a 0-dim fp64 tensor; the same on any number of threads."""
    return _native.sum_of_squares(x.detach())


# fp32 products of at most so many rows go to torch: 3.3, 1.8 and 1.2 times as fast as our kernel at 1, 2 and 4 rows, equal at 8
FEW_ROWS = 4


def linear(x: Tensor, weight_ok: Tensor, bias_o: Tensor | None) -> Tensor:
    """x @ weightᵀ + bias; see `linear_input_gradient` for why fp32 has its own kernel, which packs too much for a few rows."""
    if x.dtype != torch.float32 or x.shape[:-1].numel() <= FEW_ROWS:
        return F.linear(x, weight_ok, bias_o)
    return _Linear.apply(x, weight_ok, bias_o)


def linear_input_gradient(grad_output: Tensor, weight_ok: Tensor) -> Tensor:
    """grad_output @ weight.

    fp32 products go through our own kernel: torch hands them to MKL, which on AMD CPUs stays on AVX2 (115 GFLOP/s against
    255 on one Zen 5 core); bf16 goes to oneDNN, which is as fast as ours.
    """
    if grad_output.dtype != torch.float32:
        return grad_output @ weight_ok
    out_Nk = grad_output.new_empty(grad_output.shape[:-1].numel(), weight_ok.shape[1])
    _native.gemm(grad_output.detach().reshape(-1, grad_output.shape[-1]), weight_ok.detach(), out_Nk, False)
    return out_Nk.view(*grad_output.shape[:-1], weight_ok.shape[1])


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ok: Tensor, bias_o: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_ok)
        rows, shape = x.shape[:-1].numel(), (*x.shape[:-1], weight_ok.shape[0])
        # allocated in its final shape: a view that leaves an autograd function may not be summed in place over tp
        out = x.new_empty(shape) if bias_o is None else bias_o.expand(shape).contiguous()
        _native.gemm(x.reshape(rows, x.shape[-1]), weight_ok.t(), out.view(rows, shape[-1]), bias_o is not None)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_ok = ctx.saved_tensors
        grad_output = grad_outputs[0].contiguous()
        grad_x = linear_input_gradient(grad_output, weight_ok) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight_ok)
            accumulate_weight_gradient_(grad_weight, grad_output, x)
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


def accumulate_weight_gradient_(main_grad_ok: Tensor, grad_output_No: Tensor, x_Nk: Tensor) -> None:
    """main_grad += grad_outputᵀ @ x: the product is added to the fp32 buffer as it leaves the registers."""
    grad_output_No = grad_output_No.detach().reshape(-1, grad_output_No.shape[-1])
    _native.gemm(grad_output_No.t(), x_Nk.detach().reshape(-1, x_Nk.shape[-1]), main_grad_ok, True)


def accumulate_(main_grad: Tensor, grad: Tensor) -> None:
    """main_grad += grad, widening as it adds."""
    _native.accumulate_(main_grad, grad.detach())


def embedding_backward_(main_grad_vH: Tensor, token_ids_N: Tensor, grad_N_H: Tensor, first_vocab: int) -> None:
    """Scatter-add of rows, in the order of the tokens."""
    _native.embedding_backward_(main_grad_vH, token_ids_N, grad_N_H.detach(), first_vocab)
