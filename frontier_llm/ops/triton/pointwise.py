"""RoPE, SwiGLU, GELU with its bias, dropout with its residual, and gathered sums of rows.

SwiGLU and GELU also multiply by a weight per row. Each kernel reads its inputs once and writes its outputs once.
"""

import triton
import triton.language as tl


@triton.jit
def rope(
    x: "*T:16",
    cos: "*fp32:16",
    sin: "*fp32:16",
    out: "*T:16",
    sign: "fp32",
    batch: "i32",
    heads: "i32",
    head_dim: "i32:16",
    half: "i32:16",
    x_s: "i32:16",
    x_b: "i32:16",
    x_a: "i32:16",
    angle_s: "i32:16",
    angle_b: "i32:16",
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate the first 2 * half dims of every head of one position, and copy the other dims.

    `sign` -1 rotates by the negative angle.
    """
    position = tl.program_id(0)
    s = (position // batch).to(tl.int64)
    b = (position % batch).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
    lane = tl.arange(0, BLOCK_HALF)[None, :]
    angle = s * angle_s + b * angle_b + lane
    c = tl.load(cos + angle, mask=lane < half, other=1.0)
    d = tl.load(sin + angle, mask=lane < half, other=0.0) * sign
    rotates = (head < heads) & (lane < half)
    from_ = x + s * x_s + b * x_b + head * x_a + lane
    to = out + position.to(tl.int64) * heads * head_dim + head * head_dim + lane
    first = tl.load(from_, mask=rotates, other=0.0).to(tl.float32)
    second = tl.load(from_ + half, mask=rotates, other=0.0).to(tl.float32)
    tl.store(to, (first * c - second * d).to(out.dtype.element_ty), mask=rotates)
    tl.store(to + half, (second * c + first * d).to(out.dtype.element_ty), mask=rotates)
    for done in range(2 * half, head_dim, BLOCK_HALF):
        rest = (head < heads) & (done + lane < head_dim)
        tl.store(to + done, tl.load(from_ + done, mask=rest, other=0.0), mask=rest)


@triton.jit
def _of_parts(q, k, v, of_q, of_k, of_v):
    """Load each number from q, k or v. The masks select at most one of them for each number."""
    return tl.where(
        of_q,
        tl.load(q, mask=of_q, other=0.0),
        tl.where(of_k, tl.load(k, mask=of_k, other=0.0), tl.load(v, mask=of_v, other=0.0)),
    )


@triton.jit
def _to_parts(q, k, v, of_q, of_k, of_v, x):
    tl.store(q, x, mask=of_q)
    tl.store(k, x, mask=of_k)
    tl.store(v, x, mask=of_v)


@triton.jit
def heads(
    qkv: "*T:16",
    q: "*T:16",
    k: "*T:16",
    v: "*T:16",
    cos: "*fp32:16",
    sin: "*fp32:16",
    batch: "i32",
    groups: "i32",
    members: "i32",
    head_dim: "i32:16",
    half: "i32:16",
    angle_s: "i32:16",
    angle_b: "i32:16",
    JOIN: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Split one position of a projection into q, k and v, and rotate q and k. JOIN is the backward.

    The projection is [groups, members, head_dim]. The members are a group's queries, its key and its value. With JOIN
    the gradients of q and k are rotated by the negative angle, and the projection's gradient is put together.
    """
    position = tl.program_id(0)
    s = (position // batch).to(tl.int64)
    b = (position % batch).to(tl.int64)
    row = position.to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    lane = tl.arange(0, BLOCK_HALF)[None, :]
    group = head // members
    member = head % members
    there = head < groups * members
    turns = member < members - 1
    of_q = there & (member < members - 2)
    of_k = there & (member == members - 2)
    of_v = there & (member == members - 1)
    angle = s * angle_s + b * angle_b + lane
    c = tl.load(cos + angle, mask=lane < half, other=1.0)
    d = tl.load(sin + angle, mask=lane < half, other=0.0) * (-1.0 if JOIN else 1.0)
    fused = qkv + (row * groups * members + head) * head_dim + lane
    one = (row * groups + group) * head_dim + lane
    q = q + ((row * groups + group) * (members - 2) + member) * head_dim + lane
    k = k + one
    v = v + one
    pair = lane < half
    if JOIN:
        first = _of_parts(q, k, v, of_q & pair, of_k & pair, of_v & pair).to(tl.float32)
        second = _of_parts(q + half, k + half, v + half, of_q & pair, of_k & pair, of_v & pair).to(tl.float32)
    else:
        first = tl.load(fused, mask=there & pair, other=0.0).to(tl.float32)
        second = tl.load(fused + half, mask=there & pair, other=0.0).to(tl.float32)
    turned_first = tl.where(turns, first * c - second * d, first).to(qkv.dtype.element_ty)
    turned_second = tl.where(turns, second * c + first * d, second).to(qkv.dtype.element_ty)
    if JOIN:
        tl.store(fused, turned_first, mask=there & pair)
        tl.store(fused + half, turned_second, mask=there & pair)
    else:
        _to_parts(q, k, v, of_q & pair, of_k & pair, of_v & pair, turned_first)
        _to_parts(q + half, k + half, v + half, of_q & pair, of_k & pair, of_v & pair, turned_second)
    for done in range(2 * half, head_dim, BLOCK_HALF):
        rest = done + lane < head_dim
        if JOIN:
            x = _of_parts(q + done, k + done, v + done, of_q & rest, of_k & rest, of_v & rest)
            tl.store(fused + done, x, mask=there & rest)
        else:
            x = tl.load(fused + done, mask=there & rest, other=0.0)
            _to_parts(q + done, k + done, v + done, of_q & rest, of_k & rest, of_v & rest, x)


@triton.jit
def swiglu_forward(
    x: "*T:16", weights: "*fp32", out: "*T:16", columns: "i32:16", has_weights: "i32", BLOCK: tl.constexpr
):
    """Compute out [rows, columns] = silu(gate) * up * weight of the row, for x [rows, 2, columns]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(x + 2 * row * columns + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + (2 * row + 1) * columns + column, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    if has_weights:
        y *= tl.load(weights + row)
    tl.store(out + row * columns + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(
    grad: "*T:16",
    x: "*T:16",
    weights: "*fp32",
    grad_x: "*T:16",
    partial_weights: "*fp32",
    rows: "i32",
    columns: "i32:16",
    has_weights: "i32",
    BLOCK: tl.constexpr,
):
    """Compute the gradient of both halves of x.

    The contribution of these columns to the gradient of the row's weight goes to partial_weights [column blocks, rows].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    g = tl.load(grad + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + 2 * row * columns + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + (2 * row + 1) * columns + column, mask=inside, other=0.0).to(tl.float32)
    slope = tl.sigmoid(gate)
    silu = gate * slope
    if has_weights:
        tl.store(partial_weights + tl.program_id(1) * rows.to(tl.int64) + row, tl.sum(g * silu * up, 0))
        g *= tl.load(weights + row)
    tl.store(
        grad_x + 2 * row * columns + column,
        (g * up * (slope + silu * (1.0 - slope))).to(grad_x.dtype.element_ty),
        mask=inside,
    )
    tl.store(grad_x + (2 * row + 1) * columns + column, (g * silu).to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def _gelu(value, TANH: tl.constexpr):
    if TANH:
        return value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    return value * 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))


@triton.jit
def gelu_forward(
    x: "*T:16",
    bias: "*T:16",
    weights: "*fp32",
    out: "*T:16",
    columns: "i32:16",
    has_bias: "i32",
    has_weights: "i32",
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute out = gelu(x + bias) * weight of the row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    y = _gelu(value, TANH)
    if has_weights:
        y *= tl.load(weights + row)
    tl.store(out + row * columns + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gelu_backward(
    grad: "*T:16",
    x: "*T:16",
    bias: "*T:16",
    weights: "*fp32",
    grad_x: "*T:16",
    partial_bias: "*fp32:16",
    partial_weights: "*fp32",
    rows: "i32",
    columns: "i32:16",
    rows_per_program: "i32",
    has_bias: "i32",
    has_weights: "i32",
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute grad_x = grad * weight * gelu'(x + bias) for BLOCK columns of a strip of rows.

    The column sums of grad_x are one row of partial_bias [strips, columns]. The contribution of these columns to the
    gradient of each row's weight goes to partial_weights [column blocks, rows].
    """
    strip = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    shift = tl.zeros([BLOCK], tl.float32)
    if has_bias:
        shift += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    for row in range(strip * rows_per_program, tl.minimum((strip + 1) * rows_per_program, rows)):
        at = row * columns.to(tl.int64) + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + shift
        if TANH:
            s = tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
            slope = s + value * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * value * value)
        else:
            bell = tl.exp(-0.5 * value * value)
            slope = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476)) + value * bell * 0.3989422804014327
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if has_weights:
            tl.store(partial_weights + tl.program_id(1) * rows.to(tl.int64) + row, tl.sum(g * _gelu(value, TANH), 0))
            g *= tl.load(weights + row)
        dx = g * slope
        tl.store(grad_x + at, dx.to(grad_x.dtype.element_ty), mask=inside)
        bias_sum += dx
    if has_bias:
        tl.store(partial_bias + strip * columns.to(tl.int64) + column, bias_sum, mask=inside)


@triton.jit
def _drop_one(x, residual, out, at, inside, drawn, limit, scale, has_residual):
    """Apply dropout to one feature of each lane.

    The random number is the upper 16 bits of `drawn`, and the rate is the upper 16 bits of `limit`. The lower 16 bits
    of `limit` are 0, so that the lower bits of `drawn` have no effect.
    """
    value = tl.where(drawn >= limit, tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale, 0.0)
    if has_residual:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def drop(
    x: "*T:16",
    residual: "*T:16",
    samples: "*i64",
    positions: "*i64",
    out: "*T:16",
    key: "i64",
    threshold: "i32",
    scale: "fp32",
    batch: "i32",
    columns: "i32:16",
    blocks: "i32:16",
    has_residual: "i32",
    BLOCK: tl.constexpr,
):
    """Compute out = residual + dropout(x).

    A lane computes one block of Philox for eight features. The distance between these features is `blocks`
    (ops/dropout.py).
    """
    row = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.load(samples + row % batch)
    zero = tl.zeros([BLOCK], tl.int32)
    position = tl.load(positions + row // batch).to(tl.int32) + zero
    low = sample.to(tl.int32) + zero
    high = (sample >> 32).to(tl.int32) + zero
    w0, w1, w2, w3 = tl.philox(key, lane, position, low, high)
    at = row.to(tl.int64) * columns + lane
    limit = threshold.to(tl.uint32) << 16
    _drop_one(x, residual, out, at, (lane < blocks) & (lane < columns), w0 << 16, limit, scale, has_residual)
    _drop_one(
        x, residual, out, at + blocks, (lane < blocks) & (lane + blocks < columns), w0, limit, scale, has_residual
    )
    _drop_one(
        x,
        residual,
        out,
        at + 2 * blocks,
        (lane < blocks) & (lane + 2 * blocks < columns),
        w1 << 16,
        limit,
        scale,
        has_residual,
    )
    _drop_one(
        x,
        residual,
        out,
        at + 3 * blocks,
        (lane < blocks) & (lane + 3 * blocks < columns),
        w1,
        limit,
        scale,
        has_residual,
    )
    _drop_one(
        x,
        residual,
        out,
        at + 4 * blocks,
        (lane < blocks) & (lane + 4 * blocks < columns),
        w2 << 16,
        limit,
        scale,
        has_residual,
    )
    _drop_one(
        x,
        residual,
        out,
        at + 5 * blocks,
        (lane < blocks) & (lane + 5 * blocks < columns),
        w2,
        limit,
        scale,
        has_residual,
    )
    _drop_one(
        x,
        residual,
        out,
        at + 6 * blocks,
        (lane < blocks) & (lane + 6 * blocks < columns),
        w3 << 16,
        limit,
        scale,
        has_residual,
    )
    _drop_one(
        x,
        residual,
        out,
        at + 7 * blocks,
        (lane < blocks) & (lane + 7 * blocks < columns),
        w3,
        limit,
        scale,
        has_residual,
    )


@triton.jit
def gather_rows(x: "*T:16", places: "*i64", out: "*T:16", fan: "i32", columns: "i32:16", BLOCK: tl.constexpr):
    """Compute out[row], the sum of the rows of x with the indices places[row, :fan], in this order.

    A negative index adds nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for f in range(0, fan):
        place = tl.load(places + row * fan + f + column * 0)
        total += tl.load(x + place * columns + column, mask=(place >= 0) & (column < columns), other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=column < columns)
