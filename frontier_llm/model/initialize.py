"""Initialises weights as a function of seed, parameter name and element index.

Every layout therefore starts from the same weights, bit-equal on every device. An element's value is a pure function of
its flat index in the global tensor: a counter-based generator (`ops/dropout.py`) and the Box-Muller transform.

Values are computed on the device of the weights, with integers and in fp64. Only sums, products, quotients and roots
are used, because they are exact or correctly rounded on every device. Library functions such as log and cos are not
used, because their last digits differ between devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from frontier_llm.ops import philox, stream_key
from frontier_llm.parallel.tensor import ShardedParameter
from frontier_llm.topology.rectangles import Rectangle, contiguous_runs
from frontier_llm.topology.shards import ShardSpec

_PER_BLOCK = 4  # normal numbers per block of the generator: 4 x 32 bits give two pairs.
# Number of elements that are computed at a time. A CPU chunk fits into a cache. A GPU chunk occupies the whole GPU and
# needs 0.1 GB of scratch memory.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
# bit fields of an fp64 number
_FRACTION = (1 << 52) - 1
_BIAS = 1023
_ONE = _BIAS << 52


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """Evaluate a polynomial by Horner's scheme, lowest power first. Each product and each sum is rounded separately."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value.mul_(x).add_(coefficient)
    return value


# ln m = s (2 + 2/3 s² + …) with s = (m - 1) / (m + 1). The remainder is below 1e-11 for m in [√½, √2).
_LOG = [2.0 / (2 * k + 1) for k in range(8)]
# sin(2πx) / x and cos(2πx) as polynomials in x², for |x| <= 1/8
_SIN = [(-1) ** k * (2 * math.pi) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(6)]
_COS = [(-1) ** k * (2 * math.pi) ** (2 * k) / math.factorial(2 * k) for k in range(7)]


def box_muller(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return two standard normals (fp64) from two 32-bit words: sqrt(-2 ln u) times cosine and sine of 2πv."""
    # Read mantissa and exponent of u from its bits: u = mantissa * 2^exponent. torch has no frexp on ROCm, and compiles
    # frexp at run time on CUDA.
    bits = ((first.double() + 0.5) * 2.0**-32).view(torch.int64)
    mantissa = ((bits & _FRACTION) | _ONE).view(torch.float64)
    high = mantissa > math.sqrt(2)
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    exponent = (bits >> 52) - _BIAS + high
    s = (mantissa - 1) / (mantissa + 1)
    log = exponent.double() * math.log(2) + s * _polynomial(s * s, _LOG)
    radius = (log * -2.0).sqrt_()
    # v = quarter / 4 + x with |x| <= 1/8
    quarter = ((second + (1 << 29)) >> 30) & 3
    x = (second - (((second + (1 << 29)) >> 30) << 30)).double() * 2.0**-32
    square = x * x
    sine = x * _polynomial(square, _SIN)
    cosine = _polynomial(square, _COS)
    odd = (quarter & 1).bool()
    back = (quarter == 1) | (quarter == 2)
    down = quarter >= 2
    c = torch.where(odd, sine, cosine)
    s = torch.where(odd, cosine, sine)
    return radius * torch.where(back, -c, c), radius * torch.where(down, -s, s)


def normals(key: int, starts_R: Tensor, count: int) -> Tensor:
    """Return elements [start, start + count) of a key's stream of normal numbers for each of R starts.

    The result is fp64, [R, count].
    """
    skipped_R = starts_R % _PER_BLOCK
    aligned = not bool(skipped_R.any())
    blocks = -(-(count + (0 if aligned else _PER_BLOCK - 1)) // _PER_BLOCK)
    counter_Rb = (starts_R // _PER_BLOCK)[:, None] + torch.arange(blocks, device=starts_R.device)
    w0, w1, w2, w3 = philox(counter_Rb, key)
    values = torch.stack((*box_muller(w0, w1), *box_muller(w2, w3)), dim=-1).flatten(1)
    if aligned:
        return values[:, :count]
    return values.gather(1, skipped_R[:, None] + torch.arange(count, device=starts_R.device))


def initialize(parameters: Iterable[ShardedParameter], seed: int) -> None:
    """Fill every parameter with its initial values. A sharded parameter gets this rank's part."""
    with torch.no_grad():
        for parameter in parameters:
            initial_rows(parameter.spec, seed, parameter)


def initial_rows(spec: ShardSpec, seed: int, out: Tensor) -> None:
    """Fill `out` with this rank's part of the initial parameter.

    `out` is a tensor of shape spec.shape on any device and in any dtype.
    """
    if spec.parameter.init_std is None:
        out.fill_(spec.parameter.init_value)
        return
    if out.is_meta:
        return
    key = stream_key(seed, spec.name)
    whole = Rectangle((0,) * len(spec.global_shape), spec.global_shape)
    starts, run_length = contiguous_runs(whole, Rectangle(spec.offset, spec.shape))
    chunk = _CHUNK[out.device.type]
    values_RC = out.view(len(starts), run_length)
    rows = max(1, chunk // run_length)  # compute many short runs at once, or one long run in pieces
    for row in range(0, len(starts), rows):
        starts_R = torch.from_numpy(np.ascontiguousarray(starts[row : row + rows])).to(out.device)
        for column in range(0, run_length, chunk):
            count = min(chunk, run_length - column)
            drawn = normals(key, starts_R + column, count).mul_(spec.parameter.init_std)
            # Round to fp32 first in every dtype. The initial weights of fp32 and bf16 runs then differ only by one
            # rounding.
            values_RC[row : row + rows, column : column + count].copy_(
                drawn if out.dtype == torch.float64 else drawn.float()
            )
