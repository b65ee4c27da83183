"""Routing in one pass: scores over all experts, the `top_k` best experts, and their weights.

Routing is in fp32 for every working type.
"""

import triton
import triton.language as tl


@triton.jit
def route_forward(
    logits: "*fp32:16",
    bias: "*fp32:16",
    scores: "*fp32:16",
    weights: "*fp32",
    experts: "*i64",
    rows: "i32",
    count: "i32:16",
    top_k: "i32",
    scale: "fp32",
    sigmoid: "i32",
    normalise: "i32",
    has_bias: "i32",
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute scores, weights and chosen experts for BLOCK_N tokens.

    Among equal experts the one with the smallest index is chosen. NaN comes last, so that there are always `top_k`
    different experts.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    free = (row < rows)[:, None] & (e < count)[None, :]
    at = row[:, None] * count + e[None, :]
    logit = tl.load(logits + at, mask=free, other=0.0)
    if sigmoid:
        score = tl.sigmoid(logit)
    else:
        power = tl.where(free, tl.exp(logit - tl.max(tl.where(free, logit, -float("inf")), 1)[:, None]), 0.0)
        score = power / tl.where(row < rows, tl.sum(power, 1), 1.0)[:, None]
    tl.store(scores + at, score, mask=free)
    preferred = logit
    if has_bias:
        preferred = score + tl.load(bias + e, mask=e < count, other=0.0)[None, :]
    preferred = tl.where(preferred == preferred, preferred, -float("inf"))
    total = tl.zeros([BLOCK_N], tl.float32)
    weight = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    chosen = tl.zeros([BLOCK_N, BLOCK_K], tl.int32)
    for j in range(0, top_k):
        best = tl.max(tl.where(free, preferred, -float("inf")), 1)
        first = tl.min(tl.where(free & (preferred == best[:, None]), e[None, :], BLOCK_E), 1)
        mine = e[None, :] == first[:, None]
        value = tl.sum(tl.where(mine, score, 0.0), 1)
        free = free & (e[None, :] != first[:, None])
        total += value
        weight = tl.where(k[None, :] == j, value[:, None], weight)
        chosen = tl.where(k[None, :] == j, first[:, None], chosen)
    if normalise:
        weight = weight / (total + 1e-20)[:, None]
    to = row[:, None] * top_k + k[None, :]
    inside = (row < rows)[:, None] & (k < top_k)[None, :]
    tl.store(weights + to, weight * scale, mask=inside)
    tl.store(experts + to, chosen.to(tl.int64), mask=inside)


@triton.jit
def route_backward(
    grad_scores: "*fp32:16",
    grad_weights: "*fp32",
    scores: "*fp32:16",
    experts: "*i64",
    grad_logits: "*fp32:16",
    rows: "i32",
    count: "i32:16",
    top_k: "i32",
    scale: "fp32",
    sigmoid: "i32",
    normalise: "i32",
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Compute the logits' gradient from the gradients of the scores and of the chosen experts' weights."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    inside = (row < rows)[:, None] & (e < count)[None, :]
    at = row[:, None] * count + e[None, :]
    score = tl.load(scores + at, mask=inside, other=0.0)
    of_weights = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    chosen = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)  # 1 for chosen experts
    for j in range(0, top_k):
        expert = tl.load(experts + row * top_k + j, mask=row < rows, other=0).to(tl.int32)
        grad = tl.load(grad_weights + row * top_k + j, mask=row < rows, other=0.0) * scale
        mine = e[None, :] == expert[:, None]
        of_weights = tl.where(mine, grad[:, None], of_weights)
        chosen = tl.where(mine, 1.0, chosen)
    if normalise:
        total = tl.sum(chosen * score, 1) + 1e-20
        mean = tl.sum(of_weights * score, 1) / total
        of_weights = chosen * (of_weights - mean[:, None]) / total[:, None]
    of_scores = of_weights + tl.load(grad_scores + at, mask=inside, other=0.0)
    drawn = of_scores * score
    if sigmoid == 0:
        # a softmax's scores depend on all logits
        drawn = tl.broadcast_to(tl.sum(drawn, 1)[:, None], [BLOCK_N, BLOCK_E])
    tl.store(grad_logits + at, score * (of_scores - drawn), mask=inside)
