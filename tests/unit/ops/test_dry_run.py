"""A training step of the target models on full-size tensors without memory (meta). Each launch reaches the driver."""

from __future__ import annotations

import pytest
import torch

from frontier_llm.certificate.axis_types.small import wide_copy
from frontier_llm.certificate.device_step.run import run_device_step
from frontier_llm.config import load_model
from frontier_llm.ops.gpu import GpuOps, rows_per_strip
from frontier_llm.ops.kernel_table import all_kernels
from tests.harness.fake_gpu import fake_gpu, skipped
from tests.harness.launches import of_a_layer, run_of, skip_without_fp32_products_on_meta

pytestmark = skipped


@pytest.fixture(scope="module", params=["gfx90a", "sm_90"])
def kernels(request, tmp_path_factory):
    skip_without_fp32_products_on_meta()
    with fake_gpu(request.param, tmp_path_factory.mktemp("code")) as (kernels, *_):
        yield kernels


@pytest.mark.parametrize(
    ("model", "micro_batch", "sequence", "documents", "kinds"),
    [
        ("gpt-22b", 2, 2048, False, {"gelu_forward", "layernorm-8192", "d128"}),
        ("gpt-175b", 4, 2048, True, {"gelu_forward", "norm_forward_long", "d128-extras"}),  # rows longer than a block.
        # Several query heads per key head
        ("llama-2-70b", 1, 8192, True, {"swiglu_forward", "split-r", "join-r", "rmsnorm-8192", "d128-extras"}),
        ("mpt-30b", 1, 8192, False, {"gelu_forward", "layernorm-8192", "d128-extras"}),  # ALiBi
        ("llama-15m", 3, 256, False, {"swiglu_forward", "split-r", "join-r", "rmsnorm-2048", "d64"}),
    ],
)
def test_a_step_is_all_aligned_launches_on_one_device(kernels, model, micro_batch, sequence, documents, kinds):
    """No launch uses the fallback for any alignment, which reads one number at a time (docs/benchmarks/ops.md)."""
    kernels._functions.clear()
    config = run_of(load_model(model, {"sequence_length": sequence}), micro_batch, documents)
    run_device_step(wide_copy(config, 1, 2), 0, kernels)
    launched = [path.name.rpartition("-") for _, path in kernels._functions]
    assert [name for name, _, aligned in launched if aligned != "True"] == []
    always = {
        name
        for name in all_kernels()
        if name.startswith(("attention", "cross_entropy", "adamw", "squares", "accumulate"))
    }
    for kind in always | kinds:
        assert any(kind in name for name, *_ in launched), kind


def test_products_of_experts_of_xmoe_medium_are_aligned_launches_that_ask_for_no_number_of_rows(kernels):
    ops = GpuOps(kernels)
    kernels._functions.clear()
    with torch.device("meta"):
        x, grad, weight = (
            torch.empty(*shape, dtype=torch.bfloat16) for shape in ((24576, 5120), (24576, 1536), (16, 1536, 5120))
        )
        ends = torch.empty(16, dtype=torch.int32)
        main_grad = torch.empty(16, 1536, 5120)
        assert (
            ops.grouped_linear(x, weight, ends).shape == grad.shape
            and ops.grouped_input_gradient(grad, weight, ends).shape == x.shape
        )
        ops.accumulate_grouped_gradient_(main_grad, grad, x, ends)
        places = torch.empty(4096, 6, dtype=torch.int64)
        weights = torch.empty(24576, requires_grad=True)
        assert (
            ops.gather_rows(x, places).shape == (4096, 5120) and ops.gather_rows(x, places.view(-1, 1)).shape == x.shape
        )
        weighted = ops.swiglu(torch.empty(24576, 2, 1536, dtype=torch.bfloat16), weights)
        weighted.backward(torch.empty_like(weighted))
        assert weights.grad is not None and weights.grad.shape == weights.shape
    assert len(kernels._functions) == 6 and all(path.name.endswith("-True") for _, path in kernels._functions)


@pytest.mark.parametrize(
    ("model", "forward", "backward"),
    [("gpt-22b", 8, 25), ("llama-2-7b", 9, 16), ("llama-2-70b", 9, 16), ("mpt-30b", 11, 16), ("mixtral-8x7b", 31, 30)],
)
def test_a_layer_launches_no_more_than_the_page_says(kernels, model, forward, backward):
    """Compare with the table in docs/benchmarks/ops.md.

    A launch is a product, one of this package's kernels, or a torch operation.
    """
    counts = of_a_layer(kernels, load_model(model))
    assert sum(count for (phase, _), count in counts.items() if phase == "forward") == forward, counts
    assert sum(count for (phase, _), count in counts.items() if phase == "backward") == backward, counts


@pytest.mark.parametrize(
    ("model", "parallel", "forward", "backward"),
    [
        ("mixtral-8x7b", {"data": 4, "expert": 4}, 44, 36),
        ("llama-2-7b", {"data": 1, "context": 4, "context_attention": "ring"}, 108, 102),
    ],
)
def test_a_layer_of_one_of_four_ranks_launches_no_more_than_the_page_says(kernels, model, parallel, forward, backward):
    """Compare with the same table. Collectives count as launches, but the messages of ring attention do not."""
    counts = of_a_layer(kernels, load_model(model), parallel)
    assert sum(count for (phase, _), count in counts.items() if phase == "forward") == forward, counts
    assert sum(count for (phase, _), count in counts.items() if phase == "backward") == backward, counts


@pytest.mark.parametrize(
    ("rows", "column_blocks", "expected"), [(256, 1, 2), (100, 1, 1), (8192, 1, 32), (256, 48, 32), (4096, 1, 18)]
)
def test_few_rows_are_shared_out_over_the_device(rows, column_blocks, expected):
    assert rows_per_strip(rows, column_blocks) == expected
