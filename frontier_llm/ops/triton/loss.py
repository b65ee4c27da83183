"""One vocabulary shard's part of the cross-entropy. The logits are read in their own type, without a copy in fp32.

Vocabularies are often not a multiple of 16 (GPT-2's has 50257 words), but rows are padded and therefore aligned. All
complete blocks of a row are read without a mask, in 16-byte accesses. Only the last block needs a mask, which prevents
such accesses.
"""

import triton
import triton.language as tl


@triton.jit
def _seen(value, top, total):
    """Update the running maximum and the sum of exp(logit - maximum) with one more block (arXiv:1805.02867)."""
    new_top = tl.maximum(top, tl.max(value))  # the maximum may ignore a NaN, but the sum does not
    return new_top, total * tl.exp(top - new_top) + tl.sum(tl.exp(value - new_top))


@triton.jit
def cross_entropy_stats(
    logits: "*T:16",
    targets: "*i64",
    stats: "*fp32",
    rows: "i32",
    columns: "i32",
    row_stride: "i32:16",
    first_vocab: "i32",
    BLOCK: tl.constexpr,
):
    """Compute stats [3, rows] in one pass: max, sum of exp(logit - max), and the target's logit or 0."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * row_stride
    lanes = tl.arange(0, BLOCK)
    top = -float("inf")
    total = 0.0
    whole = columns // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        top, total = _seen(tl.load(start + first + lanes).to(tl.float32), top, total)
    if whole < columns:
        rest = tl.load(start + whole + lanes, mask=whole + lanes < columns, other=-float("inf"))
        top, total = _seen(rest.to(tl.float32), top, total)
    tl.store(stats + row, top)
    tl.store(stats + rows + row, total)
    column = tl.load(targets + row) - first_vocab
    here = (column >= 0) & (column < columns)
    tl.store(stats + 2 * rows + row, tl.load(start + column, mask=here, other=0.0).to(tl.float32))


@triton.jit
def _gradient(value, column, target, logsumexp, grad_loss):
    return (tl.exp(value.to(tl.float32) - logsumexp) - tl.where(column == target, 1.0, 0.0)) * grad_loss


@triton.jit
def cross_entropy_backward(
    logits: "*T:16", targets: "*i64", logsumexp: "*fp32:16", grad_loss: "*fp32", columns: "i32", row_stride: "i32:16",
    first_vocab: "i32", BLOCK: tl.constexpr
):  # fmt: skip
    """Compute logits = (exp(logits - logsumexp) - onehot) * grad_loss in place."""
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    at = logits + row.to(tl.int64) * row_stride + column
    target = tl.load(targets + row) - first_vocab
    total = tl.load(logsumexp + row)
    scale = tl.load(grad_loss + row)
    if first + BLOCK <= columns:
        tl.store(at, _gradient(tl.load(at), column, target, total, scale).to(logits.dtype.element_ty))
    else:
        inside = column < columns
        value = tl.load(at, mask=inside, other=-float("inf"))
        tl.store(at, _gradient(value, column, target, total, scale).to(logits.dtype.element_ty), mask=inside)
