"""One vocabulary shard's part of the cross-entropy; the logits are read in their own type, never copied to fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy_stats(logits, targets, stats, rows, columns, row_stride, first_vocab, BLOCK: tl.constexpr):
    """stats [3, rows]: max, sum of exp(logit - max) in one pass by rescaling (arXiv:1805.02867), logit of the target or 0."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * row_stride
    top = -float("inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(start + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(value))  # a NaN may be passed over here, but not in the sum
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(value - new_top))
        top = new_top
    tl.store(stats + row, top)
    tl.store(stats + rows + row, total)
    column = tl.load(targets + row) - first_vocab
    here = (column >= 0) & (column < columns)
    tl.store(stats + 2 * rows + row, tl.load(start + column, mask=here, other=0.0).to(tl.float32))


@triton.jit
def cross_entropy_backward(logits, targets, logsumexp, grad_loss, columns, row_stride, first_vocab, BLOCK: tl.constexpr):
    """logits = (exp(logits - logsumexp) - onehot) * grad_loss, in place."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = logits + row.to(tl.int64) * row_stride + column
    value = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
    hit = column == tl.load(targets + row) - first_vocab
    grad = (tl.exp(value - tl.load(logsumexp + row)) - tl.where(hit, 1.0, 0.0)) * tl.load(grad_loss + row)
    tl.store(at, grad.to(logits.dtype.element_ty), mask=inside)
