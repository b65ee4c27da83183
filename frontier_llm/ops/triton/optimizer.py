"""Passes over flat fp32 buffers: AdamW, the gradient norm, and gradient sums.

The kernels are memory-bound, and each kernel reads its inputs and writes its outputs once.
"""

import triton
import triton.language as tl


@triton.jit
def adamw(
    master: "*fp32:16",
    grad: "*fp32:16",
    exp_avg: "*fp32:16",
    exp_avg_sq: "*fp32:16",
    weights: "*T:16",
    grad_scale: "*fp32",
    count: "i64:16",
    step_size: "fp32",
    beta1: "fp32",
    beta2: "fp32",
    eps: "fp32",
    decay: "fp32",
    root: "fp32",
    write_weights: "i32",
    BLOCK: tl.constexpr,
):
    """Update with AdamW. step_size = lr / (1 - beta1^t), root = 1 / sqrt(1 - beta2^t), decay = lr * weight decay.

    Update and decay are added before the weight is rounded, because fp32 rounds 1 - decay to 1 below 6e-8. grad_scale
    is read from device memory, so that the clip factor needs no synchronisation with the host.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(grad + at, mask=inside, other=0.0) * tl.load(grad_scale)
    m = tl.load(exp_avg + at, mask=inside, other=0.0) * beta1 + g * (1.0 - beta1)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0) * beta2 + g * g * (1.0 - beta2)
    old = tl.load(master + at, mask=inside, other=0.0)
    p = old - (step_size * m / (tl.sqrt(v) * root + eps) + decay * old)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(master + at, p, mask=inside)
    if write_weights:
        tl.store(weights + at, p.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def squares(x: "*T:16", partial: "*fp64", count: "i64:16", per_program: "i32:16", BLOCK: tl.constexpr):
    """Sum the squares of `per_program` numbers into one element of partial (fp64 [programs]).

    Each lane sums at most per_program / BLOCK terms in fp32. The lanes are added in fp64.
    """
    start = tl.program_id(0).to(tl.int64) * per_program
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, per_program, BLOCK):
        at = start + first + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
        sums += value * value
    tl.store(partial + tl.program_id(0), tl.sum(sums.to(tl.float64)))


@triton.jit
def accumulate(main_grad: "*fp32:16", grad: "*T:16", count: "i64:16", BLOCK: tl.constexpr):
    """Add grad to main_grad (fp32)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(main_grad + at, mask=inside, other=0.0) + tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(main_grad + at, total, mask=inside)


@triton.jit
def accumulate_rows(
    main_grad: "*fp32:16",
    grad: "*fp32:16",
    rows: "i32",
    columns: "i32:16",
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sum of the rows of grad (fp32 [rows, columns]) to main_grad (fp32). The order of the sum is fixed."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    sums = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    for first in range(0, rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        at = row[:, None] * columns.to(tl.int64) + column[None, :]
        sums += tl.load(grad + at, mask=(row[:, None] < rows) & inside[None, :], other=0.0)
    total = tl.load(main_grad + column, mask=inside, other=0.0) + tl.sum(sums, axis=0)
    tl.store(main_grad + column, total, mask=inside)


@triton.jit
def embedding_backward(
    main_grad: "*fp32:16",
    rows: "*i64",
    order: "*i64",
    grad: "*T:16",
    tokens: "i32",
    columns: "i32:16",
    vocab_rows: "i32",
    BLOCK: tl.constexpr,
):
    """Add the gradients of a row's tokens to main_grad[row]. `rows` is sorted; `order` has the token of each entry.

    The program at the first entry of equal rows adds all their gradients in the order of the tokens, so that the sum is
    reproducible. It sums blocks of 1,024 tokens, because the fp32 sum of a million equal rows, added one by one, is
    0.95 % too small.
    """
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    previous = tl.load(rows + entry - 1, mask=entry > 0, other=-1)
    if (row >= 0) & (row < vocab_rows) & (row != previous):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        total = tl.zeros([BLOCK], tl.float32)
        block_sum = tl.zeros([BLOCK], tl.float32)
        in_block = 0
        current = row
        while current == row:
            token = tl.load(order + entry)
            block_sum += tl.load(grad + token * columns + column, mask=inside, other=0.0).to(tl.float32)
            in_block += 1
            if in_block == 1024:
                total += block_sum
                block_sum = tl.zeros([BLOCK], tl.float32)
                in_block = 0
            entry += 1
            current = tl.load(rows + entry, mask=entry < tokens, other=-1)
        total = tl.load(main_grad + row * columns + column, mask=inside, other=0.0) + (total + block_sum)
        tl.store(main_grad + row * columns + column, total, mask=inside)
