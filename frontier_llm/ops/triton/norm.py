"""RMSNorm and LayerNorm with an optional residual add. Statistics are in fp32.

Rows of at most BLOCK columns are read once and kept in registers. The `_long` kernels read longer rows several times.
"""

import triton
import triton.language as tl


@triton.jit
def _inverse_and_store(sums, mean, scale, row, centre, columns, eps, CENTRED: tl.constexpr):
    """Return 1 / sqrt(mean of squares + eps), and store both statistics for the backward."""
    inverse = 1.0 / tl.sqrt(tl.sum(sums) / columns + eps)
    tl.store(scale + row, inverse)
    if CENTRED:
        tl.store(mean + row, centre)
    return inverse


@triton.jit
def _affine(value, centre, inverse, weight, bias, column, inside, has_bias):
    y = (value - centre) * inverse * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def norm_forward(
    x: "*T:16",
    residual: "*T:16",
    weight: "*T:16",
    bias: "*T:16",
    out: "*T:16",
    total: "*T:16",
    mean: "*fp32",
    scale: "*fp32",
    columns: "i32:16",
    eps: "fp32",
    has_residual: "i32",
    has_bias: "i32",
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute out = norm(x + residual) * weight + bias and total = x + residual for one contiguous row.

    The row's statistics are stored in mean and scale.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = row.to(tl.int64) * columns + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if has_residual:
        value = value + tl.load(residual + at, mask=inside, other=0.0)
        tl.store(total + at, value, mask=inside)
    value = value.to(tl.float32)
    centre = tl.sum(value) / columns if CENTRED else 0.0
    centred = tl.where(inside, value - centre, 0.0)
    inverse = _inverse_and_store(centred * centred, mean, scale, row, centre, columns, eps, CENTRED)
    tl.store(
        out + at,
        _affine(value, centre, inverse, weight, bias, column, inside, has_bias).to(out.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def norm_forward_long(
    x: "*T:16",
    residual: "*T:16",
    weight: "*T:16",
    bias: "*T:16",
    out: "*T:16",
    total: "*T:16",
    mean: "*fp32",
    scale: "*fp32",
    columns: "i32:16",
    eps: "fp32",
    has_residual: "i32",
    has_bias: "i32",
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `norm_forward` for a row longer than a block."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * columns
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + lanes
        inside = column < columns
        value = tl.load(x + start + column, mask=inside, other=0.0)
        if has_residual:
            value = value + tl.load(residual + start + column, mask=inside, other=0.0)
            tl.store(total + start + column, value, mask=inside)
        sums += value.to(tl.float32) if CENTRED else value.to(tl.float32) * value.to(tl.float32)
    source = x
    if has_residual:
        source = total
    centre = 0.0
    if CENTRED:
        centre = tl.sum(sums) / columns
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, columns, BLOCK):
            column = first + lanes
            value = tl.load(source + start + column, mask=column < columns, other=0.0).to(tl.float32)
            centred = tl.where(column < columns, value - centre, 0.0)
            sums += centred * centred
    inverse = _inverse_and_store(sums, mean, scale, row, centre, columns, eps, CENTRED)
    for first in range(0, columns, BLOCK):
        column = first + lanes
        inside = column < columns
        value = tl.load(source + start + column, mask=inside, other=0.0).to(tl.float32)
        y = _affine(value, centre, inverse, weight, bias, column, inside, has_bias)
        tl.store(out + start + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    grad: "*T:16", grad_total: "*T:16", total: "*T:16", weight: "*T:16", mean: "*fp32", scale: "*fp32", grad_x: "*T:16",
    partial_weight: "*fp32:16", partial_bias: "*fp32:16", rows: "i32", columns: "i32:16", rows_per_program: "i32",
    has_grad_total: "i32", CENTRED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the gradients for a strip of rows: grad_x = scale * (p - mean(p) - n * mean(p n)) (+ grad_total).

    n is the normalised row, and p = grad * weight. RMSNorm has no mean(p). One row of partial_* (fp32 [strips,
    columns]) gets the strip's part of grad_weight and grad_bias. The caller adds these rows in order.
    """
    strip = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    for row in range(strip * rows_per_program, tl.minimum((strip + 1) * rows_per_program, rows)):
        at = row * columns.to(tl.int64) + column
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + row)
        centre = tl.load(mean + row) if CENTRED else 0.0
        n = tl.where(inside, tl.load(total + at, mask=inside, other=0.0).to(tl.float32) - centre, 0.0) * inverse
        p = g * w
        mean_p = tl.sum(p) / columns if CENTRED else 0.0
        dx = inverse * (p - mean_p - n * (tl.sum(p * n) / columns))
        if has_grad_total:
            dx += tl.load(grad_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + at, dx.to(grad_x.dtype.element_ty), mask=inside)
        weight_sum += g * n
        if CENTRED:
            bias_sum += g
    tl.store(partial_weight + strip * columns.to(tl.int64) + column, weight_sum, mask=inside)
    if CENTRED:
        tl.store(partial_bias + strip * columns.to(tl.int64) + column, bias_sum, mask=inside)


@triton.jit
def norm_backward_long(
    grad: "*T:16", grad_total: "*T:16", total: "*T:16", weight: "*T:16", mean: "*fp32", scale: "*fp32", grad_x: "*T:16",
    columns: "i32:16", has_grad_total: "i32", CENTRED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute grad_x of `norm_backward` for one row longer than a block."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * columns
    lanes = tl.arange(0, BLOCK)
    inverse = tl.load(scale + row)
    centre = tl.load(mean + row) if CENTRED else 0.0
    dots = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + lanes
        inside = column < columns
        p = tl.load(grad + start + column, mask=inside, other=0.0).to(tl.float32)
        p *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        n = (tl.load(total + start + column, mask=inside, other=0.0).to(tl.float32) - centre) * inverse
        dots += p * n
        sums += p
    mean_dot = tl.sum(dots) / columns
    mean_p = tl.sum(sums) / columns if CENTRED else 0.0
    for first in range(0, columns, BLOCK):
        column = first + lanes
        inside = column < columns
        p = tl.load(grad + start + column, mask=inside, other=0.0).to(tl.float32)
        p *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        n = (tl.load(total + start + column, mask=inside, other=0.0).to(tl.float32) - centre) * inverse
        dx = inverse * (p - mean_p - n * mean_dot)
        if has_grad_total:
            dx += tl.load(grad_total + start + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + start + column, dx.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def norm_weight_gradient_long(
    grad: "*T:16",
    total: "*T:16",
    mean: "*fp32",
    scale: "*fp32",
    partial_weight: "*fp32:16",
    partial_bias: "*fp32:16",
    rows: "i32",
    columns: "i32:16",
    rows_per_program: "i32",
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum grad_weight and grad_bias over one strip of rows, for BLOCK columns; fp32 [strips, columns]."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    strip = tl.program_id(1)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    for row in range(strip * rows_per_program, tl.minimum((strip + 1) * rows_per_program, rows)):
        at = row * columns.to(tl.int64) + column
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        centre = tl.load(mean + row) if CENTRED else 0.0
        n = (tl.load(total + at, mask=inside, other=0.0).to(tl.float32) - centre) * tl.load(scale + row)
        weight_sum += g * n
        bias_sum += g
    tl.store(partial_weight + strip * columns.to(tl.int64) + column, weight_sum, mask=inside)
    if CENTRED:
        tl.store(partial_bias + strip * columns.to(tl.int64) + column, bias_sum, mask=inside)
