"""RMSNorm and LayerNorm with an optional residual add: one program per row, statistics in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_forward(x, residual, weight, bias, out, total, mean, scale, columns, eps, has_residual, has_bias,
                 CENTRED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out = norm(x + residual) * weight + bias and total = x + residual; rows are contiguous, statistics go to mean and scale."""
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
        tl.store(mean + row, centre)
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, columns, BLOCK):
            column = first + lanes
            value = tl.load(source + start + column, mask=column < columns, other=0.0).to(tl.float32)
            centred = tl.where(column < columns, value - centre, 0.0)
            sums += centred * centred
    inverse = 1.0 / tl.sqrt(tl.sum(sums) / columns + eps)
    tl.store(scale + row, inverse)
    for first in range(0, columns, BLOCK):
        column = first + lanes
        inside = column < columns
        value = tl.load(source + start + column, mask=inside, other=0.0).to(tl.float32)
        y = (value - centre) * inverse * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if has_bias:
            y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + start + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(grad, grad_total, total, weight, mean, scale, grad_x, columns, has_grad_total,
                  CENTRED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """grad_x = scale * (p - mean(p) - n * mean(p n)) (+ grad_total) with n the normed row and p = grad * weight."""
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
def norm_weight_gradient(grad, total, mean, scale, partial_weight, partial_bias, rows, columns, rows_per_program,
                         CENTRED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One strip of rows of grad_weight and grad_bias, fp32 [strips, columns]; the caller adds the strips, in order."""
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
    tl.store(partial_weight + strip * columns + column, weight_sum, mask=inside)
    tl.store(partial_bias + strip * columns + column, bias_sum, mask=inside)
