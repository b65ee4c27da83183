"""Initial weights from (seed, parameter name, position), so that every layout starts from the same model.

Each element's value is a pure function of its flat index in the global tensor: a counter-based generator (Philox, Salmon et al.
2011) is advanced to the rows that a rank owns. numpy rather than torch, because torch's streams differ between CPU and GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from frontier_llm.tensor_parallel import ShardedParameter
from frontier_llm.topology import Rectangle, ShardSpec, contiguous_runs

# One Philox block is 4 x 64 bits; each 64 bits give the two normals of one Box-Muller pair.
_NORMALS_PER_BLOCK = 8
# 4 M elements: 16 MiB of fp32 scratch however large the tensor is
_CHUNK = 1 << 22


def _normals(key: int, start: int, count: int) -> np.ndarray:
    """Elements [start, start + count) of the normal stream of a key, fp32."""
    first_block = start // _NORMALS_PER_BLOCK
    skipped = start - first_block * _NORMALS_PER_BLOCK
    pairs = -(-(skipped + count) // 2)
    raw = np.random.Philox(key=key, counter=first_block).random_raw(pairs)
    uniform = ((raw >> np.uint64(32)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    angle = (raw & np.uint64(0xFFFFFFFF)).astype(np.float32) * np.float32(2 * np.pi * 2.0**-32)
    radius = np.sqrt(np.float32(-2.0) * np.log(np.minimum(uniform, np.float32(1.0))))
    normals = np.empty(2 * pairs, np.float32)
    normals[0::2], normals[1::2] = radius * np.cos(angle), radius * np.sin(angle)
    return normals[skipped : skipped + count]


def initialize(parameters: Iterable[ShardedParameter], seed: int) -> None:
    """Fill every parameter with this rank's part of its initial values."""
    with torch.no_grad():
        for parameter in parameters:
            initial_rows(parameter.spec, seed, parameter)


def initial_rows(spec: ShardSpec, seed: int, out: Tensor) -> None:
    """Fill `out`, a tensor of spec.shape on any device and in any dtype, with this rank's part of the initial parameter."""
    if spec.init_std is None:
        out.fill_(spec.init_value)
        return
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{spec.name}".encode(), digest_size=16).digest(), "little")
    whole = Rectangle((0,) * len(spec.global_shape), spec.global_shape)
    starts, run_length = contiguous_runs(whole, Rectangle(spec.offset, spec.shape))
    flat = out.view(-1)
    for index, start in enumerate(starts.tolist()):
        for done in range(0, run_length, _CHUNK):
            count = min(_CHUNK, run_length - done)
            values = torch.from_numpy(_normals(key, start + done, count) * np.float32(spec.init_std))
            position = index * run_length + done
            flat[position : position + count].copy_(values)
