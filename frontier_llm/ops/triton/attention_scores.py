"""Functions that the forward and the gradient kernels of attention both use: scores, masks, and loads.

Scores are in base 2: log2(e) is part of the scale, because exp2 is one instruction on both vendors' hardware. EXTRAS
adds ALiBi and documents. Without EXTRAS only the diagonal blocks are masked. SOFTCAP, which requires EXTRAS, adds a
soft cap of the scores (Gemma 2, arXiv:2408.00118) and a sliding window of `window` positions.
Queries and keys may be two different parts of a sequence. Query i is `offset` + i positions after the first key, and
sees the keys up to this position. Loads past the end of a part read its last position again. They are not masked,
because lane masks would occupy the scalar registers of CDNA. Positions are compared only in blocks that contain the end
of some row's keys. One comparison covers the diagonal and the end of the keys.
With AHEAD, an iteration of the loop over complete blocks loads the next block. The forward also computes the next
block's product, so that softmax and products overlap (docs/benchmarks/ops.md).
fp16 probabilities are multiplied by 2^14 before a product, and the result is divided by 2^14. Probabilities are at
most 1, and in long rows most of them would be subnormal (below 6.1e-5). MI200's matrix instructions treat subnormal
numbers as zero (docs/numerics.md).
"""

import triton
import triton.language as tl

from frontier_llm.ops.kernel_table import ROWS_PER_PAD

_PAD = tl.constexpr(ROWS_PER_PAD)


@triton.jit
def log2_probability_factor(dtype: tl.constexpr):
    """Return log2 of the factor by which probabilities of this type are multiplied before a matrix product."""
    return 14.0 if dtype == tl.float16 else 0.0


@triton.jit
def probability_factor(dtype: tl.constexpr):
    """Return 2 to the power of `log2_probability_factor`. Triton 3.6 has no power with a scalar base."""
    return 16384.0 if dtype == tl.float16 else 1.0


@triton.jit
def to_product_type(x, dtype: tl.constexpr, SOFT_BF16: tl.constexpr):
    """Return x converted to the operand type of a matrix product.

    CDNA2 has no instruction that converts to bf16. The compiler emits five instructions per number, half of them to
    keep NaN and to round ties to even. Neither is needed here, because a NaN also reaches the fp32 sums. With SOFT_BF16
    the conversion takes one and a half instructions per number.
    """
    if SOFT_BF16 and dtype == tl.bfloat16:
        return ((x.to(tl.uint32, bitcast=True) + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def score_factors(scale, softcap, SOFTCAP: tl.constexpr):
    """Return the factor of products in `capped_scores`, and the cap of base-2 scores."""
    if SOFTCAP:
        return 2.0 * 1.4426950408889634 * scale / softcap, 1.4426950408889634 * softcap
    else:
        return scale * 1.4426950408889634, softcap


@triton.jit
def capped_scores(products, scale2, bound2, SOFTCAP: tl.constexpr):
    """Return base-2 scores, which SOFTCAP replaces by bound2 * tanh(x) with tanh(x) = 1 - 2 / (e^2x + 1).

    e^2x is one instruction, and the formula is correct if it is infinite.
    """
    if SOFTCAP:
        return bound2 * (1.0 - 2.0 / (tl.exp2(products * scale2) + 1.0))
    else:
        return products * scale2


@triton.jit
def gradient_before_cap(ds, scores, bound2, SOFTCAP: tl.constexpr):
    """Return the gradient before the soft cap, from the gradient `ds` of the capped scores."""
    if SOFTCAP:
        share = scores * (1.0 / bound2)
        return ds * (1.0 - share * share)
    else:
        return ds


@triton.jit
def masked_scores(scores, tilt, row, last, column, row_document, column_document, window,
            DIAGONAL: tl.constexpr, EXTRAS: tl.constexpr, SOFTCAP: tl.constexpr):  # fmt: skip
    """Return the base-2 logits of one block, with ALiBi and masks.

    A logit is -inf if `column` comes after `last`. It is about -1e20 if the column is in another document than the row,
    or outside the row's window. The arguments for rows and for columns broadcast against each other. Either of them may
    be the first dim.
    ALiBi is slope * (column - row). The row's part is constant in a softmax, so that only `tilt` = slope * (column - a
    nearby position) is added. Documents and window use arithmetic, because the lane masks of comparisons would
    spill the scalar registers of CDNA.
    A completely hidden block leaves wrong values in the running sums. The next visible block multiplies them by
    exp2(-1e20) = 0. The outputs of rows whose blocks are all hidden are set to 0 at the end.
    """
    if EXTRAS:
        apart = tl.abs(row_document - column_document)
        if SOFTCAP:
            apart = tl.maximum(apart, (row - column - window + 1).to(tl.float32))
        scores = scores + tilt - 1e20 * apart
    if DIAGONAL:
        scores = tl.where(last >= column, scores, -float("inf"))
    return scores


@triton.jit
def padded_length(sequence):
    """Return the padded length of logsumexp, delta and documents. Padding makes masks for them unnecessary."""
    return tl.cdiv(sequence, _PAD) * _PAD


@triton.jit
def load_rows(base, stride, first, end, head_dim, PAST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load BLOCK rows from `first` on.

    With PAST, rows may be past the end, and the last row is read instead. Without PAST, a lane's offset is the same in
    every iteration of a loop.
    Columns past head_dim read the row's first columns again. This is harmless, because the other factor is 0 there or
    the product is not stored.
    """
    row = tl.arange(0, BLOCK)
    if PAST:
        row = tl.minimum(row, end - 1 - first)
    d = tl.arange(0, BLOCK_D) % head_dim
    wide = stride.to(tl.int64)
    return tl.load(base + first * wide + row[:, None] * wide + d[None, :])
