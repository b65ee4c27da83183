"""Forward of causal FlashAttention-2 (arXiv:2307.08691) with grouped heads, ALiBi and document masks.

`attention_scores.py` explains the options. The kernel uses no atomics, so that results are reproducible.
"""

import triton
import triton.language as tl

from frontier_llm.ops.triton.attention_scores import (
    capped_scores,
    load_rows,
    log2_probability_factor,
    masked_scores,
    padded_length,
    score_factors,
    to_product_type,
)


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
    scores = masked_scores(
        capped_scores(products_MN, inner, bound2, SOFTCAP),
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
    p = tl.exp2(scores * outer - (new_top - log2_probability_factor(v_ND.dtype))[:, None])
    shrink = tl.exp2(top - new_top)
    out_MD = tl.dot(to_product_type(p, v_ND.dtype, SOFT_BF16), v_ND, out_MD * shrink[:, None])
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
    scale2, bound2 = score_factors(scale, softcap, SOFTCAP)
    slope2 = 0.0
    row_document = row
    if EXTRAS:
        slope2 = tl.load(slopes + a) * 1.4426950408889634
        key_documents += b * padded_length(keys)
        row_document = tl.load(documents + b * padded_length(sequence) + row)
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
            products_MN = tl.dot(q_MD, tl.trans(load_rows(k, k_s, begin, keys, head_dim, False, BLOCK_N, BLOCK_D)))
            next_k_ND = load_rows(
                k, k_s, tl.minimum(begin + BLOCK_N, past_last), keys, head_dim, False, BLOCK_N, BLOCK_D
            )
            next_v_ND = load_rows(v, v_s, begin, keys, head_dim, False, BLOCK_N, BLOCK_D)
            for first in range(begin, past_last, BLOCK_N):
                k_ND = next_k_ND
                v_ND = next_v_ND
                own_MN = products_MN
                next_k_ND = load_rows(
                    k, k_s, tl.minimum(first + 2 * BLOCK_N, past_last), keys, head_dim, False, BLOCK_N, BLOCK_D
                )
                next_v_ND = load_rows(v, v_s, first + BLOCK_N, keys, head_dim, False, BLOCK_N, BLOCK_D)
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
            products_MN = tl.dot(q_MD, tl.trans(load_rows(k, k_s, first, keys, head_dim, False, BLOCK_N, BLOCK_D)))
            v_ND = load_rows(v, v_s, first, keys, head_dim, False, BLOCK_N, BLOCK_D)
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
        products_MN = tl.dot(q_MD, tl.trans(load_rows(k, k_s, first, keys, head_dim, True, BLOCK_N, BLOCK_D)))
        v_ND = load_rows(v, v_s, first, keys, head_dim, True, BLOCK_N, BLOCK_D)
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
    lse = top - log2_probability_factor(q.dtype.element_ty) + tl.log2(total)
    out_MD = out_MD * (1.0 / total)[:, None]  # one division per row: a division takes eleven instructions
    if EXTRAS:
        sees = top > -1e19
        out_MD = tl.where(sees[:, None], out_MD, 0.0)
        lse = tl.where(sees, lse - slope2 * (row - first_row).to(tl.float32), -float("inf"))
    tl.store(to, out_MD.to(o.dtype.element_ty), mask=inside)
    tl.store(logsumexp + (b * heads + a) * padded_length(sequence) + row, tl.where(row < sequence, lse, float("inf")))
