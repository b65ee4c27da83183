"""CPU back-end: the C++ ops of csrc/cpu, for fp32 and bf16.

Shapes and meaning are the same as in `ops.reference`. Import this module only after `native.load_cpu_library()` has
returned ''.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from frontier_llm.machine.processor import has_bf16_instructions
from frontier_llm.ops.differentiable import Attended, DifferentiableOps, Normed, NormKind, rows_in_order, sum_of_rows
from frontier_llm.ops.dropout import Mask
from frontier_llm.ops.reference import AdamWUpdate, Scores
from frontier_llm.ops.routing import Routing

_native: Any = torch.ops.frontier_llm
_unsafe_view = torch.ops.aten._unsafe_view.default  # a reshape whose result autograd does not treat as a view

# Matrix products with at most this number of rows use torch.
# In fp32 torch is 3.3, 1.8 and 1.2 times as fast as the kernel in csrc/cpu with 1, 2 and 4 rows, and equally fast with
# 8 rows. In bf16 with AVX2 torch is 2.7 and 1.5 times as fast with 1 and 2 rows, and 0.75 times as fast with 4 rows.
FEW_ROWS = {torch.float32: 4, torch.bfloat16: 2}


class CpuOps(DifferentiableOps):
    """Implements the ops of `ops.reference` with the C++ functions in torch.ops.frontier_llm.

    In bf16, attention is 4.8 times as fast as SDPA's CPU kernel (docs/benchmarks/ops.md).
    """

    def __init__(self) -> None:
        """Choose, by the instruction set, the types for which matrix products use the kernels of csrc/cpu."""
        own = {torch.float32}
        if not has_bf16_instructions():
            own.add(torch.bfloat16)
        self._own_products = frozenset(own)

    def attention_forward(self, q_SBaD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, scores: Scores) -> Attended:
        """Compute attention in blocks of 64 x 64 scores."""
        extras = _extras(scores)
        o_SBaD, logsumexp_BaS = _native.attention(q_SBaD, k_SBgD, v_SBgD, *extras, *_numbers(scores))
        return Attended(q_SBaD, k_SBgD, v_SBgD, o_SBaD, logsumexp_BaS, *extras)

    def attention_backward(self, grad_o: Tensor, saved: Attended, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        q, k, v, o, logsumexp, *extras = saved
        return _native.attention_backward(grad_o, q, k, v, o, logsumexp, *extras, *_numbers(scores))

    def attention_block(self, q_SBaD: Tensor, kv_KBgD: tuple[Tensor, ...], scores: Scores) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp over one range of keys."""
        saved = self.attention_forward(q_SBaD, kv_KBgD[0], kv_KBgD[1], scores)
        return saved.o, saved.logsumexp

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
        saved = Attended(q_SBaD, kv_KBgD[0], kv_KBgD[1], o_SBaD, logsumexp_BaS.contiguous(), *_extras(scores))
        return self.attention_backward(grad_SBaD, saved, scores)

    def norm_forward(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, kind: NormKind
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return output, total, mean and scale."""
        return _native.norm(x, residual, weight, bias, kind.eps, kind.centred)

    def norm_backward(
        self, grad: Tensor, grad_total: Tensor | None, saved: Normed
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradient of the total, and one row each for the weight and the bias."""
        grad_x, grad_weight, grad_bias = _native.norm_backward(
            grad, grad_total, saved.total, saved.weight, saved.mean, saved.scale, saved.has_bias
        )
        return grad_x, grad_weight[None], grad_bias[None]

    rotate = staticmethod(_native.rope)
    swiglu_forward = staticmethod(_native.swiglu)
    swiglu_backward = staticmethod(_native.swiglu_backward)
    gelu_forward = staticmethod(_native.gelu)

    def gelu_backward(
        self, grad: Tensor, x: Tensor, bias: Tensor | None, approximate: bool, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of x, one row for the bias, and the gradient of the row weights."""
        grad_x, grad_bias, grad_weights = _native.gelu_backward(grad, x, bias, approximate, weights)
        return grad_x, grad_bias[None], grad_weights

    def drop(self, x_SBH: Tensor, residual_SBH: Tensor | None, mask: Mask) -> Tensor:
        """Return residual + dropout(x) in one pass. The mask exists only in registers."""
        residual = None if residual_SBH is None else residual_SBH.detach()
        return _native.drop(
            x_SBH.detach(), residual, mask.signed_key, mask.threshold, mask.scale, mask.samples_B, mask.positions_S
        )

    def cross_entropy_stats(self, logits_Nv: Tensor, targets_N: Tensor, first_vocab: int) -> Tensor:
        """Return stats_3N of this vocabulary shard. The logits are not converted to another type."""
        return _native.cross_entropy_stats(rows_in_order(logits_Nv), targets_N.long().contiguous(), first_vocab)

    def cross_entropy_backward_(
        self, logits_Nv: Tensor, targets_N: Tensor, first_vocab: int, logsumexp_N: Tensor, grad_loss_N: Tensor
    ) -> Tensor:
        """Return the gradient in the logits' memory, or in a copy if their rows are not contiguous."""
        targets_N = targets_N.long().contiguous()
        with torch.no_grad():
            return _native.cross_entropy_backward_(
                rows_in_order(logits_Nv),
                targets_N,
                first_vocab,
                logsumexp_N.float().contiguous(),
                grad_loss_N.float().contiguous(),
            )

    def adamw_(
        self,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        weights_out: Tensor,
        update: AdamWUpdate,
    ) -> None:
        """Unscale, clip, update, and write the rounded weights, in one pass over fp32 slices."""
        _native.adamw_(
            master.detach(),
            grad.detach().float(),
            exp_avg,
            exp_avg_sq,
            weights_out.detach(),
            update.step_size,
            update.beta1,
            update.beta2,
            update.eps,
            update.decay,
            update.root,
            float(update.grad_scale),
        )

    def sum_of_squares(self, x: Tensor) -> Tensor:
        """Return the sum of x² as a 0-dim fp64 tensor. It does not depend on the number of threads."""
        return _native.sum_of_squares(x.detach())

    def linear(self, x: Tensor, weight_ok: Tensor, bias_o: Tensor | None) -> Tensor:
        """Return x @ weightᵀ + bias.

        `linear_input_gradient` describes which types use the kernel of csrc/cpu. With up to FEW_ROWS rows torch is
        used, because the kernel first packs its operands, which takes too long for a few rows.
        """
        if x.dtype not in self._own_products or x.shape[:-1].numel() <= FEW_ROWS[x.dtype]:
            return F.linear(x, weight_ok, bias_o)
        return _Linear.apply(x, weight_ok, bias_o, self)

    def linear_input_gradient(self, grad_output: Tensor, weight_ok: Tensor) -> Tensor:
        """Return grad_output @ weight.

        fp32 products use the kernel of csrc/cpu. torch would call MKL, which uses only AVX2 on AMD CPUs (115 GFLOP/s
        instead of 255 on one Zen 5 core). bf16 products use torch with oneDNN on CPUs with bf16 instructions, because
        oneDNN is then as fast as the kernel of csrc/cpu. Other CPUs use this kernel for bf16. It converts its operands
        to fp32. With AVX2, torch reaches 2 % of the kernel's rate, and with AVX-512, oneDNN emulates bf16.
        """
        if grad_output.dtype not in self._own_products:
            return grad_output @ weight_ok
        if grad_output.dtype != torch.float32:
            return _rounded_product(grad_output.detach(), weight_ok.detach())
        out_Nk = grad_output.new_empty(grad_output.shape[:-1].numel(), weight_ok.shape[1])
        _native.gemm(grad_output.detach().reshape(-1, grad_output.shape[-1]), weight_ok.detach(), out_Nk, False)
        return out_Nk.view(*grad_output.shape[:-1], weight_ok.shape[1])

    def accumulate_weight_gradient_(self, main_grad_ok: Tensor, grad_output_No: Tensor, x_Nk: Tensor) -> None:
        """Add grad_outputᵀ @ x to main_grad. The product is added directly from registers."""
        grad_output_No = grad_output_No.detach().reshape(-1, grad_output_No.shape[-1])
        _native.gemm(grad_output_No.t(), x_Nk.detach().reshape(-1, x_Nk.shape[-1]), main_grad_ok, True)

    def grouped_linear(self, x_Mk: Tensor, weight_Eok: Tensor, ends_E: Tensor) -> Tensor:
        """Return the products of all groups in one call.

        bf16 also uses the kernel of csrc/cpu. oneDNN is equally fast for one shape, but it repeats its preparation for
        each new number of rows.
        """
        return _native.grouped_product(x_Mk.detach(), weight_Eok.detach().transpose(1, 2), ends_E)

    def grouped_input_gradient(self, grad_Mo: Tensor, weight_Eok: Tensor, ends_E: Tensor) -> Tensor:
        """Return grad @ weight[e] for the rows of each group e."""
        return _native.grouped_product(grad_Mo.detach(), weight_Eok.detach(), ends_E)

    def accumulate_grouped_gradient_(
        self, main_grad_Eok: Tensor, grad_Mo: Tensor, x_Mk: Tensor, ends_E: Tensor
    ) -> None:
        """Add gradᵀ @ x over the rows of each group e to main_grad[e]."""
        _native.accumulate_grouped_gradient_(main_grad_Eok, grad_Mo.detach(), x_Mk.detach(), ends_E)

    def gather_rows(self, x_NH: Tensor, places_Mf: Tensor) -> Tensor:
        """Return the gathered rows. With several places per row, the sum is computed in registers."""
        return _native.gather_rows(x_NH.detach(), places_Mf)

    def route_forward(
        self, logits_NE: Tensor, bias_E: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, weights and experts. Tokens are processed one after the other."""
        return _native.route(logits_NE, bias_E, routing.top_k, routing.sigmoid, routing.normalise, routing.scale)

    def route_backward(
        self, grad_scores_NE: Tensor, grad_weights_Nk: Tensor, scores_NE: Tensor, experts_Nk: Tensor, routing: Routing
    ) -> Tensor:
        """Return the gradient of the logits."""
        return _native.route_backward(
            grad_scores_NE, grad_weights_Nk, scores_NE, experts_Nk, routing.sigmoid, routing.normalise, routing.scale
        )

    def accumulate_(self, main_grad: Tensor, grad: Tensor) -> None:
        """Add grad to main_grad. grad is converted to fp32 during the addition."""
        _native.accumulate_(main_grad, grad.detach())

    def accumulate_rows_(self, main_grad: Tensor, rows_RC: Tensor) -> None:
        """Add the sum of the rows to main_grad. This back-end's norms and GELU return one row."""
        self.accumulate_(main_grad, sum_of_rows(rows_RC))

    def embedding_backward_(
        self, main_grad_vH: Tensor, token_ids_N: Tensor, grad_N_H: Tensor, first_vocab: int
    ) -> None:
        """Add each token's gradient to the token's row, in the order of the tokens."""
        _native.embedding_backward_(main_grad_vH, token_ids_N, grad_N_H.detach(), first_vocab)


def _extras(scores: Scores) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return ALiBi's slopes and the documents of queries and keys, in the types that the kernels read."""
    slopes_a = scores.alibi_slopes_a
    of_queries = scores.documents_BS
    if slopes_a is not None:
        slopes_a = slopes_a.float().contiguous()
    if of_queries is not None:
        of_queries = of_queries.int().contiguous()
    of_keys = of_queries
    if scores.key_documents_BK is not None:
        of_keys = scores.key_documents_BK.int().contiguous()
    return slopes_a, of_queries, of_keys


def _numbers(scores: Scores) -> tuple[float, float, int, int]:
    return scores.scale, scores.softcap, scores.offset, scores.window


def _rounded_product(x: Tensor, b_kn: Tensor) -> Tensor:
    """Return x [..., k] @ b with fp32 sums, rounded once to the type of x."""
    rows = x.shape[:-1].numel()
    ends_1 = torch.full((1,), rows, dtype=torch.int32)
    product_Nn = _native.grouped_product(x.reshape(rows, x.shape[-1]), b_kn[None], ends_1)
    return _unsafe_view(product_Nn, [*x.shape[:-1], b_kn.shape[1]])


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ok: Tensor, bias_o: Tensor | None, ops: CpuOps) -> Tensor:
        ctx.save_for_backward(x, weight_ok)
        ctx.ops = ops
        if x.dtype != torch.float32:
            product = _rounded_product(x, weight_ok.t())
            return product if bias_o is None else product.add_(bias_o)
        rows = x.shape[:-1].numel()
        shape = x.shape[:-1] + weight_ok.shape[:1]
        # Allocate the result in its final shape. If it were a view, autograd would not allow the in-place sum over tp.
        out = x.new_empty(shape) if bias_o is None else bias_o.expand(shape).contiguous()
        _native.gemm(x.reshape(rows, x.shape[-1]), weight_ok.t(), out.view(rows, shape[-1]), bias_o is not None)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_ok = ctx.saved_tensors
        grad_output = grad_outputs[0].contiguous()
        grad_x = ctx.ops.linear_input_gradient(grad_output, weight_ok) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            total = torch.zeros(weight_ok.shape)
            ctx.ops.accumulate_weight_gradient_(total, grad_output, x)
            grad_weight = total.to(weight_ok.dtype)
        grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None
