"""Closed forms against independent counts: FLOPs, parameters, memory, collectives, and the schedule's own in-flight numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.config.load import load_model
from frontier_llm.costs import (
    Workload,
    hardware_flops_per_token,
    model_flops_per_token,
    parameter_shapes,
    rank_parameters,
    total_parameters,
)
from frontier_llm.costs.collectives import flat_s, message_s, node_s, table_s
from frontier_llm.costs.kernels import flash_s, gemm_s
from frontier_llm.costs.layer import layer_terms, totals
from frontier_llm.costs.memory import in_flight, layer_activation_bytes
from frontier_llm.costs.parameters import stage_parameters
from frontier_llm.costs.time import step_s
from frontier_llm.costs.workload import GPIPE, SCHEDULES, model_numbers
from frontier_llm.machine import load_machine, rates
from frontier_llm.schedule import Kind, build
from frontier_llm.topology import split_layers

FRONTIER = rates(load_machine("frontier"))


def workload(model: str = "gpt-22b", **layout: float) -> Workload:
    base = {"tp": 4, "pp": 4, "dp": 4, "chunks": 1, "B": 1, "m": 16, "sp": 0, "recompute": 0, "zero": 1, "dp_outer": 0}
    return Workload(**model_numbers(load_model(model)), **{**base, **layout})


@pytest.mark.parametrize("name", ["gpt-22b", "gpt-175b", "gpt-1t"])
def test_flops_are_megatrons_formula_for_gpt_shapes(name: str) -> None:
    model = load_model(name)
    L, h, s, V = model.layers, model.hidden, model.sequence_length, model.vocab_size
    assert model_flops_per_token(model) == pytest.approx(72 * L * h * h * (1 + s / (6 * h) + V / (12 * L * h)), rel=1e-12)
    w = workload(name, recompute=2)
    assert float(hardware_flops_per_token(w)) == pytest.approx(96 * L * h * h * (1 + s / (6 * h) + w.V / (16 * L * h)), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "published"), [("llama-2-7b", 6_738_415_616), ("llama-3-8b", 8_030_261_248), ("llama-2-70b", 68_976_648_192)]
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
    held = [rank_parameters(model, stage, tp) for stage in stages]
    one = [rank_parameters(model, stage, 1) for stage in stages]
    shapes = parameter_shapes(model)
    whole = sum(
        int(np.prod(shape))
        for key, shape in shapes.items()
        if "norm" in key or "position" in key or key.endswith(("output.bias", "down.bias"))
    )
    tied_copy = model.padded_vocab_size * model.hidden if model.tied_embeddings and pp > 1 else 0
    assert sum(one) == total_parameters(model) + tied_copy
    assert tp * sum(held) == sum(one) + (tp - 1) * whole
    w = replace(workload(tp=tp, pp=pp), **model_numbers(model))
    closed = [float(stage_parameters(w, stage.num_layers, stage.embedding, stage.head)) for stage in stages]
    assert closed == pytest.approx(held, rel=1e-12)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1)])
@pytest.mark.parametrize(("pp", "m"), [(4, 8), (4, 2), (8, 32), (3, 7)])
def test_in_flight_is_what_the_action_list_holds(schedule: str, chunks: int, pp: int, m: int) -> None:
    if chunks > 1 and m % pp:
        pytest.skip("the closed form counts whole rounds")
    played = build(schedule, pp, m, chunks)
    w = workload(pp=pp, m=m, chunks=chunks, schedule=SCHEDULES.index(schedule))
    last_use = Kind.BACKWARD_WEIGHT if schedule == "zb-h1" else Kind.BACKWARD
    for stage in range(pp):
        held = peak = 0
        for action in played.compute[stage]:
            held += (action.kind is Kind.FORWARD) - (action.kind is last_use)
            peak = max(peak, held)
        expected = float(in_flight(w, stage))
        assert peak == expected if schedule != "zb-h1" else peak <= expected


def test_activations_follow_korthikanti() -> None:
    """Table 2 of the paper: S·B·H·(10 + 24/t) with tensor parallelism and no attention scores, both dropout masks included."""
    dropout = replace(FRONTIER, dropout=True)
    for tp in (1, 2, 4, 8):
        w = workload(tp=tp)
        statistics = 4.0 * w.S * w.A / tp
        expected = w.S * w.H * (10 + 24 / tp) + statistics
        assert float(layer_activation_bytes(w, dropout, 0)) == pytest.approx(expected, rel=1e-9)
    assert float(layer_activation_bytes(workload(tp=4), dropout, 2)) == 2 * 2048 * 6144
    assert float(layer_activation_bytes(workload(tp=4, sp=1), dropout, 2)) == 2 * 2048 * 6144 / 4


def test_the_table_is_met_exactly_and_monotone_between() -> None:
    machine = load_machine("frontier")
    table = machine.allreduce
    for nodes, row in table.time_us.items():
        for size, microseconds in zip(table.message_bytes, row, strict=True):
            assert float(table_s(FRONTIER.all_reduce_table, nodes, size)) == pytest.approx(microseconds * 1e-6, rel=1e-9)
    between = table_s(FRONTIER.all_reduce_table, 384, np.array([2.0**20, 2.0**24, 2.0**30]))
    assert np.all(np.diff(between) > 0)
    assert (
        float(table_s(FRONTIER.all_reduce_table, 256, 2**28))
        < float(table_s(FRONTIER.all_reduce_table, 384, 2**28))
        < float(table_s(FRONTIER.all_reduce_table, 512, 2**28))
    )
    assert float(table_s(FRONTIER.all_reduce_table, 8, 2**33)) == pytest.approx(2 * float(table_s(FRONTIER.all_reduce_table, 8, 2**32)))


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
    M, N, K = 64 * rows, 64 * columns, 64 * inner
    assert float(gemm_s(M, N, K, FRONTIER)) >= 2.0 * M * N * K / (FRONTIER.peak_flops * FRONTIER.gemm_efficiency)


def test_kernels_know_shapes() -> None:
    good, ragged = float(gemm_s(8192, 8192, 8192, FRONTIER)), float(gemm_s(8192 + 8, 8192, 8192, FRONTIER))
    assert good < ragged < 1.2 * good
    assert float(gemm_s(2048, 2048, 108, FRONTIER, 64, aligned=False)) > 1.5 * float(gemm_s(2048, 2048, 112, FRONTIER, 64))
    forward, backward = flash_s(1, 16, 4096, 128, FRONTIER)
    assert 2 * float(forward) < float(backward) < 6 * float(forward)


def test_sequence_parallelism_cuts_the_elementwise_work_and_recompute_adds_a_forward() -> None:
    plain, cut = (layer_terms(workload(sp=flag), FRONTIER)["norms, activation, residual"] for flag in (0, 1))
    assert float(cut[0]) < float(plain[0])
    none, full = (totals(layer_terms(workload(recompute=mode), FRONTIER)) for mode in (0, 2))
    assert float(full[1] - none[1]) == pytest.approx(float(none[0]), rel=1e-6)


def test_one_layout_and_many_go_through_the_same_formulas() -> None:
    many = workload(tp=np.array([1.0, 2, 4, 8]), B=np.array([1.0, 2, 4, 1]), schedule=np.array([1, 1, GPIPE, 3]))
    seconds = step_s(many, FRONTIER)
    assert seconds.shape == (4,)
    for index in range(4):
        assert float(step_s(many.at(index), FRONTIER)) == pytest.approx(float(seconds[index]), rel=1e-12)
