"""The planned activation memory against the tensors that autograd keeps (saved-tensor hooks), for ops that keep no fp32
copies.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frontier_llm.blueprint.items import Software
from frontier_llm.blueprint.layout import layout_of
from frontier_llm.blueprint.work import block_work
from frontier_llm.comm import serial_mesh
from frontier_llm.config.load import build, load_model
from frontier_llm.config.schema import RunConfig
from frontier_llm.data.loader import SampleBatch
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.ops.native import load_cpu_library
from frontier_llm.planner.costs.memory import held
from frontier_llm.planner.costs.memory import kept_bytes as kept_by_the_list
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import build_state


class Source:
    reset_at_documents = False
    masks_targets = False
    microbatches = 1

    def __init__(self, config: RunConfig) -> None:
        self.shape = (config.batch.micro_batch, config.model.sequence_length + 1)

    def sample_ids(self, step: int, index: int) -> range:
        return range(self.shape[0])

    def microbatch(self, step: int, index: int) -> SampleBatch:
        return SampleBatch(np.zeros(self.shape, dtype=np.int64), None, None)


def config_of(layers: int, recompute: str, micro_batch: int, **shape: object) -> RunConfig:
    """Return an fp32 configuration with torch's own LayerNorm and attention.

    The reference ops then keep the same tensors as the fused ops.
    """
    model = load_model("bench-l8-h384", {"layers": layers, "vocab_size": 1024, **shape})
    return build(
        RunConfig,
        {
            "model": model.model_dump(),
            "batch": {"global_batch": micro_batch, "micro_batch": micro_batch},
            "train": {"recompute": recompute, "device": "cpu"},
            "precision": {"dtype": "fp32"},
            "ops": {
                "attention": "sdpa",
                "norm": "reference",
                "activation": "reference",
                "cross_entropy": "reference",
                "adamw": "reference",
            },
        },
    )


def kept_bytes(config: RunConfig) -> int:
    """Return the bytes of all distinct storages that one forward keeps, except the weights."""
    state = build_state(config, make_plan(config, 1), serial_mesh(), torch.device("cpu"), Source(config))
    weights = {bucket.weights.untyped_storage().data_ptr() for bucket in state.optimizer.buckets}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            # Without detach(), `kept` and the autograd graph refer to each other, and their memory is never freed.
            kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        state.stages[0](None, state.feed.step(0)(0))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def listed(config: RunConfig) -> float:
    """Return the bytes that a layer keeps according to the planner's list of a layer's operations (`block_work`)."""
    return kept_by_the_list(block_work(config.model, layout_of(config, 1), Software()), config.train.recompute)


def waiting_bytes(config: RunConfig) -> int:
    """Return the bytes of all distinct storages that the deferred weight gradients of one microbatch read."""
    state = build_state(config, make_plan(config, 1), serial_mesh(), torch.device("cpu"), Source(config))
    gradients = state.stages[0].context.gradients
    loss = state.stages[0](None, state.feed.step(0)(0))
    gradients.defer()
    loss.backward()
    read = [factor.tensor.untyped_storage() for _, _, factors in gradients.take_deferred() for factor in factors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in read}.values())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_layer_whose_weight_gradients_wait_keeps_all_but_the_attention_core(recompute: str) -> None:
    measured = (waiting_bytes(config_of(4, recompute, 1)) - waiting_bytes(config_of(2, recompute, 1))) / 2
    assert listed(config_of(4, "selective", 1)) == pytest.approx(measured, rel=0.02)


def test_of_every_second_layer_recomputed_the_others_keep_everything() -> None:
    measured = (kept_bytes(config_of(4, "full,none", 1)) - kept_bytes(config_of(2, "full,none", 1))) / 2
    alone = [listed(config_of(4, mode, 1)) for mode in ("full", "none")]
    assert sum(alone) / 2 == pytest.approx(measured, rel=0.02)


def test_layers_that_the_list_does_not_divide_keep_what_the_planner_says() -> None:
    """With the modes "full,none", two of three layers are recomputed, not one and a half."""
    config, whole = (config_of(3, modes, 1) for modes in ("full,none", "none"))
    priced = [held(one.model, layout_of(one, 1), rates(load_machine("local"))).block * 3 for one in (config, whole)]
    assert priced[1] - priced[0] == pytest.approx(kept_bytes(whole) - kept_bytes(config), rel=0.02)
    assert priced[1] - priced[0] == pytest.approx(2 * (listed(whole) - listed(config_of(3, "full", 1))))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_layer_keeps_what_the_list_says(recompute: str, micro_batch: int) -> None:
    measured = (kept_bytes(config_of(4, recompute, micro_batch)) - kept_bytes(config_of(2, recompute, micro_batch))) / 2
    assert listed(config_of(4, recompute, micro_batch)) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dropout_keeps_no_masks(recompute: str) -> None:
    measured = (
        kept_bytes(config_of(4, recompute, 1, dropout=0.1)) - kept_bytes(config_of(2, recompute, 1, dropout=0.1))
    ) / 2
    assert listed(config_of(4, recompute, 1)) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    "shape",
    [{"norm_placement": "post"}, {"norm_placement": "both", "activation": "geglu_tanh"}],
    ids=str,
)
def test_a_norm_keeps_its_input_wherever_it_stands_and_geglu_its_gate(shape: dict[str, object]) -> None:
    measured = (kept_bytes(config_of(4, "none", 1, **shape)) - kept_bytes(config_of(2, "none", 1, **shape))) / 2
    assert listed(config_of(4, "none", 1, **shape)) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    "shape",
    [{"position": "rope"}, {"position": "rope", "kv_heads": 2}, {"position": "learned", "kv_heads": 2}],
    ids=str,
)
def test_queries_that_are_copied_leave_nothing_of_the_product_behind(shape: dict[str, object]) -> None:
    """A view of v would keep the complete qkv alive, in addition to the rotated queries and keys."""
    measured = (kept_bytes(config_of(4, "none", 1, **shape)) - kept_bytes(config_of(2, "none", 1, **shape))) / 2
    assert listed(config_of(4, "none", 1, **shape)) == pytest.approx(measured, rel=0.02)


@pytest.mark.skipif(bool(load_cpu_library()), reason="scripts/build_native.sh")
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "geglu_tanh"])
def test_experts_keep_their_rows_and_no_outputs(activation: str) -> None:
    """Uses the C++ activations, because autograd of the reference keeps the products before they are weighted."""

    def layers(count: int) -> RunConfig:
        config = config_of(
            count,
            "none",
            1,
            activation=activation,
            bias=False,
            moe={"experts": 4, "top_k": 2, "expert_hidden": 128},
        )
        return config.model_copy(update={"ops": config.ops.model_copy(update={"activation": "cpu"})})

    assert listed(layers(4)) == pytest.approx((kept_bytes(layers(4)) - kept_bytes(layers(2))) / 2, rel=0.02)


def test_a_gated_shared_expert_keeps_its_output() -> None:
    """The gate scales the output, so that autograd reads it again. Without a gate the output is only added."""

    def gate_bytes(layers: int) -> tuple[float, float]:
        moe = {"experts": 4, "top_k": 2, "expert_hidden": 128, "shared_hidden": 64}
        plain, gated = (
            config_of(layers, "none", 1, bias=False, moe={**moe, "shared_gate": gate}) for gate in (False, True)
        )
        return kept_bytes(gated) - kept_bytes(plain), layers * (listed(gated) - listed(plain))

    measured, expected = gate_bytes(2)
    assert measured == pytest.approx(expected, rel=0.02)
