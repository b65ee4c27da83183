"""Tests the predicted cost of Muon's update in a plan.

The products of the owner with the most work are compared with a count by hand. Padding and gathers follow the plan of
the buckets.
"""

from __future__ import annotations

import numpy as np
import pytest

from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.matrices import is_matrix, matrices_of
from frontier_llm.blueprint.parameters import block_parameters
from frontier_llm.config.load import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.costs.layouts import as_table
from frontier_llm.planner.costs.memory import peak_memory
from frontier_llm.planner.costs.update import update_flops, whole_update
from frontier_llm.planner.search import search

FRONTIER = rates(load_machine("frontier"))
MODEL = load_model("gpt-22b")


def test_flops_are_those_of_five_steps_on_each_matrix() -> None:
    """The formula is 5 (4 m² n + 2 m³) for m x n. q, k, v and the output are H x H, the MLP's two are 4H x H."""
    H = MODEL.hidden
    block = [one for one in block_parameters(MODEL, 0) if is_matrix(one)]
    assert sum(update_flops(one, {}) for one in block) == 5 * (4 * 6 * H**3 + 2 * (16 + 2) * H**3)
    assert sum(update_flops(one, {"tp": 8}) for one in block) == 5 * (4 * (4 / 8 + 2) * H**3 + 2 * (16 / 8 + 2) * H**3)


def test_pieces_are_decided_by_global_shapes() -> None:
    llama = load_model("llama-3-8b")
    shapes = {
        f"{one.name.split('.', 2)[2]} {matrices.piece.name if matrices.piece else ''}".strip(): (
            matrices.count,
            matrices.rows,
            matrices.columns,
        )
        for one in block_parameters(llama, 0)
        if is_matrix(one)
        for matrices in matrices_of(one)
    }
    assert shapes["attention.qkv.weight q"] == (1, 4096, 4096) and shapes["attention.qkv.weight k"] == (1, 1024, 4096)
    assert shapes["mlp.up.weight gate"] == shapes["mlp.up.weight up"] == (1, 14336, 4096)
    qkv = next(one for one in block_parameters(llama, 0) if "qkv" in one.name)
    assert [(one.count, one.rows, one.columns) for one in matrices_of(qkv, by_group=True)] == [
        (8, 512, 4096),
        (8, 128, 4096),
        (8, 128, 4096),
    ]


def test_slices_cut_few_matrices_and_hold_many_whole() -> None:
    many = whole_update(MODEL, Layout(tp=8, dp=4, optimizer="muon"), FRONTIER, 48)
    few = whole_update(MODEL, Layout(tp=8, dp=64, optimizer="muon"), FRONTIER, 2)
    assert float(many.gathered) == 0 and float(few.padding) < float(few.gathered)
    assert float(few.gathered) > 0
    none = whole_update(MODEL, Layout(tp=8, dp=4), FRONTIER, 48)
    assert not any(map(float, none))


def test_columns_are_the_layouts_one_by_one() -> None:
    layouts = [
        Layout(tp=tp, pp=pp, dp=dp, microbatches=8, optimizer="muon")
        for tp in (1, 8)
        for pp in (1, 4)
        for dp in (1, 4, 64)
    ]
    layers = np.array([48 / one.pp for one in layouts])
    columns = whole_update(MODEL, as_table(layouts), FRONTIER, layers)
    for index, one in enumerate(layouts):
        alone = whole_update(MODEL, one, FRONTIER, int(layers[index]))
        assert [float(column[index]) for column in columns] == pytest.approx([float(value) for value in alone])
    memory = peak_memory(MODEL, as_table(layouts), FRONTIER)
    assert np.all(memory > 0)


def test_a_v_in_pairs_is_chosen_where_one_communication_is_in_flight() -> None:
    """With dualpipe-v, neighbouring ranks reach their messages at about the same time.

    With the other schedules of this shape, ranks wait for messages.
    """
    fixed = {"tp": 8, "pp": 4, "micro_batch": 2, "recompute": "none", "sharding": "optimizer"}
    best = search(load_model("gpt-175b"), FRONTIER, 128, 2048, fixed).best
    assert FRONTIER.one_in_flight and best.layout.schedule == "dualpipe-v"


def test_a_search_for_the_fastest_v_is_at_least_as_fast_as_the_named_ones() -> None:
    fixed = {"tp": 8, "pp": 4, "micro_batch": 1, "recompute": "none", "sharding": "optimizer"}
    best = search(MODEL, FRONTIER, 16, 1024, {**fixed, "schedule": "searched"}).best
    for name in ("zb-v", "v-half"):
        assert best.step_s <= 1.03 * search(MODEL, FRONTIER, 16, 1024, {**fixed, "schedule": name}).best.step_s
    assert best.layout.chunks == 2 and best.peak_bytes <= FRONTIER.memory_bytes
