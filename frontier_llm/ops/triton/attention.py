"""Causal FlashAttention-2 (arXiv:2307.08691) with grouped heads, ALiBi and document masks.

The kernels use no atomics, so that results are reproducible.
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
def _lift(dtype: tl.constexpr):
    """Return log2 of the factor of probabilities in products of this type."""
    return 14.0 if dtype == tl.float16 else 0.0


@triton.jit
def _lift_factor(dtype: tl.constexpr):
    """Return 2 to the power of `_lift`. Triton 3.6 has no power with a scalar base."""
    return 16384.0 if dtype == tl.float16 else 1.0


@triton.jit
def _narrow(x, dtype: tl.constexpr, SOFT_BF16: tl.constexpr):
    """Return x converted to the type of a product.

    CDNA2 has no instruction that converts to bf16. The compiler emits five instructions per number, half of them to
    keep NaN and to round ties to even. Neither is needed here, because a NaN also reaches the fp32 sums. With SOFT_BF16
    the conversion takes one and a half instructions per number.
    """
    if SOFT_BF16 and dtype == tl.bfloat16:
        return ((x.to(tl.uint32, bitcast=True) + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _scales(scale, softcap, SOFTCAP: tl.constexpr):
    """Return the factor of products in `_scores`, and the cap of base-2 scores."""
    if SOFTCAP:
        return 2.0 * 1.4426950408889634 * scale / softcap, 1.4426950408889634 * softcap
    else:
        return scale * 1.4426950408889634, softcap


@triton.jit
def _scores(products, scale2, bound2, SOFTCAP: tl.constexpr):
    """Return base-2 scores, which SOFTCAP replaces by bound2 * tanh(x) with tanh(x) = 1 - 2 / (e^2x + 1).

    e^2x is one instruction, and the formula is correct if it is infinite.
    """
    if SOFTCAP:
        return bound2 * (1.0 - 2.0 / (tl.exp2(products * scale2) + 1.0))
    else:
        return products * scale2


@triton.jit
def _bounded_slope(ds, scores, bound2, SOFTCAP: tl.constexpr):
    """Return the gradient before the soft cap, from the gradient `ds` of the capped scores."""
    if SOFTCAP:
        share = scores * (1.0 / bound2)
        return ds * (1.0 - share * share)
    else:
        return ds


@triton.jit
def _logits(scores, tilt, row, last, column, row_document, column_document, window,
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
def _padded(sequence):
    """Return the padded length of logsumexp, delta and documents. Padding makes masks for them unnecessary."""
    return tl.cdiv(sequence, _PAD) * _PAD


@triton.jit
def _rows(base, stride, first, end, head_dim, PAST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
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


@triton.jit
def _forward_block(
    products_MN,
    v_ND,
    first,
    origin,
    row,
    last,
    scale2,
    bound2,
    window,
    slope2,
    key_documents,
    row_document,
    top,
    total,
    out_MD,
    DIAGONAL: tl.constexpr,
    EXTRAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SOFT_BF16: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    column = first + tl.arange(0, BLOCK_N)
    tilt = column
    column_document = column
    if EXTRAS:
        tilt = slope2 * (column - origin).to(tl.float32)
        column_document = tl.load(key_documents + column)
    # The largest product q·k has the largest score, so scaling and subtracting the maximum are one instruction.
    inner, outer = (scale2, 1.0) if EXTRAS else (1.0, scale2)
    scores = _logits(
        _scores(products_MN, inner, bound2, SOFTCAP),
        tilt[None, :],
        row[:, None],
        last[:, None],
        column[None, :],
        row_document[:, None],
        column_document[None, :],
        window,
        DIAGONAL,
        EXTRAS,
        SOFTCAP,
    )
    new_top = tl.maximum(top, tl.max(scores, 1) * outer)
    p = tl.exp2(scores * outer - (new_top - _lift(v_ND.dtype))[:, None])
    shrink = tl.exp2(top - new_top)
    out_MD = tl.dot(_narrow(p, v_ND.dtype, SOFT_BF16), v_ND, out_MD * shrink[:, None])
    return new_top, total * shrink + tl.sum(p, 1), out_MD


@triton.jit
def attention_forward(
    q: "*T:16",
    k: "*T:16",
    v: "*T:16",
    slopes: "*fp32",
    documents: "*fp32:16",
    key_documents: "*fp32:16",
    o: "*T:16",
    logsumexp: "*fp32:16",
    scale: "fp32",
    softcap: "fp32",
    window: "i32",
    sequence: "i32",
    keys: "i32",
    offset: "i32",
    heads: "i32",
    group: "i32",
    head_dim: "i32:16",
    q_s: "i32:16",
    q_b: "i32:16",
    q_a: "i32:16",
    k_s: "i32:16",
    k_b: "i32:16",
    k_a: "i32:16",
    v_s: "i32:16",
    v_b: "i32:16",
    v_a: "i32:16",
    o_s: "i32:16",
    o_b: "i32:16",
    o_a: "i32:16",
    EXTRAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    AHEAD: tl.constexpr,
    SOFT_BF16: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute attention for BLOCK_M queries of one head.

    logsumexp [B, a, padded S] is in base 2. It is inf past the sequence, and -inf for rows that see no keys.
    """
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows start first
    b = (tl.program_id(1) // heads).to(tl.int64)
    a = (tl.program_id(1) % heads).to(tl.int64)
    row = first_row + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (row < sequence)[:, None] & (d < head_dim)[None, :]
    q_MD = tl.load(q + b * q_b + a * q_a + row.to(tl.int64)[:, None] * q_s + d[None, :], mask=inside, other=0.0)
    k = k + b * k_b + (a // group) * k_a
    v = v + b * v_b + (a // group) * v_a
    scale2, bound2 = _scales(scale, softcap, SOFTCAP)
    slope2 = 0.0
    row_document = row
    if EXTRAS:
        slope2 = tl.load(slopes + a) * 1.4426950408889634
        key_documents += b * _padded(keys)
        row_document = tl.load(documents + b * _padded(sequence) + row)
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    origin = first_row + offset
    # every row sees all keys of the blocks before `whole`
    begin = 0
    whole = tl.minimum(origin + 1, keys) // BLOCK_N * BLOCK_N
    if SOFTCAP:
        begin = tl.maximum(origin - window + 1, 0) // BLOCK_N * BLOCK_N
    rows = row + offset
    last = tl.minimum(row + offset, keys - 1)
    if AHEAD:
        if begin < whole:
            past_last = whole - BLOCK_N
            products_MN = tl.dot(q_MD, tl.trans(_rows(k, k_s, begin, keys, head_dim, False, BLOCK_N, BLOCK_D)))
            next_k_ND = _rows(k, k_s, tl.minimum(begin + BLOCK_N, past_last), keys, head_dim, False, BLOCK_N, BLOCK_D)
            next_v_ND = _rows(v, v_s, begin, keys, head_dim, False, BLOCK_N, BLOCK_D)
            for first in range(begin, past_last, BLOCK_N):
                k_ND = next_k_ND
                v_ND = next_v_ND
                own_MN = products_MN
                next_k_ND = _rows(
                    k, k_s, tl.minimum(first + 2 * BLOCK_N, past_last), keys, head_dim, False, BLOCK_N, BLOCK_D
                )
                next_v_ND = _rows(v, v_s, first + BLOCK_N, keys, head_dim, False, BLOCK_N, BLOCK_D)
                products_MN = tl.dot(q_MD, tl.trans(k_ND))
                top, total, out_MD = _forward_block(
                    own_MN,
                    v_ND,
                    first,
                    origin,
                    rows,
                    row,
                    scale2,
                    bound2,
                    window,
                    slope2,
                    key_documents,
                    row_document,
                    top,
                    total,
                    out_MD,
                    False,
                    EXTRAS,
                    SOFTCAP,
                    SOFT_BF16,
                    BLOCK_N,
                )
            top, total, out_MD = _forward_block(
                products_MN,
                next_v_ND,
                past_last,
                origin,
                rows,
                row,
                scale2,
                bound2,
                window,
                slope2,
                key_documents,
                row_document,
                top,
                total,
                out_MD,
                False,
                EXTRAS,
                SOFTCAP,
                SOFT_BF16,
                BLOCK_N,
            )
    else:
        for first in range(begin, whole, BLOCK_N):
            products_MN = tl.dot(q_MD, tl.trans(_rows(k, k_s, first, keys, head_dim, False, BLOCK_N, BLOCK_D)))
            v_ND = _rows(v, v_s, first, keys, head_dim, False, BLOCK_N, BLOCK_D)
            top, total, out_MD = _forward_block(
                products_MN,
                v_ND,
                first,
                origin,
                rows,
                row,
                scale2,
                bound2,
                window,
                slope2,
                key_documents,
                row_document,
                top,
                total,
                out_MD,
                False,
                EXTRAS,
                SOFTCAP,
                SOFT_BF16,
                BLOCK_N,
            )
    for first in range(whole, tl.minimum(origin + BLOCK_M, keys), BLOCK_N):
        products_MN = tl.dot(q_MD, tl.trans(_rows(k, k_s, first, keys, head_dim, True, BLOCK_N, BLOCK_D)))
        v_ND = _rows(v, v_s, first, keys, head_dim, True, BLOCK_N, BLOCK_D)
        top, total, out_MD = _forward_block(
            products_MN,
            v_ND,
            first,
            origin,
            rows,
            last,
            scale2,
            bound2,
            window,
            slope2,
            key_documents,
            row_document,
            top,
            total,
            out_MD,
            True,
            EXTRAS,
            SOFTCAP,
            SOFT_BF16,
            BLOCK_N,
        )
    to = o + b * o_b + a * o_a + row.to(tl.int64)[:, None] * o_s + d[None, :]
    lse = top - _lift(q.dtype.element_ty) + tl.log2(total)
    out_MD = out_MD * (1.0 / total)[:, None]  # one division per row: a division takes eleven instructions
    if EXTRAS:
        sees = top > -1e19
        out_MD = tl.where(sees[:, None], out_MD, 0.0)
        lse = tl.where(sees, lse - slope2 * (row - first_row).to(tl.float32), -float("inf"))
    tl.store(to, out_MD.to(o.dtype.element_ty), mask=inside)
    tl.store(logsumexp + (b * heads + a) * _padded(sequence) + row, tl.where(row < sequence, lse, float("inf")))


@triton.jit
def attention_delta(
    o: "*T:16",
    grad_o: "*T:16",
    delta: "*fp32:16",
    sequence: "i32",
    heads: "i32",
    head_dim: "i32:16",
    o_s: "i32:16",
    o_b: "i32:16",
    o_a: "i32:16",
    g_s: "i32:16",
    g_b: "i32:16",
    g_a: "i32:16",
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute delta [B, a, padded S] = rowsum(o * grad_o). It is 0 past the sequence."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = (tl.program_id(1) // heads).to(tl.int64)
    a = (tl.program_id(1) % heads).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = (row < sequence)[:, None] & (d < head_dim)[None, :]
    o_MD = tl.load(o + b * o_b + a * o_a + row.to(tl.int64)[:, None] * o_s + d[None, :], mask=inside, other=0.0).to(
        tl.float32
    )
    g_MD = tl.load(
        grad_o + b * g_b + a * g_a + row.to(tl.int64)[:, None] * g_s + d[None, :], mask=inside, other=0.0
    ).to(tl.float32)
    tl.store(delta + (b * heads + a) * _padded(sequence) + row, tl.sum(o_MD * g_MD, 1))


@triton.jit
def _grad_kv_block(
    gk_ND,
    gv_ND,
    k_ND,
    v_ND,
    q_MD,
    g_MD,
    logsumexp,
    delta,
    first,
    origin,
    column,
    scale2,
    bound2,
    window,
    slope2,
    documents,
    column_document,
    DIAGONAL: tl.constexpr,
    EXTRAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SOFT_BF16: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add one block of queries to grad_k and grad_v.

    `origin` and `column` are positions relative to the first query. Scores are transposed, [N, M]. They can then be the
    left operand of both products without passing through shared memory. Results for columns past the keys are not
    stored.
    """
    row = first + tl.arange(0, BLOCK_M)
    lse = tl.load(logsumexp + row)
    row_delta = tl.load(delta + row)
    tilt = column
    row_document = row
    if EXTRAS:
        tilt = slope2 * (column - origin).to(tl.float32)
        row_document = tl.load(documents + row)
        lse += slope2 * (row - origin).to(tl.float32)
    scores = _scores(tl.dot(k_ND, tl.trans(q_MD)), scale2, bound2, SOFTCAP)
    p_NM = tl.exp2(
        _logits(
            scores,
            tilt[:, None],
            row[None, :],
            row[None, :],
            column[:, None],
            row_document[None, :],
            column_document[:, None],
            window,
            DIAGONAL,
            EXTRAS,
            SOFTCAP,
        )
        - lse[None, :]
    )
    gv_ND = tl.dot(_narrow(p_NM * _lift_factor(g_MD.dtype), g_MD.dtype, SOFT_BF16), g_MD, gv_ND)
    ds_NM = _bounded_slope(p_NM * (tl.dot(v_ND, tl.trans(g_MD)) - row_delta[None, :]), scores, bound2, SOFTCAP)
    return tl.dot(_narrow(ds_NM, q_MD.dtype, SOFT_BF16), q_MD, gk_ND), gv_ND


@triton.jit
def attention_grad_kv(
    q: "*T:16",
    k: "*T:16",
    v: "*T:16",
    slopes: "*fp32",
    documents: "*fp32:16",
    key_documents: "*fp32:16",
    grad_o: "*T:16",
    logsumexp: "*fp32:16",
    delta: "*fp32:16",
    grad_k: "*T:16",
    grad_v: "*T:16",
    scale: "fp32",
    softcap: "fp32",
    window: "i32",
    sequence: "i32",
    keys: "i32",
    offset: "i32",
    heads: "i32",
    group: "i32",
    head_dim: "i32:16",
    q_s: "i32:16",
    q_b: "i32:16",
    q_a: "i32:16",
    k_s: "i32:16",
    k_b: "i32:16",
    k_a: "i32:16",
    v_s: "i32:16",
    v_b: "i32:16",
    v_a: "i32:16",
    g_s: "i32:16",
    g_b: "i32:16",
    g_a: "i32:16",
    gk_s: "i32:16",
    gk_b: "i32:16",
    gk_a: "i32:16",
    EXTRAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    AHEAD: tl.constexpr,
    SOFT_BF16: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute grad_k and grad_v for BLOCK_N positions of one key/value head.

    The program sums over all query heads that read this head, and over all later queries. grad_k and grad_v have the
    same strides.
    """
    kv_heads = heads // group
    first_column = tl.program_id(0) * BLOCK_N
    b = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = (tl.program_id(1) % kv_heads).to(tl.int64)
    column = first_column + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = (column < keys)[:, None] & (d < head_dim)[None, :]
    k_ND = tl.load(k + b * k_b + head * k_a + column.to(tl.int64)[:, None] * k_s + d[None, :], mask=inside, other=0.0)
    v_ND = tl.load(v + b * v_b + head * v_a + column.to(tl.int64)[:, None] * v_s + d[None, :], mask=inside, other=0.0)
    column_document = column
    if EXTRAS:
        documents += b * _padded(sequence)
        column_document = tl.load(key_documents + b * _padded(keys) + column)
    scale2, bound2 = _scales(scale, softcap, SOFTCAP)
    origin = first_column - offset
    begin = tl.maximum(origin, 0) // BLOCK_M * BLOCK_M
    # from `whole` on every row sees all of these keys
    whole = tl.cdiv(tl.maximum(origin + BLOCK_N - 1, 0), BLOCK_M) * BLOCK_M
    past_last = sequence
    if SOFTCAP:
        past_last = tl.minimum(sequence, origin + BLOCK_N + window - 1)
    # an incomplete last block is processed together with the blocks on the diagonal
    whole_end = tl.maximum(whole, tl.minimum(tl.cdiv(past_last, BLOCK_M), sequence // BLOCK_M) * BLOCK_M)
    diagonal = tl.cdiv(tl.maximum(tl.minimum(whole, past_last) - begin, 0), BLOCK_M)
    tail = (past_last > whole_end).to(tl.int32)
    gk_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    gv_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(0, group):
        a = head * group + member
        slope2 = 0.0
        if EXTRAS:
            slope2 = tl.load(slopes + a) * 1.4426950408889634
        q_a_start = q + b * q_b + a * q_a
        g_a_start = grad_o + b * g_b + a * g_a
        lse_start = logsumexp + (b * heads + a) * _padded(sequence)
        delta_start = delta + (b * heads + a) * _padded(sequence)
        for turn in range(0, diagonal + tail):
            first = tl.where(turn < diagonal, begin + turn * BLOCK_M, whole_end)
            q_MD = _rows(q_a_start, q_s, first, sequence, head_dim, True, BLOCK_M, BLOCK_D)
            g_MD = _rows(g_a_start, g_s, first, sequence, head_dim, True, BLOCK_M, BLOCK_D)
            gk_ND, gv_ND = _grad_kv_block(
                gk_ND,
                gv_ND,
                k_ND,
                v_ND,
                q_MD,
                g_MD,
                lse_start,
                delta_start,
                first,
                origin,
                column - offset,
                scale2,
                bound2,
                window,
                slope2,
                documents,
                column_document,
                True,
                EXTRAS,
                SOFTCAP,
                SOFT_BF16,
                BLOCK_M,
            )
        if AHEAD:
            next_q_MD = _rows(q_a_start, q_s, whole, sequence, head_dim, True, BLOCK_M, BLOCK_D)
            next_g_MD = _rows(g_a_start, g_s, whole, sequence, head_dim, True, BLOCK_M, BLOCK_D)
        for first in range(whole, whole_end, BLOCK_M):
            if AHEAD:
                q_MD = next_q_MD
                g_MD = next_g_MD
                following = tl.minimum(first + BLOCK_M, whole_end - BLOCK_M)
                next_q_MD = _rows(q_a_start, q_s, following, sequence, head_dim, False, BLOCK_M, BLOCK_D)
                next_g_MD = _rows(g_a_start, g_s, following, sequence, head_dim, False, BLOCK_M, BLOCK_D)
            else:
                q_MD = _rows(q_a_start, q_s, first, sequence, head_dim, False, BLOCK_M, BLOCK_D)
                g_MD = _rows(g_a_start, g_s, first, sequence, head_dim, False, BLOCK_M, BLOCK_D)
            gk_ND, gv_ND = _grad_kv_block(
                gk_ND,
                gv_ND,
                k_ND,
                v_ND,
                q_MD,
                g_MD,
                lse_start,
                delta_start,
                first,
                origin,
                column - offset,
                scale2,
                bound2,
                window,
                slope2,
                documents,
                column_document,
                False,
                EXTRAS,
                SOFTCAP,
                SOFT_BF16,
                BLOCK_M,
            )
    to = b * gk_b + head * gk_a + column.to(tl.int64)[:, None] * gk_s + d[None, :]
    tl.store(grad_k + to, (gk_ND * scale).to(grad_k.dtype.element_ty), mask=inside)
    tl.store(grad_v + to, (gv_ND * (1.0 / _lift_factor(v.dtype.element_ty))).to(grad_v.dtype.element_ty), mask=inside)


@triton.jit
def _grad_q_block(
    gq_MD,
    q_MD,
    g_MD,
    lse,
    row_delta,
    k,
    v,
    k_s,
    v_s,
    first,
    origin,
    row,
    last,
    keys,
    head_dim,
    scale2,
    bound2,
    window,
    slope2,
    key_documents,
    row_document,
    DIAGONAL: tl.constexpr,
    EXTRAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SOFT_BF16: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    column = first + tl.arange(0, BLOCK_N)
    k_ND = _rows(k, k_s, first, keys, head_dim, DIAGONAL, BLOCK_N, BLOCK_D)
    v_ND = _rows(v, v_s, first, keys, head_dim, DIAGONAL, BLOCK_N, BLOCK_D)
    tilt = column
    column_document = column
    if EXTRAS:
        tilt = slope2 * (column - origin).to(tl.float32)
        column_document = tl.load(key_documents + column)
    scores = _scores(tl.dot(q_MD, tl.trans(k_ND)), scale2, bound2, SOFTCAP)
    p = tl.exp2(
        _logits(
            scores,
            tilt[None, :],
            row[:, None],
            last[:, None],
            column[None, :],
            row_document[:, None],
            column_document[None, :],
            window,
            DIAGONAL,
            EXTRAS,
            SOFTCAP,
        )
        - lse[:, None]
    )
    ds = _bounded_slope(p * (tl.dot(g_MD, tl.trans(v_ND)) - row_delta[:, None]), scores, bound2, SOFTCAP)
    return tl.dot(_narrow(ds, k_ND.dtype, SOFT_BF16), k_ND, gq_MD)


@triton.jit
def attention_grad_q(
    q: "*T:16",
    k: "*T:16",
    v: "*T:16",
    slopes: "*fp32",
    documents: "*fp32:16",
    key_documents: "*fp32:16",
    grad_o: "*T:16",
    logsumexp: "*fp32:16",
    delta: "*fp32:16",
    grad_q: "*T:16",
    scale: "fp32",
    softcap: "fp32",
    window: "i32",
    sequence: "i32",
    keys: "i32",
    offset: "i32",
    heads: "i32",
    group: "i32",
    head_dim: "i32:16",
    q_s: "i32:16",
    q_b: "i32:16",
    q_a: "i32:16",
    k_s: "i32:16",
    k_b: "i32:16",
    k_a: "i32:16",
    v_s: "i32:16",
    v_b: "i32:16",
    v_a: "i32:16",
    g_s: "i32:16",
    g_b: "i32:16",
    g_a: "i32:16",
    gq_s: "i32:16",
    gq_b: "i32:16",
    gq_a: "i32:16",
    EXTRAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SOFT_BF16: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute grad_q for BLOCK_M queries of one head."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    b = (tl.program_id(1) // heads).to(tl.int64)
    a = (tl.program_id(1) % heads).to(tl.int64)
    row = first_row + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (row < sequence)[:, None] & (d < head_dim)[None, :]
    q_MD = tl.load(q + b * q_b + a * q_a + row.to(tl.int64)[:, None] * q_s + d[None, :], mask=inside, other=0.0)
    g_MD = tl.load(grad_o + b * g_b + a * g_a + row.to(tl.int64)[:, None] * g_s + d[None, :], mask=inside, other=0.0)
    at = (b * heads + a) * _padded(sequence) + row
    lse = tl.load(logsumexp + at, mask=row < sequence, other=float("inf"))
    row_delta = tl.load(delta + at, mask=row < sequence, other=0.0)
    k = k + b * k_b + (a // group) * k_a
    v = v + b * v_b + (a // group) * v_a
    scale2, bound2 = _scales(scale, softcap, SOFTCAP)
    slope2 = 0.0
    row_document = row
    if EXTRAS:
        slope2 = tl.load(slopes + a) * 1.4426950408889634
        key_documents += b * _padded(keys)
        row_document = tl.load(documents + b * _padded(sequence) + row)
        lse += slope2 * (row - first_row).to(tl.float32)
    gq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    origin = first_row + offset
    # every row sees all keys of the blocks before `whole`
    begin = 0
    whole = tl.minimum(origin + 1, keys) // BLOCK_N * BLOCK_N
    if SOFTCAP:
        begin = tl.maximum(origin - window + 1, 0) // BLOCK_N * BLOCK_N
    for first in range(begin, whole, BLOCK_N):
        gq_MD = _grad_q_block(
            gq_MD,
            q_MD,
            g_MD,
            lse,
            row_delta,
            k,
            v,
            k_s,
            v_s,
            first,
            origin,
            row + offset,
            row,
            keys,
            head_dim,
            scale2,
            bound2,
            window,
            slope2,
            key_documents,
            row_document,
            False,
            EXTRAS,
            SOFTCAP,
            SOFT_BF16,
            BLOCK_N,
            BLOCK_D,
        )
    last = tl.minimum(row + offset, keys - 1)
    for first in range(whole, tl.minimum(origin + BLOCK_M, keys), BLOCK_N):
        gq_MD = _grad_q_block(
            gq_MD,
            q_MD,
            g_MD,
            lse,
            row_delta,
            k,
            v,
            k_s,
            v_s,
            first,
            origin,
            row + offset,
            last,
            keys,
            head_dim,
            scale2,
            bound2,
            window,
            slope2,
            key_documents,
            row_document,
            True,
            EXTRAS,
            SOFTCAP,
            SOFT_BF16,
            BLOCK_N,
            BLOCK_D,
        )
    to = grad_q + b * gq_b + a * gq_a + row.to(tl.int64)[:, None] * gq_s + d[None, :]
    tl.store(to, (gq_MD * scale).to(grad_q.dtype.element_ty), mask=inside)
