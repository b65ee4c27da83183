"""The C++ ops give the same bits with any number of threads."""

from __future__ import annotations

import pytest
import torch

from frontier_llm.libraries import BUILD_COMMAND
from frontier_llm.ops import Scores, native
from frontier_llm.ops.cases import normal

missing = native.load_cpu_library()
pytestmark = pytest.mark.skipif(bool(missing), reason=f"{missing}; build: {BUILD_COMMAND}")
if not missing:
    from frontier_llm.ops.cpu import CpuOps

    cpu = CpuOps()


def norm_gradients(x, weight, bias):
    weight = weight.clone().requires_grad_()
    bias = bias.clone().requires_grad_()
    cpu.layer_norm(x, weight, bias, 1e-5).backward(x)
    return torch.stack((weight.grad, bias.grad))


def embedding_gradient(x):
    table = torch.zeros(7, x.shape[1])
    cpu.embedding_backward_(table, torch.arange(len(x)) % 7, x, 0)
    return table


def test_two_threads_give_the_same_as_one():
    x = normal(999, 384, dtype=torch.float32)
    weight = normal(384, dtype=torch.float32)
    bias = normal(384, dtype=torch.float32, seed=1)
    q = normal(100, 2, 4, 32, dtype=torch.float32)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(
            (
                cpu.layer_norm(x, weight, bias, 1e-5),
                cpu.attention(q, q, q, Scores(0.2)),
                cpu.sum_of_squares(x),
                norm_gradients(x, weight, bias),
                embedding_gradient(x),
                cpu.linear(x, x[:300], None),
            )
        )
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
