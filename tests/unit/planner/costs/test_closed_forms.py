"""Closed forms against independent counts: FLOPs, parameters, memory, collectives, and the schedule's own in-flight
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.blueprint.items import FlashCore, Pass, Product, Software
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.parameters import (
    StageSpec,
    model_parameters,
    stage_parameters,
    total_parameters,
)
from frontier_llm.blueprint.work import block_work, hardware_flops_per_token, model_flops_per_token
from frontier_llm.config.load import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.costs.collectives import flat_s, message_s, node_s, small_sum_s, table_s
from frontier_llm.planner.costs.kernels import flash_s, product_s
from frontier_llm.planner.costs.layouts import as_table
from frontier_llm.planner.costs.memory import held, kept_bytes, memory_by_rank, peak_memory, stage_memory
from frontier_llm.planner.costs.parameters import stage_numel
from frontier_llm.planner.costs.seconds import by_cause
from frontier_llm.planner.costs.time import step_s, tied_sum_s
from frontier_llm.planner.search import simulate_layout
from frontier_llm.schedule import Kind, build, peak_in_flight
from frontier_llm.topology.plan import split_layers

FRONTIER = rates(load_machine("frontier"))


GPT_22B = load_model("gpt-22b")


def layout(**changes: Any) -> Layout:
    return Layout(**{"tp": 4, "pp": 4, "dp": 4, "microbatches": 16, **changes})


def layer(**changes: Any) -> dict[str, tuple[float, float]]:
    """Return the seconds of a layer by cause."""
    spread = layout(**changes)
    return by_cause(block_work(GPT_22B, spread, FRONTIER), spread, FRONTIER)


@pytest.mark.parametrize("name", ["gpt-22b", "gpt-175b", "gpt-1t"])
def test_flops_are_megatrons_formula_for_gpt_shapes(name: str) -> None:
    model = load_model(name)
    L = model.layers
    h = model.hidden
    s = model.sequence_length
    V = model.vocab_size
    assert model_flops_per_token(model) == pytest.approx(
        72 * L * h * h * (1 + s / (6 * h) + V / (12 * L * h)),
        rel=1e-12,
    )
    padded = model.padded_vocab_size
    recomputed = hardware_flops_per_token(model, layout(recompute="full"))
    assert recomputed == pytest.approx(96 * L * h * h * (1 + s / (6 * h) + padded / (16 * L * h)), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "published"),
    [("llama-2-7b", 6_738_415_616), ("llama-3-8b", 8_030_261_248), ("llama-2-70b", 68_976_648_192)],
)
def test_parameter_counts_equal_the_published_checkpoints(name: str, published: int) -> None:
    model = load_model(name)
    padding = (model.padded_vocab_size - model.vocab_size) * model.hidden * (1 if model.tied_embeddings else 2)
    assert total_parameters(model) - padding == published


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "llama-tiny qkv_bias", "mpt-tiny", "gpt-22b"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_rank_parameters_tile_the_model(name: str, tp: int, pp: int) -> None:
    model = load_model(name.split()[0], dict.fromkeys(name.split()[1:], True))
    stages = split_layers(model, pp)

    def counted(stage: StageSpec, tp: int) -> int:
        tied = stage.head and not stage.embedding  # the last stage has a copy of the embedding
        return sum(one.rank_numel({"tp": tp}) for one in stage_parameters(model, stage, tied_ranks=2 if tied else 1))

    held, one = ([counted(stage, degree) for stage in stages] for degree in (tp, 1))
    whole = sum(parameter.numel for parameter in model_parameters(model).values() if "tp" not in parameter.axes)
    tied_copy = model.padded_vocab_size * model.hidden if model.tied_embeddings and pp > 1 else 0
    assert sum(one) == total_parameters(model) + tied_copy
    assert tp * sum(held) == sum(one) + (tp - 1) * whole
    assert [float(stage_numel(model, tp, stage.num_layers, stage.embedding, stage.head)) for stage in stages] == held


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1)],
)
@pytest.mark.parametrize(("pp", "m"), [(4, 8), (4, 2), (8, 32), (3, 7)])
def test_in_flight_is_what_the_action_list_holds(schedule: str, chunks: int, pp: int, m: int) -> None:
    if chunks > 1 and m % pp:
        pytest.skip("the closed form counts whole rounds")
    simulated = build(schedule, pp, m, chunks)
    last_use = Kind.BACKWARD_WEIGHT if schedule == "zb-h1" else Kind.BACKWARD
    for stage in range(pp):
        held = peak = 0
        for action in simulated.compute[stage]:
            held += (action.kind is Kind.FORWARD) - (action.kind is last_use)
            peak = max(peak, held)
        expected = float(peak_in_flight(schedule, pp, chunks, m, stage))
        assert peak == expected if schedule != "zb-h1" else peak <= expected


def test_activations_follow_korthikanti() -> None:
    """Table 2 of the paper: S·B·H·(10 + 24/t) with tensor parallelism, without attention scores, and including both
    dropout masks.
    """
    dropout, (S, H, A) = replace(FRONTIER, dropout=True), (GPT_22B.sequence_length, GPT_22B.hidden, GPT_22B.heads)

    def kept(mode: str, **changes: Any) -> float:
        return kept_bytes(block_work(GPT_22B, layout(recompute=mode, **changes), dropout), mode)

    for tp in (1, 2, 4, 8):
        assert kept("none", tp=tp) == pytest.approx(S * H * (10 + 24 / tp) + 4.0 * S * A / tp, rel=1e-9)
    assert kept("full") == 2 * 2048 * 6144
    assert kept("full", sequence_parallel=True) == 2 * 2048 * 6144 / 4


@pytest.mark.parametrize(
    ("schedule", "chunks", "rank", "kept", "late"),
    [("zb-h1", 1, 3, 0, 4), ("zb-v", 2, 3, 0, 5), ("dualpipe-v", 2, 3, 0, 4), ("interleaved-zb", 2, 3, 0, 11)],
)
def test_with_full_recomputation_the_peak_is_in_backward(
    schedule: str, chunks: int, rank: int, kept: int, late: int
) -> None:
    """A recomputed layer keeps its input until backward, and then the operands of its delayed weight gradients."""
    full = layout(recompute="full", schedule=schedule, chunks=chunks)
    parts = held(GPT_22B, full, FRONTIER)
    assert parts.block_waiting == kept_bytes(block_work(GPT_22B, full, FRONTIER), "selective") > 5 * parts.block
    lines = memory_by_rank(GPT_22B, full, FRONTIER, split_layers(GPT_22B, 4 * chunks))
    per_position = GPT_22B.layers / 4 / chunks * FRONTIER.fragmentation
    expected = (kept * parts.block + late * parts.block_waiting) * per_position
    assert lines[rank]["activations"] == pytest.approx(expected)
    most = max(sum(rank_lines.values()) for rank_lines in lines)
    assert most <= float(peak_memory(GPT_22B, full, FRONTIER)) <= 1.15 * most


def test_activations_of_uneven_virtual_stages_are_counted_for_each() -> None:
    """In a V the first positions have more layers, and keep their activations longest."""
    model = GPT_22B.model_copy(update={"layers": 9})
    spread = layout(pp=2, schedule="zb-v", chunks=2)
    counts = (3, 2, 2, 2)
    lines = memory_by_rank(model, spread, FRONTIER, split_layers(model, 4, counts))
    block = held(model, spread, FRONTIER).block * FRONTIER.fragmentation
    most = [0, 0]
    for rank, order in enumerate(build("zb-v", 2, 16, 2).compute):
        alive: set[tuple[int, int]] = set()
        for action in order:
            each = action.microbatch, action.position
            if action.kind is Kind.FORWARD:
                alive.add(each)
            elif action.kind is Kind.BACKWARD_WEIGHT:
                alive.remove(each)
            most[rank] = max(most[rank], sum(counts[position] for _, position in alive))
    assert most[0] > 4 * 5 / 2  # four activations with more than the mean number of layers
    assert [one["activations"] for one in lines] == pytest.approx([number * block for number in most], rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gpipe_keeps_the_logits_of_all_microbatches(recompute: str) -> None:
    gpipe, alternate = (layout(schedule=name, recompute=recompute) for name in ("gpipe", "1f1b"))
    stages = split_layers(GPT_22B, 4)
    many, one = (memory_by_rank(GPT_22B, each, FRONTIER, stages)[-1]["logits"] for each in (gpipe, alternate))
    logits = held(GPT_22B, gpipe, FRONTIER).logits
    assert many - one == pytest.approx(15 * logits)
    closed, closed_one = (float(peak_memory(GPT_22B, each, FRONTIER)) for each in (gpipe, alternate))
    assert closed - closed_one > 15 * logits


def test_the_table_is_met_exactly_and_monotone_between() -> None:
    machine = load_machine("frontier")
    table = machine.allreduce
    for nodes, row in table.time_us.items():
        for size, microseconds in zip(table.message_bytes, row, strict=True):
            assert float(table_s(FRONTIER.all_reduce_table, nodes, size)) == pytest.approx(
                microseconds * 1e-6,
                rel=1e-9,
            )
    between = table_s(FRONTIER.all_reduce_table, 384, np.array([2.0**20, 2.0**24, 2.0**30]))
    assert np.all(np.diff(between) > 0)
    assert (
        float(table_s(FRONTIER.all_reduce_table, 256, 2**28))
        < float(table_s(FRONTIER.all_reduce_table, 384, 2**28))
        < float(table_s(FRONTIER.all_reduce_table, 512, 2**28))
    )
    assert float(table_s(FRONTIER.all_reduce_table, 8, 2**33)) == pytest.approx(
        2 * float(table_s(FRONTIER.all_reduce_table, 8, 2**32))
    )


def test_collectives_of_one_rank_cost_nothing_and_sharing_costs() -> None:
    assert float(node_s(FRONTIER, 1, 1e9, "all_reduce")) == 0
    assert float(flat_s(FRONTIER, 1, 1, 8, 1e9, "all_reduce")) == 0
    alone, shared = (float(flat_s(FRONTIER, 16, 1, sharing, 1e9, "all_reduce")) for sharing in (1, 8))
    assert shared > 3 * alone
    ring = {size: float(flat_s(FRONTIER, size, 1, 8, 1e8, "reduce_scatter")) for size in (16, 2048)}
    assert ring[2048] > ring[16] + 2000 * FRONTIER.network_hop_s
    assert float(message_s(FRONTIER, 1e8, True, 8)) < float(message_s(FRONTIER, 1e8, False, 8))


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 64))
def test_products_never_beat_the_peak(rows: int, columns: int, inner: int) -> None:
    M = 64 * rows
    N = 64 * columns
    K = 64 * inner
    assert product_s(Product(M, N, K), FRONTIER) >= 2.0 * M * N * K / (FRONTIER.peak_flops * FRONTIER.gemm_efficiency)


def test_kernels_know_shapes() -> None:
    good, ragged = (product_s(Product(rows, 8192, 8192), FRONTIER) for rows in (8192, 8192 + 8))
    assert good < ragged < 1.2 * good
    odd = Product(2048, 2048, 108, 64, aligned=False)
    even = Product(2048, 2048, 112, 64)
    assert product_s(odd, FRONTIER) > 1.5 * product_s(even, FRONTIER)
    forward, backward = (flash_s(FlashCore(1, 16, 4096, 4096, 128, backward), FRONTIER) for backward in (False, True))
    assert 2 * forward < backward < 6 * forward


def test_sequence_parallelism_cuts_the_elementwise_work_and_recompute_adds_a_forward() -> None:
    plain, cut = (layer(sequence_parallel=flag)["norms, activation, residual"] for flag in (False, True))
    assert cut[0] < plain[0]
    none, full = (np.sum(list(layer(recompute=mode).values()), axis=0) for mode in ("none", "full"))
    assert full[1] - none[1] == pytest.approx(none[0], rel=1e-6)


MANY = [
    layout(
        tp=tp,
        micro_batch=B,
        schedule=schedule,
        recompute=mode,
        sequence_parallel=tp > 2,
        sharding=sharding,
        pp=pp,
        axis_order=order,
    )
    for tp, B, schedule, mode, sharding, pp, order in (
        (1, 1, "1f1b", "none", "optimizer", 4, "tp-dp-pp"),
        (2, 2, "1f1b", "selective", "none", 4, "tp-pp-dp"),
        (4, 4, "gpipe", "full", "optimizer", 8, "tp-dp-pp"),
        (4, 4, "zb-h1", "full", "optimizer", 4, "tp-dp-pp"),
        (8, 1, "zb-h1", "none", "gradients", 2, "tp-dp-pp"),
        (2, 1, "1f1b", "none", "weights", 1, "tp-dp-pp"),
        (2, 1, "1f1b", "none", "weights-gathered-once", 1, "tp-dp-pp"),
    )
]


@pytest.mark.parametrize("price", [step_s, peak_memory])
def test_one_layout_and_many_go_through_the_same_formulas(price: Callable[..., Any]) -> None:
    prices = price(GPT_22B, as_table(MANY), FRONTIER)
    assert prices == pytest.approx([float(price(GPT_22B, one, FRONTIER)) for one in MANY], rel=1e-12)
    assert len(set(prices)) == len(MANY)


def test_zero_2_scatters_after_every_microbatch_and_holds_a_part_of_the_gradients() -> None:
    """DeepSpeed's ZeRO-2: without a pipeline the gradients of each microbatch are scattered at once.

    Only optimizer state and gradients are sharded, not the weights.
    """
    slow = replace(FRONTIER, node_network_bytes_s=1e7, all_reduce_table=None, dp_overlap=0.0, hierarchical=False)
    alone = layout(tp=1, pp=1, dp=32)
    whole, parts = (replace(alone, sharding=name) for name in ("optimizer", "gradients"))
    moved = [float(step_s(GPT_22B, replace(parts, microbatches=m), slow)) for m in (4, 8)]
    assert moved[1] > 1.6 * moved[0]  # each step has m reduce-scatters and one all-gather
    assert float(step_s(GPT_22B, whole, slow)) < 0.3 * float(step_s(GPT_22B, parts, slow))
    lines, cut = (stage_memory(GPT_22B, one, FRONTIER, 0, GPT_22B.layers, True, True) for one in (whole, parts))
    assert float(cut["gradients"]) == pytest.approx(float(lines["gradients"]) / 32)
    assert {name: float(size) for name, size in lines.items() if name != "gradients"} == {
        name: float(size) for name, size in cut.items() if name != "gradients"
    }


def test_the_gradient_of_a_tied_embedding_is_summed_over_the_first_and_the_last_stage() -> None:
    """The runtime sums this gradient in fp32 after the last backward (`topology.traffic`), so the step is longer by the
    time of this sum.
    """
    model = load_model("gpt-22b")
    layout = Layout(tp=8, pp=4, dp=2, microbatches=32)
    seconds = float(tied_sum_s(model, layout, FRONTIER))
    bytes_of_a_rank = 4 * model.padded_vocab_size * model.hidden / 8
    nic_bytes_s = FRONTIER.node_network_bytes_s / 8  # a rank's share: 8 groups of two ranks use the NICs of a node
    assert seconds >= bytes_of_a_rank / nic_bytes_s
    assert float(tied_sum_s(model, replace(layout, tp=2), replace(FRONTIER, node_devices=64))) < seconds
    untied = model.model_copy(update={"tied_embeddings": False})
    # one rank has embedding and head
    for alone in (replace(layout, pp=1, dp=8), replace(layout, chunks=2, schedule="zb-v")):
        assert float(tied_sum_s(model, alone, FRONTIER)) == 0
    assert float(tied_sum_s(untied, layout, FRONTIER)) == 0
    simulated = simulate_layout(model, layout, FRONTIER)
    without = simulate_layout(untied, layout, FRONTIER)
    assert simulated.simulated.reduce_s - without.simulated.reduce_s == pytest.approx(seconds, rel=0.01)
    assert simulated.closed_form_s - without.closed_form_s == pytest.approx(seconds, rel=0.01)


def test_fp8_with_a_scale_per_row_converts_each_operand_along_both_dims() -> None:
    """Inputs, weights and output gradients: 3 bytes per element along their rows and 5 across them."""
    layout = Layout(micro_batch=2)
    moved = [
        sum(item.work.moved_bytes for item in block_work(GPT_22B, layout, software) if isinstance(item.work, Pass))
        for software in (Software(), Software(scales_fp8_rows=True))
    ]
    tokens = 2 * GPT_22B.sequence_length
    widths = [(3 * GPT_22B.hidden, GPT_22B.hidden), (GPT_22B.hidden, GPT_22B.hidden)]
    widths += [(GPT_22B.ffn_hidden, GPT_22B.hidden), (GPT_22B.hidden, GPT_22B.ffn_hidden)]
    elements = sum(tokens * (outputs + inputs) + outputs * inputs for outputs, inputs in widths)
    assert moved[1] - moved[0] == pytest.approx(8 * elements)


@pytest.mark.parametrize(("ranks", "microseconds"), [(1, 0.0), (2, 8.0), (8, 15.2), (16, 25.2), (1024, 85.2)])
def test_a_small_sum_goes_up_and_down_the_tree_of_nccl(ranks: int, microseconds: float) -> None:
    """6.8 us, and twice 0.6 us per further rank of a node and 5 us per doubling of the nodes."""
    assert small_sum_s(FRONTIER, ranks) == pytest.approx(microseconds * 1e-6)


def test_maxima_of_fp8_are_reduced_twice_per_microbatch_and_chunk() -> None:
    model = load_model("gpt-22b")
    plain = replace(FRONTIER, linear_speedup=1.5)
    reducing = replace(plain, reduces_fp8_maxima=True)
    layout = Layout(
        tp=4,
        pp=4,
        dp=8,
        microbatches=16,
        chunks=2,
        schedule="interleaved",
    )
    each_s = float(small_sum_s(FRONTIER, 32))
    before = simulate_layout(model, layout, plain)
    after = simulate_layout(model, layout, reducing)
    busier_s = [new - old for new, old in zip(after.simulated.busy_s, before.simulated.busy_s, strict=True)]
    assert busier_s == pytest.approx([2 * 2 * 16 * each_s] * 4)
    flat = replace(layout, pp=1, chunks=1, schedule="1f1b")
    closed_s = float(step_s(model, flat, reducing)) - float(step_s(model, flat, plain))
    assert closed_s == pytest.approx(2 * 16 * each_s)
