"""What experts cost: their part of the weights, their rows on the way, where their ranks stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from frontier_llm.blueprint import model_parameters, total_parameters
from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import load_model
from frontier_llm.costs.flops import model_flops_per_token
from frontier_llm.costs.memory import stage_memory
from frontier_llm.costs.seconds import experts_inside, times
from frontier_llm.machine import load_machine, rates

FRONTIER = rates(load_machine("frontier"))
LARGE = load_model("xmoe-large")


def test_xmoes_shapes_have_the_parameters_that_its_authors_count() -> None:
    """L (4 H² + 2 H F E), in units of 2^30."""
    for name, published in (("small", 10.1), ("medium", 55.2), ("large", 201.4), ("super", 545.4)):
        model = load_model(f"xmoe-{name}")
        small = ("embedding", "head", "norm", "router")
        counted = sum(one.numel for one in model_parameters(model).values() if not any(part in one.name for part in small))
        assert counted / 2**30 == pytest.approx(published, abs=0.05)


def test_experts_are_cut_over_ep_and_their_state_over_edp() -> None:
    whole, cut = (
        stage_memory(LARGE, Layout(dp=64, ep=ep), FRONTIER, 0, LARGE.layers, True, True) for ep in (1, 64)
    )  # 64 ranks hold all experts each, or a 64th
    experts = sum(one.numel for one in model_parameters(LARGE).values() if "experts" in one.name)
    assert float(whole["weights"] - cut["weights"]) == pytest.approx(2 * experts * 63 / 64)
    assert float(whole["optimizer"]) == pytest.approx(float(cut["optimizer"]))  # either way every rank keeps a 64th
    assert float(whole["weights"]) == pytest.approx(2 * total_parameters(LARGE))


def test_active_flops_are_those_of_the_chosen_experts() -> None:
    fewer = LARGE.model_copy(update={"moe": LARGE.moe.model_copy(update={"top_k": 4})})  # type: ignore[union-attr]
    difference = model_flops_per_token(LARGE) - model_flops_per_token(fewer)
    assert difference == pytest.approx(6 * LARGE.layers * 4 * 2 * LARGE.hidden * LARGE.ffn_hidden)


def test_rows_that_leave_the_node_cost_more_and_a_pipeline_may_stand_between_neighbours() -> None:
    layout = Layout(dp=64, ep=8)
    inside, across = (float(times(LARGE, replace(layout, ep=ep), FRONTIER).block.forward_s) for ep in (8, 64))
    assert across > 1.5 * inside
    assert float(times(LARGE, replace(layout, imbalance=1.5), FRONTIER).block.forward_s) > 1.1 * inside
    seats = [int(experts_inside(replace(layout, tp=2, pp=8, dp=8, axis_order=order), FRONTIER)) for order in ("tp-dp-pp", "tp-pp-dp")]
    assert seats == [8, 2]
