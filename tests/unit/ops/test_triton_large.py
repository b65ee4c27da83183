"""Offsets beyond 2^31 in each GPU kernel: logits of long batches, flat shards and strides of fused tensors.

A 32-bit product would overflow.
The first and last programs run on reserved memory that is never touched. The test checks that all addresses lie in
their tensors.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="pip install --no-deps triton")

from frontier_llm.ops import AdamWUpdate, Scores
from frontier_llm.ops.gpu import GpuOps
from tests.unit.ops.interpreter import InterpretedKernels

gpu = GpuOps(InterpretedKernels("gfx90a", corners_only=True))
ROWS = 2**20 + 8  # with 2048 columns this is more than 2^31 elements


def virtual(*shape, dtype=torch.float16):
    return torch.empty(*shape, dtype=dtype)


@pytest.mark.parametrize(("rows", "columns"), [(ROWS, 2048), (2**17 + 8, 16384)])
def test_norms(rows, columns):
    x = virtual(rows, columns).requires_grad_()
    weight, bias = (torch.ones(columns, dtype=torch.float16, requires_grad=True) for _ in range(2))
    normed, total = gpu.add_norm(x, virtual(rows, columns), weight, bias, 1e-5, "layernorm")
    torch.autograd.backward((normed, total), (virtual(rows, columns), virtual(rows, columns)))


def test_activations():
    swiglu = gpu.swiglu(virtual(2**19 + 8, 2, 2048).requires_grad_())
    swiglu.backward(virtual(*swiglu.shape))
    gelu = gpu.gelu(
        virtual(ROWS, 2048).requires_grad_(), torch.ones(2048, dtype=torch.float16, requires_grad=True), False
    )
    gelu.backward(virtual(*gelu.shape))


@pytest.mark.parametrize("permute", [(0, 1, 2, 3), (2, 1, 0, 3), (1, 0, 2, 3)])
def test_rope(permute):
    x = virtual(2**15 + 8, 8, 64, 128).permute(permute)
    angle = virtual(x.shape[0], x.shape[1], 64, dtype=torch.float32) if permute[0] == 0 else torch.zeros(x.shape[0], 64)
    gpu.rope(x, angle, angle)


def test_rope_with_angles_of_each_sample():
    angle = virtual(2**22 + 8, 8, 64, dtype=torch.float32)
    gpu.rope(virtual(2**22 + 8, 8, 1, 128), angle, angle)


def test_cross_entropy():
    logits = virtual(2**16 + 8, 32768)
    targets = torch.zeros(2**16 + 8, dtype=torch.int64)
    stats = gpu.cross_entropy_stats(logits, targets, 0)
    gpu.cross_entropy_backward_(logits, targets, 0, stats[0], stats[1])


def test_flat_buffers():
    count = 2**31 + 4096
    flat = virtual(count, dtype=torch.float32)
    gpu.adamw_(flat, flat, flat, flat, virtual(count), AdamWUpdate(1e-3, 0.9, 0.95, 1e-8, 0.1, step=1))
    gpu.sum_of_squares(flat)
    gpu.accumulate_(flat, virtual(count))


def test_embedding():
    table = virtual(2**18 + 8, 8192, dtype=torch.float32)
    ids = torch.tensor([5, 2**18 + 7])
    gpu.embedding_backward_(table, ids, torch.ones(2, 8192, dtype=torch.float16), 0)
    ids = torch.arange(2**18 + 8)
    gpu.embedding_backward_(table, ids, virtual(ids.numel(), 8192), 0)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3)], ids=["sequence", "batch", "heads"])
def test_attention(order):
    """Rows, batch entries or heads are 2^24 elements apart."""
    q, k, v, grad = (virtual(140, 2, 2, 2**22)[..., i : i + 16].permute(order) for i in range(0, 64, 16))
    slopes = torch.ones(q.shape[2])
    documents = torch.zeros(q.shape[1], q.shape[0], dtype=torch.int32)
    for scores in (Scores(0.25), Scores(0.25, slopes, documents)):
        out = gpu.attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), scores)
        out.backward(grad)
