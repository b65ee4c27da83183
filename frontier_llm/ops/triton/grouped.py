"""Matrix products over groups of rows of different lengths (the tokens of one expert after the other).

The kernels use no atomics, so that results are reproducible. The ends of the groups are read on the device. The grid is
large enough for any distribution of the rows over groups, and programs without rows return immediately.
"""

import triton
import triton.language as tl


@triton.jit
def _group_of(slot, ends, groups, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return (group, its first row, the row after its last, the first row of this slot's block).

    Group e has the slots from first_row // BLOCK_M + e to end // BLOCK_M + e. These slots are enough for the group's
    blocks of rows, with at most one unused slot. This formula needs only the group's own ends. An exact numbering of
    the blocks would need a sum over all earlier groups. Slots after the last group return an empty group.
    """
    group = 0
    for first in range(0, groups, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        last_slot = tl.load(ends + e, mask=e < groups, other=0) // BLOCK_M + e
        group += tl.sum(((last_slot < slot) & (e < groups)).to(tl.int32), 0)
    begin = tl.where(group > 0, tl.load(ends + tl.maximum(group - 1, 0)), 0)
    return (
        group,
        begin,
        tl.load(ends + group, mask=group < groups, other=0),
        begin + (slot - begin // BLOCK_M - group) * BLOCK_M,
    )


@triton.jit
def grouped_product(
    x: "*T:16",
    weight: "*T:16",
    ends: "*i32",
    out: "*T:16",
    groups: "i32",
    columns: "i32:16",
    depth: "i32:16",
    ALONG_DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Multiply BLOCK_M rows of one group by BLOCK_N columns of its weights.

    With ALONG_DEPTH the weights are contiguous along the depth (a linear layer), otherwise along the columns (its
    backward). Rows past the group's end read its last row and are not written.
    """
    group, _, end, first_row = _group_of(tl.program_id(1), ends, groups, BLOCK_M, BLOCK_E)
    if first_row >= end:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight += group.to(tl.int64) * columns * depth
    x_MK = x + tl.minimum(row, end - 1).to(tl.int64)[:, None] * depth + k[None, :]
    there = (n < columns)[None, :]
    if ALONG_DEPTH:
        w_NK = weight + tl.minimum(n, columns - 1).to(tl.int64)[:, None] * depth + k[None, :]
    else:
        w_KN = weight + k.to(tl.int64)[:, None] * columns + n[None, :]
    out_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    whole = depth // BLOCK_K * BLOCK_K
    for _first in range(0, whole, BLOCK_K):
        if ALONG_DEPTH:
            out_MN = tl.dot(tl.load(x_MK), tl.trans(tl.load(w_NK)), out_MN)
            w_NK += BLOCK_K
        else:
            out_MN = tl.dot(tl.load(x_MK), tl.load(w_KN, mask=there, other=0.0), out_MN)
            w_KN += BLOCK_K * columns
        x_MK += BLOCK_K
    if whole < depth:
        inside = whole + k < depth
        left = tl.load(x_MK, mask=inside[None, :], other=0.0)
        if ALONG_DEPTH:
            out_MN = tl.dot(left, tl.trans(tl.load(w_NK, mask=inside[None, :], other=0.0)), out_MN)
        else:
            out_MN = tl.dot(left, tl.load(w_KN, mask=inside[:, None] & there, other=0.0), out_MN)
    to = out + row.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(to, out_MN.to(out.dtype.element_ty), mask=(row < end)[:, None] & there)


@triton.jit
def grouped_weight_gradient(
    grad: "*T:16",
    x: "*T:16",
    ends: "*i32",
    main_grad: "*fp32:16",
    outputs: "i32:16",
    inputs: "i32:16",
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add gradᵀ @ x over the group's rows to main_grad[group].

    A program computes BLOCK_N outputs by BLOCK_K inputs and reads BLOCK_M rows at a time.
    """
    group = tl.program_id(2)
    begin = tl.where(group > 0, tl.load(ends + tl.maximum(group - 1, 0)), 0)
    end = tl.load(ends + group)
    if begin >= end:
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = begin.to(tl.int64) + tl.arange(0, BLOCK_M)
    g_MN = grad + row[:, None] * outputs + n[None, :]
    x_MK = x + row[:, None] * inputs + k[None, :]
    has_n = (n < outputs)[None, :]
    has_k = (k < inputs)[None, :]
    sum_NK = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    whole = (end - begin) // BLOCK_M * BLOCK_M
    for _first in range(0, whole, BLOCK_M):
        sum_NK = tl.dot(tl.trans(tl.load(g_MN, mask=has_n, other=0.0)), tl.load(x_MK, mask=has_k, other=0.0), sum_NK)
        g_MN += BLOCK_M * outputs
        x_MK += BLOCK_M * inputs
    if begin + whole < end:
        inside = (row + whole < end)[:, None]
        g_left = tl.load(g_MN, mask=inside & has_n, other=0.0)
        x_left = tl.load(x_MK, mask=inside & has_k, other=0.0)
        sum_NK = tl.dot(tl.trans(g_left), x_left, sum_NK)
    to = main_grad + group.to(tl.int64) * outputs * inputs + n.to(tl.int64)[:, None] * inputs + k[None, :]
    inside = (n < outputs)[:, None] & has_k
    tl.store(to, tl.load(to, mask=inside, other=0.0) + sum_NK, mask=inside)
