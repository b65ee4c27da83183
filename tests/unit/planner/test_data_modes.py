"""Data modes: ZeRO, fully sharded weights, and 16-bit gradients. The tests check predicted times, memory and the
emitted run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.blueprint.layout import Layout, layout_of
from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.config import load_model, load_run
from frontier_llm.errors import LayoutError
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.breakdown import breakdown
from frontier_llm.planner.candidates import enumerate_layouts, parse_fixed
from frontier_llm.planner.costs.memory import stage_memory
from frontier_llm.planner.costs.seconds import times
from frontier_llm.planner.costs.time import gradient_reduction_s, layer_s, sharding_s, step_s
from frontier_llm.planner.emit import Request, emit
from frontier_llm.planner.search import search, simulate_layout
from frontier_llm.topology.plan import plan_problems

FRONTIER = rates(load_machine("frontier"))
MODEL = load_model("llama-2-7b")


def layout(**changes: Any) -> Layout:
    return Layout(**{"dp": 32, "microbatches": 4, "sharding": "weights", **changes})


def test_sharded_weights_cost_a_gather_each_way_and_a_scatter_per_microbatch() -> None:
    """The network is so slow that only traffic counts: per layer two gathers of bf16 and one scatter of fp32."""
    slow = replace(FRONTIER, nodes=64, node_network_bytes_s=1e6, all_reduce_table=None, hierarchical=False)
    parameters = 202_383_360  # parameters of one layer: 4·4096² + 3·4096·11008, and two norms
    gather, scatter = (float(one) for one in sharding_s(times(MODEL, layout(), slow).block, layout(), slow))
    wire = slow.node_network_bytes_s * slow.network_efficiency
    assert gather == pytest.approx(31 / 32 * parameters * 2 / wire, rel=1e-3)
    assert scatter == pytest.approx(31 / 32 * parameters * (2 + 4) / wire, rel=1e-3)
    for m in (2, 4):
        assert float(step_s(MODEL, layout(microbatches=m), slow)) == pytest.approx(
            m * MODEL.layers * (gather + scatter),
            rel=0.01,
        )


def test_what_fits_under_the_compute_does_not_show_but_for_the_share_that_never_overlaps() -> None:
    block, zero = (times(MODEL, one, FRONTIER).block for one in (layout(), layout(sharding="optimizer")))
    forward, backward = layer_s(block, layout(), FRONTIER)
    plain = layer_s(zero, layout(sharding="optimizer"), FRONTIER)
    gather, scatter = sharding_s(block, layout(), FRONTIER)
    assert float(forward - plain[0]) == pytest.approx(0.1 * float(gather), rel=1e-3)
    assert float(backward - plain[1]) == pytest.approx(0.1 * float(scatter), rel=1e-3)


def test_a_rank_holds_one_part_of_weights_gradients_and_state() -> None:
    lines = stage_memory(MODEL, layout(), FRONTIER, 0, MODEL.layers, True, True)
    parameters = total_parameters(MODEL)
    assert float(lines["weights"]) == 0  # the fp32 master is the only copy
    assert float(lines["optimizer"]) == pytest.approx(12 * parameters / 32)
    assert float(lines["gradients"]) == pytest.approx(4 * parameters / 32)
    layer = 202_383_360
    table = MODEL.vocab_size * MODEL.hidden
    # gathered: two layers, the embedding and the head; gradients: a layer's in fp32, the head's in bf16
    gathered = 2 * (2 * layer + 2 * table) + 2 * table
    assert float(lines["communication buffers"]) == pytest.approx(gathered + 4 * layer, rel=1e-4)


def test_the_gradients_of_a_large_vocabulary_are_summed_after_the_activations_are_freed() -> None:
    """The fp32 gradients of embedding and head need more memory than the activations of a short sequence."""
    model = load_model("llama-3-8b", {"sequence_length": 256})
    numbers = replace(FRONTIER, fragmentation=1.0)
    full = layout(recompute="full")
    short, long = (
        stage_memory(replaced, full, numbers, 0, model.layers, True, True)
        for replaced in (model, load_model("llama-3-8b", {"sequence_length": 65536}))
    )
    outside = 2 * 128_256 * 4096
    summed = short["communication buffers"] - long["communication buffers"] + short["activations"]
    layer = 4 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert float(summed) == pytest.approx(4 * outside - layer, rel=1e-3)


def test_copies_gather_inside_the_node_and_sum_their_shares_across() -> None:
    """The network is so slow that only traffic counts.

    The 8 replicas of a node shard the weights. The 4 nodes sum their eighths once for 4 microbatches.
    """
    slow = replace(FRONTIER, nodes=64, node_network_bytes_s=1e6, all_reduce_table=None, hierarchical=False)
    copies = layout(data_shard=8)
    gather, backward = (float(one) for one in sharding_s(times(MODEL, copies, slow).block, copies, slow))
    whole = [float(one) for one in sharding_s(times(MODEL, layout(), slow).block, layout(), slow)]
    assert gather < 1e-3 * whole[0]
    # Bandwidth of a node whose 8 devices send at once.
    wire = slow.node_network_bytes_s * slow.network_efficiency * slow.network_crowding
    assert backward == pytest.approx(2 * 3 / 4 * 202_383_360 * 4 / wire / 4, rel=0.05)
    lines = stage_memory(MODEL, copies, FRONTIER, 0, MODEL.layers, True, True)
    assert float(lines["optimizer"]) == pytest.approx(12 * total_parameters(MODEL) / 8)
    table = enumerate_layouts(MODEL, 32, 256, 8, parse_fixed(["data_mode=fsdp", "data_shard=8"]))
    assert len(table) and set(table.data_shard.tolist()) == {8}


def test_copies_inside_a_node_are_proposed_where_they_are_faster_and_emitted(tmp_path: Path) -> None:
    """With eight small microbatches the gathers stay inside the node, and the sums across nodes run once."""
    numbers = rates(load_machine("mi300x"))
    small = ["data_mode=fsdp", "micro_batch=1", "tensor=1", "recompute=none"]
    found = search(MODEL, numbers, 4, 256, parse_fixed(small))
    best = found.best
    all_share = search(MODEL, numbers, 4, 256, parse_fixed([*small, "data_shard=32"])).best
    assert best.layout.sharding == all_share.layout.sharding == "weights"
    assert 1 < best.layout.data_shard <= 8 and best.step_s < all_share.step_s
    emit(tmp_path / "mine.yaml", Request("llama-2-7b", "mi300x"), load_machine("mi300x"), found, numbers, None)
    config = load_run(str(tmp_path / "mine.yaml"))
    assert config.parallel.data_shard == best.layout.data_shard and plan_problems(config, 32) == []
    in_a_node = enumerate_layouts(MODEL, 32, 256, 8, parse_fixed(["data_mode=fsdp"]))
    assert set(zip(in_a_node.tp.tolist(), in_a_node.data_shard.tolist(), strict=True)) == {
        (tp, shard) for tp in (1, 2, 4, 8) for shard in (0, 2, 4, 8) if tp * shard <= 8
    }
    # tensor groups that may span nodes do not let copies span nodes
    wider = enumerate_layouts(MODEL, 32, 256, 8, parse_fixed(["data_mode=fsdp"]), tp_max=16)
    assert max(wider.tp) == 16 and max(wider.tp * wider.data_shard) == 8


def test_simulation_equals_the_closed_form_and_the_breakdown_adds_up() -> None:
    plan = simulate_layout(MODEL, layout(), FRONTIER)
    assert plan.step_s == pytest.approx(plan.closed_form_s, rel=1e-3)
    assert sum(breakdown(plan, FRONTIER).values()) == pytest.approx(plan.step_s, rel=1e-6)
    assert breakdown(plan, FRONTIER)["sharded weights and gradients"] > 0


def test_sharding_is_offered_without_a_pipeline_only() -> None:
    layouts = enumerate_layouts(MODEL, 32, 256, 8)
    assert set(layouts.pp[layouts.sharding == "weights"]) == {1}
    assert set(layouts.sharding[layouts.pp == 1]) == {"none", "optimizer", "weights"}


@pytest.mark.parametrize("mode", ["fsdp", "zero"])
def test_the_emitted_run_has_the_mode(mode: str, tmp_path: Path) -> None:
    machine = load_machine("frontier")
    path = tmp_path / "mine.yaml"
    found = search(MODEL, FRONTIER, 4, 256, parse_fixed([f"data_mode={mode}"]))
    # On a machine that allows one communication in flight, FSDP must be alone.
    if mode == "fsdp":
        emit(path, Request("llama-2-7b", "frontier"), machine, found, FRONTIER, None)
        assert load_run(str(path)).parallel.tensor == 1
        copies = search(MODEL, FRONTIER, 4, 256, parse_fixed(["data_mode=fsdp", "data_shard=8"]))
        with pytest.raises(LayoutError, match=r"comm\.in_flight: fsdp's collectives would overlap .* on frontier"):
            emit(path, Request("llama-2-7b", "frontier"), machine, copies, FRONTIER, None)
        offered = search(MODEL, FRONTIER, 4, 256, parse_fixed(["pipeline=1"])).plans
        sharded = [plan.layout for plan in offered if plan.layout.sharding == "weights"]
        assert sharded and {(one.tp, one.cp, one.data_shard) for one in sharded} == {(1, 1, 0)}
    name = "frontier" if mode == "zero" else "mi300x"
    emit(path, Request("llama-2-7b", name), load_machine(name), found, FRONTIER, None)
    config = load_run(str(path))
    assert config.parallel.data_mode == mode
    assert layout_of(config, 32).sharding == found.best.layout.sharding


def test_gradients_in_16_bits_take_half_the_time_on_the_wire(tmp_path: Path) -> None:
    narrow_wire = layout(sharding="optimizer", gradient_wire="bf16")
    slow = replace(FRONTIER, node_network_bytes_s=1e9, all_reduce_table=None)
    full, narrow = (
        float(gradient_reduction_s(replace(narrow_wire, gradient_wire=wire), slow, 1e9)[0]) for wire in ("full", "bf16")
    )
    assert narrow == pytest.approx(full / 2, rel=0.01)
    found = search(MODEL, FRONTIER, 4, 256, parse_fixed(["gradient_wire=bf16"]))
    path = tmp_path / "mine.yaml"
    emit(path, Request("llama-2-7b", "frontier"), load_machine("frontier"), found, FRONTIER, None)
    assert load_run(str(path)).precision.gradient_wire == "bf16"
    assert layout_of(load_run(str(path)), 32).gradient_wire == "bf16"
