"""GPU back-end: computes the arguments and launch grids of the Triton kernels, which are compiled ahead of time.

Shapes and meaning are the same as in `ops.reference`. A `Kernels` object runs the kernels: the prebuilt code objects,
or in tests Triton's interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frontier_llm.errors import BackendError
from frontier_llm.ops.differentiable import Normed, NormKind, rows_in_order, sum_of_rows
from frontier_llm.ops.driver import Argument, block_count
from frontier_llm.ops.dropout import HALVES_PER_BLOCK, Mask
from frontier_llm.ops.gpu_attention import GpuAttention
from frontier_llm.ops.gpu_buffers import GpuBuffers
from frontier_llm.ops.gpu_routing import GpuRouting
from frontier_llm.ops.kernel_table import NORM_BLOCKS, ROPE_BLOCKS

# number of programs that fills a GPU: about two for each of the 110 to 132 compute units of a GCD or a Hopper
_PROGRAMS = 240
# largest number of rows that one program sums; the program then writes 1/32 of the number of elements that it reads
_MOST_ROWS = 32


def rows_per_strip(rows: int, column_blocks: int = 1) -> int:
    """Return the number of rows whose weight or bias gradients one program sums.

    With few rows the number is smaller, so that all compute units have work. For example, a microbatch of 2048 tokens
    with tp 8 and sequence parallelism has 256 rows: 128 programs with 2 rows are launched, not 8 programs with 32.
    """
    return max(1, min(_MOST_ROWS, block_count(rows * column_blocks, _PROGRAMS)))


def _in_order(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.detach().contiguous()


def _partial_weights(weights: Tensor | None, column_blocks: int, device: torch.device) -> Tensor:
    """Allocate the partial gradients of the row weights: one row per block of columns."""
    return torch.empty(
        1 if weights is None else column_blocks,
        0 if weights is None else weights.numel(),
        dtype=torch.float32,
        device=device,
    )


def _norm_variant(kind: NormKind, columns: int) -> tuple[str, str]:
    """Return the suffix of the norm kernels' names, and their variant, for rows of `columns` elements."""
    name = "layernorm" if kind.centred else "rmsnorm"
    block = next((block for block in NORM_BLOCKS if columns <= block), None)
    return ("_long", name) if block is None else ("", f"{name}-{block}")


def _rope_variant(cos_SR: Tensor) -> str:
    """Return the variant of the rotary kernels for these angles. Raises BackendError for too many angles per head."""
    half = cos_SR.shape[-1]
    if half > ROPE_BLOCKS[-1]:
        raise BackendError(
            f"rope rotates {2 * half} dims of each head, and the kernel supports at most {2 * ROPE_BLOCKS[-1]}",
            "set ops.rope=reference",
        )
    return f"r{next(block for block in ROPE_BLOCKS if block >= half)}"


class GpuOps(GpuAttention, GpuRouting, GpuBuffers):
    """Implements the ops of `ops.reference` with one set of GPU kernels."""

    def norm_forward(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, kind: NormKind
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the output, and total, mean and scale of `Normed`."""
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        columns = x.shape[-1]
        out = torch.empty_like(x)
        rows = x.numel() // columns
        total = x if residual is None else torch.empty_like(x)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        mean = torch.empty(rows if kind.centred else 0, dtype=torch.float32, device=x.device)
        long, variant = _norm_variant(kind, columns)
        self.kernels.launch(
            f"norm_forward{long}",
            x.dtype,
            variant,
            (rows, 1, 1),
            x=x,
            residual=residual,
            weight=weight,
            bias=bias,
            out=out,
            total=total,
            mean=mean,
            scale=scale,
            columns=columns,
            eps=kind.eps,
            has_residual=int(residual is not None),
            has_bias=int(bias is not None),
        )
        return out, total, mean, scale

    def norm_backward(
        self, grad: Tensor, grad_total: Tensor | None, saved: Normed
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradient of the total, and rows whose sums are the gradients of the weight and the bias.

        One kernel computes all of them, or two kernels if a row is longer than a block. The number of rows is the
        number of programs that sum rows of tokens.
        """
        total, weight, mean, scale, kind, _ = saved
        columns = total.shape[-1]
        rows = scale.numel()
        strip = rows_per_strip(rows)
        strips = block_count(rows, strip)
        grad_x = torch.empty_like(total)
        partial = torch.empty(1 + kind.centred, strips, columns, dtype=torch.float32, device=total.device)
        inputs: dict[str, Argument] = {
            "grad": grad.contiguous(),
            "total": total,
            "mean": mean,
            "scale": scale,
            "columns": columns,
        }
        of_total: dict[str, Argument] = {
            "grad_total": None if grad_total is None else grad_total.contiguous(),
            "weight": weight,
            "grad_x": grad_x,
            "has_grad_total": int(grad_total is not None),
        }
        of_weights: dict[str, Argument] = {
            "partial_weight": partial[0],
            "partial_bias": partial[-1],
            "rows": rows,
            "rows_per_program": strip,
        }
        launch = self.kernels.launch
        long, variant = _norm_variant(kind, columns)
        if long:
            launch("norm_backward_long", total.dtype, variant, (rows, 1, 1), **inputs, **of_total)
            block = self.kernels.block("norm_weight_gradient_long", variant, "BLOCK")
            grid = (block_count(columns, block), strips, 1)
            launch("norm_weight_gradient_long", total.dtype, variant, grid, **inputs, **of_weights)
        else:
            launch("norm_backward", total.dtype, variant, (strips, 1, 1), **inputs, **of_total, **of_weights)
        return grad_x, partial[0], partial[-1]

    def rotate(self, x_SBaD: Tensor, cos_SR: Tensor, sin_SR: Tensor, sign: float) -> Tensor:
        """Return `reference.rope` with the angles times `sign`. Raises BackendError if there are too many angles."""
        x_SBaD = x_SBaD if x_SBaD.stride(-1) == 1 else x_SBaD.contiguous()
        cos_SR = cos_SR.float().contiguous()
        sin_SR = sin_SR.float().contiguous()
        sequence, batch, heads, head_dim = x_SBaD.shape
        half = cos_SR.shape[-1]
        out = torch.empty(x_SBaD.shape, dtype=x_SBaD.dtype, device=x_SBaD.device)
        variant = _rope_variant(cos_SR)
        angle_s = cos_SR.stride(0)
        angle_b = cos_SR.stride(1) if cos_SR.dim() == 3 else 0
        grid = (sequence * batch, block_count(heads, self.kernels.block("rope", variant, "BLOCK_HEADS")), 1)
        self.kernels.launch(
            "rope",
            x_SBaD.dtype,
            variant,
            grid,
            x=x_SBaD,
            cos=cos_SR,
            sin=sin_SR,
            out=out,
            sign=sign,
            batch=batch,
            heads=heads,
            head_dim=head_dim,
            half=half,
            x_s=x_SBaD.stride(0),
            x_b=x_SBaD.stride(1),
            x_a=x_SBaD.stride(2),
            angle_s=angle_s,
            angle_b=angle_b,
        )
        return out

    def split_heads(self, qkv_SBgqD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys, and values, computed in one pass."""
        sequence, batch, groups, members, head_dim = qkv_SBgqD.shape
        q, k, v = (qkv_SBgqD.new_empty(sequence, batch, groups * count, head_dim) for count in (members - 2, 1, 1))
        self._heads("split", qkv_SBgqD.contiguous(), (q, k, v), cos_SR, sin_SR)
        return q, k, v

    def join_heads(self, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """Return the projection's gradient, computed in one pass."""
        sequence, batch, groups, head_dim = grad_k.shape
        grad_qkv = grad_q.new_empty(sequence, batch, groups, grad_q.shape[2] // groups + 2, head_dim)
        self._heads("join", grad_qkv, (grad_q.contiguous(), grad_k.contiguous(), grad_v.contiguous()), cos_SR, sin_SR)
        return grad_qkv

    def _heads(
        self, way: str, qkv_SBgqD: Tensor, parts: tuple[Tensor, Tensor, Tensor], cos_SR: Tensor, sin_SR: Tensor
    ) -> None:
        sequence, batch, groups, members, head_dim = qkv_SBgqD.shape
        cos_SR = cos_SR.float().contiguous()
        sin_SR = sin_SR.float().contiguous()
        variant = f"{way}-{_rope_variant(cos_SR)}"
        q, k, v = parts
        angle_s = cos_SR.stride(0)
        angle_b = cos_SR.stride(1) if cos_SR.dim() == 3 else 0
        grid = (sequence * batch, block_count(groups * members, self.kernels.block("heads", variant, "BLOCK_HEADS")), 1)
        self.kernels.launch(
            "heads",
            qkv_SBgqD.dtype,
            variant,
            grid,
            qkv=qkv_SBgqD,
            q=q,
            k=k,
            v=v,
            cos=cos_SR,
            sin=sin_SR,
            batch=batch,
            groups=groups,
            members=members,
            head_dim=head_dim,
            half=cos_SR.shape[-1],
            angle_s=angle_s,
            angle_b=angle_b,
        )

    def swiglu_forward(self, x_2f: Tensor, weights: Tensor | None) -> Tensor:
        """Return silu(gate) * up, times each row's weight."""
        x_2f = x_2f.contiguous()
        out = torch.empty(*x_2f.shape[:-2], x_2f.shape[-1], dtype=x_2f.dtype, device=x_2f.device)
        grid = self.rows_grid(out, "swiglu_forward", "any")
        self.kernels.launch(
            "swiglu_forward",
            x_2f.dtype,
            "any",
            grid,
            x=x_2f,
            weights=_in_order(weights),
            out=out,
            columns=out.shape[-1],
            has_weights=int(weights is not None),
        )
        return out

    def swiglu_backward(self, grad: Tensor, x_2f: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the row weights."""
        grad = grad.contiguous()
        x_2f = x_2f.contiguous()
        grad_x = torch.empty_like(x_2f)
        grid = self.rows_grid(grad, "swiglu_backward", "any")
        partial = _partial_weights(weights, grid[1], grad.device)
        self.kernels.launch(
            "swiglu_backward",
            x_2f.dtype,
            "any",
            grid,
            grad=grad,
            x=x_2f,
            weights=_in_order(weights),
            grad_x=grad_x,
            partial_weights=partial,
            rows=grid[0],
            columns=grad.shape[-1],
            has_weights=int(weights is not None),
        )
        return grad_x, sum_of_rows(partial)

    def gelu_forward(self, x: Tensor, bias: Tensor | None, approximate: bool, weights: Tensor | None) -> Tensor:
        """Return GELU of x + bias, times each row's weight."""
        x = x.contiguous()
        variant = "tanh" if approximate else "erf"
        has_bias = int(bias is not None)
        out = torch.empty_like(x)
        grid = self.rows_grid(x, "gelu_forward", variant)
        self.kernels.launch(
            "gelu_forward",
            x.dtype,
            variant,
            grid,
            x=x,
            bias=bias,
            weights=_in_order(weights),
            out=out,
            columns=x.shape[-1],
            has_bias=has_bias,
            has_weights=int(weights is not None),
        )
        return out

    def gelu_backward(
        self, grad: Tensor, x: Tensor, bias: Tensor | None, approximate: bool, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of x, rows whose sum is the gradient of the bias, and the gradient of the row weights."""
        grad = grad.contiguous()
        x = x.contiguous()
        variant = "tanh" if approximate else "erf"
        columns = x.shape[-1]
        grad_x = torch.empty_like(x)
        rows = x.numel() // max(1, columns)
        column_blocks = block_count(columns, self.kernels.block("gelu_backward", variant, "BLOCK"))
        strip = rows_per_strip(rows, column_blocks)
        strips = block_count(rows, strip)
        partial = torch.empty(0 if bias is None else strips, columns, dtype=torch.float32, device=x.device)
        grid = (strips, column_blocks, 1)
        partial_weights = _partial_weights(weights, column_blocks, x.device)
        self.kernels.launch(
            "gelu_backward",
            x.dtype,
            variant,
            grid,
            grad=grad,
            x=x,
            bias=bias,
            weights=_in_order(weights),
            grad_x=grad_x,
            partial_bias=partial,
            partial_weights=partial_weights,
            rows=rows,
            columns=columns,
            rows_per_program=strip,
            has_bias=int(bias is not None),
            has_weights=int(weights is not None),
        )
        return grad_x, partial, sum_of_rows(partial_weights)

    def drop(self, x_SBH: Tensor, residual_SBH: Tensor | None, mask: Mask) -> Tensor:
        """Return residual + dropout(x), computed in one pass. The mask exists only in registers."""
        x = x_SBH.detach().contiguous()
        residual = None if residual_SBH is None else residual_SBH.detach().contiguous()
        sequence, batch, columns = x.shape
        out = torch.empty_like(x)
        blocks = block_count(columns, HALVES_PER_BLOCK)
        grid = (sequence * batch, block_count(blocks, self.kernels.block("drop", "any", "BLOCK")), 1)
        self.kernels.launch(
            "drop",
            x.dtype,
            "any",
            grid,
            x=x,
            residual=residual,
            samples=mask.samples_B,
            positions=mask.positions_S.contiguous(),
            out=out,
            key=mask.signed_key,
            threshold=mask.threshold,
            scale=mask.scale,
            batch=batch,
            columns=columns,
            blocks=blocks,
            has_residual=int(residual is not None),
        )
        return out

    def cross_entropy_stats(self, logits_Nv: Tensor, targets_N: Tensor, first_vocab: int) -> Tensor:
        """Return stats_3N of this vocabulary shard."""
        logits_Nv = rows_in_order(logits_Nv)
        rows, columns = logits_Nv.shape
        stats_3N = torch.empty(3, rows, dtype=torch.float32, device=logits_Nv.device)
        self.kernels.launch(
            "cross_entropy_stats",
            logits_Nv.dtype,
            "any",
            (rows, 1, 1),
            logits=logits_Nv,
            targets=targets_N.long().contiguous(),
            stats=stats_3N,
            rows=rows,
            columns=columns,
            row_stride=logits_Nv.stride(0),
            first_vocab=first_vocab,
        )
        return stats_3N

    def cross_entropy_backward_(
        self, logits_Nv: Tensor, targets_N: Tensor, first_vocab: int, logsumexp_N: Tensor, grad_loss_N: Tensor
    ) -> Tensor:
        """Return the gradient in the logits' memory, or in a copy if their rows are not contiguous."""
        # Writing in place is safe: the program (Triton) that overwrites the target's logit is the only program that
        # reads it.
        logits_Nv = rows_in_order(logits_Nv)
        rows, columns = logits_Nv.shape
        grid = (rows, block_count(columns, self.kernels.block("cross_entropy_backward", "any", "BLOCK")), 1)
        self.kernels.launch(
            "cross_entropy_backward",
            logits_Nv.dtype,
            "any",
            grid,
            logits=logits_Nv,
            targets=targets_N.long().contiguous(),
            logsumexp=logsumexp_N.float().contiguous(),
            grad_loss=grad_loss_N.float().contiguous(),
            columns=columns,
            row_stride=logits_Nv.stride(0),
            first_vocab=first_vocab,
        )
        return logits_Nv
