"""A training step of the models that this is for, on tensors of full size without memory (meta): every launch reaches the driver.

torch refuses operations between meta and CPU tensors as it does between GPU and CPU ones, so a tensor made on the wrong device is found too.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frontier_llm.comm import serial_mesh
from frontier_llm.config import BatchConfig, PrecisionConfig, RunConfig, TrainConfig, load_model
from frontier_llm.data.loader import SampleBatch
from frontier_llm.ops import Ops, reference, torch_linear
from frontier_llm.ops.gpu import GpuOps, rows_per_strip
from frontier_llm.ops.kernel_table import all_kernels
from frontier_llm.ops.providers import functions_of
from frontier_llm.optim import inputs
from frontier_llm.topology import make_plan
from frontier_llm.train import build
from frontier_llm.train.feed import Feed
from tests.unit.ops.fake_gpu import fake_gpu, skipped

pytestmark = skipped


class Source:
    """Microbatches of one token and, where it is asked for, of one document."""

    microbatches = 1

    def __init__(self, rows, sequence, documents):
        self._rows, self._sequence, self.reset_at_documents, self.masks_targets = rows, sequence, documents, documents

    def microbatch(self, _step, _index):
        tokens = np.zeros((self._rows, self._sequence + 1), np.int64)
        documents = np.zeros((self._rows, self._sequence), np.int32)
        return SampleBatch(tokens, documents, documents == 0) if self.reset_at_documents else SampleBatch(tokens)


@pytest.fixture(scope="module", params=["gfx90a", "sm_90"])
def kernels(request, tmp_path_factory):
    """Behind the training's ops; what would need numbers is left out."""
    with fake_gpu(request.param, tmp_path_factory.mktemp("code")) as (kernels, *_), pytest.MonkeyPatch.context() as patch:
        functions = functions_of(reference) | functions_of(torch_linear) | functions_of(GpuOps(kernels))  # as `select_ops` fills up
        patch.setattr(build, "select_ops", lambda *_, **__: Ops(**functions))
        patch.setattr(torch_linear, "_way", lambda *_: torch_linear._in_the_product)
        patch.setattr(inputs, "initialize", lambda *_, **__: None)
        patch.setattr(Feed, "_tensor", lambda feed, array: torch.from_numpy(np.ascontiguousarray(array)).to(feed._device))
        yield kernels


@pytest.mark.parametrize(
    ("model", "micro_batch", "sequence", "documents", "kinds"),
    [
        ("gpt-22b", 2, 2048, False, {"gelu_forward", "layernorm-8192", "d128"}),
        ("gpt-175b", 4, 2048, True, {"gelu_forward", "norm_forward_long", "d128-extras"}),  # rows longer than a block
        ("llama-2-70b", 1, 8192, True, {"swiglu_forward", "rope", "rmsnorm-8192", "d128-extras"}),  # groups of heads
        ("mpt-30b", 1, 8192, False, {"gelu_forward", "layernorm-8192", "d128-extras"}),  # ALiBi
        ("llama-15m", 3, 256, False, {"swiglu_forward", "rope", "rmsnorm-2048", "d64"}),
    ],
)
def test_a_step_is_all_aligned_launches_on_one_device(kernels, model, micro_batch, sequence, documents, kinds):
    """No launch falls back to the code for any alignment, which reads a number at a time (docs/ops.md)."""
    shapes = load_model(model, {"layers": 2, "sequence_length": sequence})
    config = RunConfig(
        model=shapes,
        batch=BatchConfig(global_batch=micro_batch, micro_batch=micro_batch),
        precision=PrecisionConfig(dtype="bf16"),
        train=TrainConfig(steps=10),
    )
    kernels._functions.clear()
    source = Source(micro_batch, sequence, documents)
    state = build.build_state(config, make_plan(config, 1), serial_mesh(), torch.device("meta"), source)
    state.sync.begin()
    loss = state.pipeline.run(state.feed.step(0), 1.0)["loss"]
    state.sync.finish()
    norm = state.optimizer.squared_norm_share()
    state.optimizer.step(1e-4, grad_scale=0.5)
    assert loss.is_meta and norm.is_meta
    launched = [path.name.rpartition("-") for _, path in kernels._functions]
    assert [name for name, _, aligned in launched if aligned != "True"] == []
    always = {name for name in all_kernels() if name.startswith(("attention", "cross_entropy", "adamw", "squares", "accumulate"))}
    for kind in always | kinds:
        assert any(kind in name for name, *_ in launched), kind


def test_products_of_experts_of_xmoe_medium_are_aligned_launches_that_ask_for_no_number_of_rows(kernels):
    ops = GpuOps(kernels)
    kernels._functions.clear()
    with torch.device("meta"):
        x, grad, weight = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((24576, 5120), (24576, 1536), (16, 1536, 5120)))
        ends, main_grad = torch.empty(16, dtype=torch.int32), torch.empty(16, 1536, 5120)
        assert ops.grouped_linear(x, weight, ends).shape == grad.shape and ops.grouped_input_gradient(grad, weight, ends).shape == x.shape
        ops.accumulate_grouped_gradient_(main_grad, grad, x, ends)
        places, weights = torch.empty(4096, 6, dtype=torch.int64), torch.empty(24576, requires_grad=True)
        assert ops.gather_rows(x, places).shape == (4096, 5120) and ops.gather_rows(x, places.view(-1, 1)).shape == x.shape
        weighted = ops.swiglu(torch.empty(24576, 2, 1536, dtype=torch.bfloat16), weights)
        weighted.backward(torch.empty_like(weighted))
        assert weights.grad is not None and weights.grad.shape == weights.shape
    assert len(kernels._functions) == 6 and all(path.name.endswith("-True") for _, path in kernels._functions)


@pytest.mark.parametrize(("rows", "column_blocks", "expected"), [(256, 1, 2), (100, 1, 1), (8192, 1, 32), (256, 48, 32), (4096, 1, 18)])
def test_few_rows_are_shared_out_over_the_device(rows, column_blocks, expected):
    assert rows_per_strip(rows, column_blocks) == expected
