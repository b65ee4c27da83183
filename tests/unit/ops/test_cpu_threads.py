"""The C++ ops use torch's threads, and give the same bits with any number of threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from frontier_llm.libraries import BUILD_COMMAND
from frontier_llm.ops import AdamWUpdate, Scores, native
from frontier_llm.ops.cases import normal

missing = native.load_cpu_library()
pytestmark = pytest.mark.skipif(bool(missing), reason=f"{missing}; build: {BUILD_COMMAND}")
if not missing:
    from frontier_llm.ops.cpu import CpuOps

    cpu = CpuOps()


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def norm_gradients(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    weight = weight.clone().requires_grad_()
    bias = bias.clone().requires_grad_()
    cpu.layer_norm(x, weight, bias, 1e-5).backward(x)
    return torch.stack((weight.grad, bias.grad))


def attention_gradient(q: Tensor) -> Tensor:
    q = q.clone().requires_grad_()
    cpu.attention(q, q, q, Scores(0.2)).backward(q.detach())
    return q.grad


def embedding_gradient(x: Tensor) -> Tensor:
    table = torch.zeros(7, x.shape[1])
    cpu.embedding_backward_(table, torch.arange(len(x)) % 7, x, 0)
    return table


def grouped_gradient(x: Tensor) -> Tensor:
    main_grad = torch.ones(2, x.shape[1], x.shape[1])
    cpu.accumulate_grouped_gradient_(main_grad, x, x, torch.tensor([400, 999], dtype=torch.int32))
    return main_grad


def updated_weights(x: Tensor) -> Tensor:
    master = x.flatten().clone()
    weights = master.bfloat16()
    update = AdamWUpdate(0.01, 0.9, 0.95, 1e-8, 0.001, step=3, grad_scale=0.3)
    cpu.adamw_(master, x.flatten(), torch.zeros_like(master), torch.ones_like(master), weights, update)
    return master


@pytest.mark.parametrize("threads", [2, 3])
def test_several_threads_give_the_same_as_one(threads: int) -> None:
    x = normal(999, 387, dtype=torch.float32)
    weight = normal(387, dtype=torch.float32)
    bias = normal(387, dtype=torch.float32, seed=1)
    q = normal(100, 2, 4, 32, dtype=torch.float32)
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        results.append(
            (
                cpu.layer_norm(x, weight, bias, 1e-5),
                cpu.attention(q, q, q, Scores(0.2)),
                attention_gradient(q),
                cpu.sum_of_squares(x),
                norm_gradients(x, weight, bias),
                embedding_gradient(x),
                cpu.linear(x, x[:300], None),
                grouped_gradient(x),
                updated_weights(x),
            )
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_op_uses_a_second_thread() -> None:
    """OpenMP starts the second thread in the first op that a new Python thread calls with two threads."""
    x = normal(512, 384, dtype=torch.float32)

    def started_threads() -> int:
        torch.set_num_threads(2)
        before = len(os.listdir("/proc/self/task"))
        cpu.linear(x, x, None)
        return len(os.listdir("/proc/self/task")) - before

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(started_threads).result() == 1
