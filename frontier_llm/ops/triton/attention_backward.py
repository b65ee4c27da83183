"""Gradients of causal FlashAttention-2 (arXiv:2307.08691) with grouped heads, ALiBi and document masks.

`attention_scores.py` explains the options. The kernels use no atomics, so that results are reproducible.
`attention_grad_q` also writes delta, the row sums of o * grad_o. `attention_grad_kv` reads delta, so it runs second.
"""

import triton
import triton.language as tl

from frontier_llm.ops.triton.attention_scores import (
    capped_scores,
    gradient_before_cap,
    load_rows,
    masked_scores,
    padded_length,
    probability_factor,
    score_factors,
    to_product_type,
)


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
    scores = capped_scores(tl.dot(k_ND, tl.trans(q_MD)), scale2, bound2, SOFTCAP)
    p_NM = tl.exp2(
        masked_scores(
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
    gv_ND = tl.dot(to_product_type(p_NM * probability_factor(g_MD.dtype), g_MD.dtype, SOFT_BF16), g_MD, gv_ND)
    ds_NM = gradient_before_cap(p_NM * (tl.dot(v_ND, tl.trans(g_MD)) - row_delta[None, :]), scores, bound2, SOFTCAP)
    return tl.dot(to_product_type(ds_NM, q_MD.dtype, SOFT_BF16), q_MD, gk_ND), gv_ND


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
        documents += b * padded_length(sequence)
        column_document = tl.load(key_documents + b * padded_length(keys) + column)
    scale2, bound2 = score_factors(scale, softcap, SOFTCAP)
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
        lse_start = logsumexp + (b * heads + a) * padded_length(sequence)
        delta_start = delta + (b * heads + a) * padded_length(sequence)
        for turn in range(0, diagonal + tail):
            first = tl.where(turn < diagonal, begin + turn * BLOCK_M, whole_end)
            q_MD = load_rows(q_a_start, q_s, first, sequence, head_dim, True, BLOCK_M, BLOCK_D)
            g_MD = load_rows(g_a_start, g_s, first, sequence, head_dim, True, BLOCK_M, BLOCK_D)
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
            next_q_MD = load_rows(q_a_start, q_s, whole, sequence, head_dim, True, BLOCK_M, BLOCK_D)
            next_g_MD = load_rows(g_a_start, g_s, whole, sequence, head_dim, True, BLOCK_M, BLOCK_D)
        for first in range(whole, whole_end, BLOCK_M):
            if AHEAD:
                q_MD = next_q_MD
                g_MD = next_g_MD
                following = tl.minimum(first + BLOCK_M, whole_end - BLOCK_M)
                next_q_MD = load_rows(q_a_start, q_s, following, sequence, head_dim, False, BLOCK_M, BLOCK_D)
                next_g_MD = load_rows(g_a_start, g_s, following, sequence, head_dim, False, BLOCK_M, BLOCK_D)
            else:
                q_MD = load_rows(q_a_start, q_s, first, sequence, head_dim, False, BLOCK_M, BLOCK_D)
                g_MD = load_rows(g_a_start, g_s, first, sequence, head_dim, False, BLOCK_M, BLOCK_D)
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
    tl.store(
        grad_v + to, (gv_ND * (1.0 / probability_factor(v.dtype.element_ty))).to(grad_v.dtype.element_ty), mask=inside
    )


@triton.jit
def _load_inside(start, stride, row, d, inside):
    """Load rows of one head. Elements outside are 0."""
    return tl.load(start + row.to(tl.int64)[:, None] * stride + d[None, :], mask=inside, other=0.0)


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
    k_ND = load_rows(k, k_s, first, keys, head_dim, DIAGONAL, BLOCK_N, BLOCK_D)
    v_ND = load_rows(v, v_s, first, keys, head_dim, DIAGONAL, BLOCK_N, BLOCK_D)
    tilt = column
    column_document = column
    if EXTRAS:
        tilt = slope2 * (column - origin).to(tl.float32)
        column_document = tl.load(key_documents + column)
    scores = capped_scores(tl.dot(q_MD, tl.trans(k_ND)), scale2, bound2, SOFTCAP)
    p = tl.exp2(
        masked_scores(
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
    ds = gradient_before_cap(p * (tl.dot(g_MD, tl.trans(v_ND)) - row_delta[:, None]), scores, bound2, SOFTCAP)
    return tl.dot(to_product_type(ds, k_ND.dtype, SOFT_BF16), k_ND, gq_MD)


@triton.jit
def attention_grad_q(
    q: "*T:16",
    k: "*T:16",
    v: "*T:16",
    slopes: "*fp32",
    documents: "*fp32:16",
    key_documents: "*fp32:16",
    grad_o: "*T:16",
    o: "*T:16",
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
    o_s: "i32:16",
    o_b: "i32:16",
    o_a: "i32:16",
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
    """Compute grad_q and delta for BLOCK_M queries of one head.

    delta [B, a, padded S] = rowsum(o * grad_o). It is 0 past the sequence.
    """
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    b = (tl.program_id(1) // heads).to(tl.int64)
    a = (tl.program_id(1) % heads).to(tl.int64)
    row = first_row + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (row < sequence)[:, None] & (d < head_dim)[None, :]
    q_MD = _load_inside(q + b * q_b + a * q_a, q_s, row, d, inside)
    g_MD = _load_inside(grad_o + b * g_b + a * g_a, g_s, row, d, inside)
    at = (b * heads + a) * padded_length(sequence) + row
    lse = tl.load(logsumexp + at, mask=row < sequence, other=float("inf"))
    o_MD = _load_inside(o + b * o_b + a * o_a, o_s, row, d, inside)
    row_delta = tl.sum(o_MD.to(tl.float32) * g_MD.to(tl.float32), 1)
    tl.store(delta + at, row_delta)
    k = k + b * k_b + (a // group) * k_a
    v = v + b * v_b + (a // group) * v_a
    scale2, bound2 = score_factors(scale, softcap, SOFTCAP)
    slope2 = 0.0
    row_document = row
    if EXTRAS:
        slope2 = tl.load(slopes + a) * 1.4426950408889634
        key_documents += b * padded_length(keys)
        row_document = tl.load(documents + b * padded_length(sequence) + row)
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
