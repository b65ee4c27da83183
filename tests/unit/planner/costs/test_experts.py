"""The costs of experts: their share of the weights, the all-to-all of rows, and the placement of their ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from frontier_llm.blueprint.expert_work import DISPATCH, EXPERTS, even_rows, expert_work, nodes_of_a_token
from frontier_llm.blueprint.items import Collective, HostWait, Software
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.parameters import model_parameters, stage_parameters, total_parameters
from frontier_llm.blueprint.work import block_work, model_flops_per_token
from frontier_llm.config import ModelConfig, load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.breakdown import breakdown
from frontier_llm.planner.costs.memory import kept_bytes, memory_by_rank, peak_memory, stage_memory
from frontier_llm.planner.costs.seconds import by_cause, times, work_s
from frontier_llm.planner.costs.time import layer_s
from frontier_llm.planner.pipeline import stage_times
from frontier_llm.planner.search import simulate_layout
from frontier_llm.topology.expert_nodes import experts_inside, over_nodes
from frontier_llm.topology.plan import split_layers
from frontier_llm.units import GIB

FRONTIER = rates(load_machine("frontier"))
LARGE = load_model("xmoe-large")


def test_xmoes_shapes_have_the_parameters_that_its_authors_count() -> None:
    """The formula is L (4 H² + 2 H F E), in units of 2^30."""
    for name, published in (("small", 10.1), ("medium", 55.2), ("large", 201.4), ("super", 545.4)):
        model = load_model(f"xmoe-{name}")
        small = ("embedding", "head", "norm", "router")
        counted = sum(
            one.numel for one in model_parameters(model).values() if not any(part in one.name for part in small)
        )
        assert counted / 2**30 == pytest.approx(published, abs=0.05)


def test_experts_are_cut_over_ep_and_their_state_over_edp() -> None:
    whole, cut = (
        stage_memory(LARGE, Layout(dp=64, ep=ep), FRONTIER, 0, LARGE.layers, True, True) for ep in (1, 64)
    )  # each of 64 ranks holds all experts, or a 64th of them
    experts = sum(one.numel for one in model_parameters(LARGE).values() if "experts" in one.name)
    assert float(whole["weights"] - cut["weights"]) == pytest.approx(2 * experts * 63 / 64)
    assert float(whole["optimizer"]) == pytest.approx(float(cut["optimizer"]))  # in both cases each rank keeps a 64th
    assert float(whole["weights"]) == pytest.approx(2 * total_parameters(LARGE))


def test_active_flops_are_those_of_the_chosen_experts() -> None:
    fewer = LARGE.model_copy(update={"moe": LARGE.moe.model_copy(update={"top_k": 4})})  # type: ignore[union-attr]
    difference = model_flops_per_token(LARGE) - model_flops_per_token(fewer)
    assert difference == pytest.approx(6 * LARGE.layers * 4 * 2 * LARGE.hidden * LARGE.ffn_hidden)


def test_a_gate_of_the_shared_expert_counts_its_product_and_what_it_keeps() -> None:
    plain, gated = (
        LARGE.model_copy(update={"moe": LARGE.moe.model_copy(update={"shared_hidden": 512, "shared_gate": gate})})  # type: ignore[union-attr]
        for gate in (False, True)
    )
    difference = model_flops_per_token(gated) - model_flops_per_token(plain)
    assert difference == pytest.approx(6 * LARGE.layers * LARGE.hidden)  # one row of H weights per layer


def test_rows_that_leave_the_node_cost_more_and_a_pipeline_may_stand_between_neighbours() -> None:
    layout = Layout(dp=64, ep=8)
    inside, across = (float(times(LARGE, replace(layout, ep=ep), FRONTIER).block.forward_s) for ep in (8, 64))
    assert across > 1.5 * inside
    assert float(times(LARGE, replace(layout, imbalance=1.5), FRONTIER).block.forward_s) > 1.1 * inside
    ranks_per_node = [
        int(experts_inside(replace(layout, tp=2, pp=8, dp=8, axis_order=order), FRONTIER))
        for order in ("tp-dp-pp", "tp-pp-dp")
    ]
    assert ranks_per_node == [8, 2]


def test_two_stages_save_the_share_that_x_moe_measured_and_are_taken_where_they_are_faster() -> None:
    """X-MoE reports 54.8 % redundant rows on 4 nodes with 8 of 256 experts.

    Removing them cut the traffic between nodes by 52.5 % (arXiv:2508.13337).
    """
    assert 1 - nodes_of_a_token(256, 8, 4) / 8 == pytest.approx(0.548, abs=0.01)
    layout = Layout(dp=64, ep=32)
    taken = over_nodes(LARGE, layout, FRONTIER)
    assert taken.expert_nodes == 4 and over_nodes(LARGE, layout, FRONTIER, "flat") == layout
    flat, by_node = (float(times(LARGE, one, FRONTIER).block.forward_s) for one in (layout, taken))
    assert by_node < 0.95 * flat
    # all experts are in one node, so the two-stage form has no effect
    assert over_nodes(LARGE, Layout(dp=64, ep=8), FRONTIER, "hierarchical").expert_nodes == 1
    one_choice = LARGE.model_copy(update={"moe": LARGE.moe.model_copy(update={"top_k": 1})})  # type: ignore[union-attr]
    # With one expert per token no row is redundant, and the two-stage form would send rows a second time inside the
    # node.
    assert over_nodes(one_choice, layout, FRONTIER).expert_nodes == 1


def test_rows_travel_beside_the_shared_expert() -> None:
    """The longer the shared expert computes, the less time the all-to-all adds."""
    layout = Layout(dp=64, ep=8)
    dispatch_s = [
        sum(by_cause(block_work(model, layout, FRONTIER), layout, FRONTIER)[DISPATCH])
        for model in (
            LARGE.model_copy(update={"moe": LARGE.moe.model_copy(update={"shared_hidden": width})})
            for width in (0, 512, 2048)
        )  # type: ignore[union-attr]
    ]
    assert dispatch_s[0] > dispatch_s[1] > dispatch_s[2] > 0


def test_a_layer_keeps_what_xmoes_theory_allows_without_the_experts_outputs() -> None:
    """Table 4 of the X-MoE paper (arXiv:2508.13337) has Large at EP64.

    It lists 1.125 GiB of activations in theory, 1.21 in X-MoE, 1.95 in Tutel and 2.81 in DeepSpeed-MoE. The theory
    counts the rows before and after the experts and twice between their matrices: 2 k S (2 H + 2 F). Here the weights
    are applied between the matrices, so that outputs are not kept. The router's input and its scores are kept too, and
    the theory's formula omits them.
    """
    assert LARGE.moe is not None
    rows = LARGE.moe.top_k * LARGE.sequence_length
    H = LARGE.hidden
    F = LARGE.expert_hidden
    assert 2 * rows * (2 * H + 2 * F) / GIB == pytest.approx(1.125)
    ours = kept_bytes(expert_work(LARGE, Layout(dp=64, ep=64), Software()), "none")
    assert ours == pytest.approx(2 * rows * (H + 2 * F), rel=0.15) and ours < 1.125 * GIB


def test_the_host_waits_for_numbers_of_rows_once_a_stage_unless_a_capacity_bounds_them() -> None:
    def waits_s(model: ModelConfig, layout: Layout) -> float:
        return sum(
            work_s(item.work, layout, FRONTIER, {})
            for item in expert_work(model, layout, Software())
            if isinstance(item.work, HostWait)
        )

    flat = Layout(dp=64, ep=32)
    by_node = Layout(dp=64, ep=32, expert_nodes=4)
    assert waits_s(LARGE, by_node) == 2 * waits_s(LARGE, flat) == pytest.approx(20 * FRONTIER.launch_s)
    assert waits_s(bounded(1.25), by_node) == waits_s(bounded(1.25), flat) == waits_s(LARGE, Layout(dp=64)) == 0


def bounded(capacity: float) -> ModelConfig:
    return LARGE.model_copy(update={"moe": LARGE.moe.model_copy(update={"capacity": capacity})})  # type: ignore[union-attr]


@pytest.mark.parametrize("nodes", [1, 4])
def test_with_a_capacity_as_many_rows_travel_as_may_and_no_expert_computes_more(nodes: int) -> None:
    layout = Layout(dp=64, ep=32, expert_nodes=nodes, imbalance=2.0)
    even = even_rows(LARGE, replace(layout, imbalance=1.0))
    rows = even_rows(bounded(1.25), layout)
    assert rows.sent == rows.received == pytest.approx(1.25 * even.sent) and rows.computed == pytest.approx(
        1.25 * even.computed
    )
    assert (
        rows.to_nodes == rows.from_nodes == (0 if nodes == 1 else 4 * LARGE.sequence_length)
    )  # 8 choices at capacity 1.25: any token may go to any node
    assert over_nodes(bounded(1.25), Layout(dp=64, ep=32), FRONTIER).expert_nodes == 4


def test_rows_that_are_gathered_travel_once_over_ep() -> None:
    """Experts over 4 tensor ranks: a row is sent to one of them and gathered, instead of being sent to all four."""
    layout = Layout(tp=4, cp=1, dp=8, ep=8, etp=4, sequence_parallel=True)

    def sent_bytes(gathered: bool) -> dict[str, int]:
        sent: dict[str, int] = {}
        for item in expert_work(LARGE, layout, Software(expert_rows_gathered=gathered)):
            if isinstance(item.work, Collective) and item.cause == DISPATCH:
                sent[item.work.operation] = max(sent.get(item.work.operation, 0), item.work.size_bytes)
        return sent

    everywhere = sent_bytes(gathered=False)
    once = sent_bytes(gathered=True)
    assert everywhere["all_to_all"] == 4 * once["all_to_all"]
    assert once["all_gather"] == once["reduce_scatter"] == everywhere["all_to_all"]


def test_experts_products_use_the_fp8_rate() -> None:
    layout = Layout(dp=8, ep=8)
    slow, fast = (
        by_cause(block_work(LARGE, layout, numbers), layout, numbers)[EXPERTS]
        for numbers in (FRONTIER, replace(FRONTIER, linear_speedup=2.0))
    )
    assert all(1.5 < one / other <= 2.0 for one, other in zip(slow, fast, strict=True))


def test_each_stage_has_the_memory_and_time_of_its_own_layers() -> None:
    """The first 8 of 32 layers are dense, so the first of four stages has no experts and the others have only them."""
    moe = {**load_model("mixtral-8x7b").model_dump()["moe"], "dense_layers": 8}
    model = load_model("mixtral-8x7b", {"moe": moe})
    layout = Layout(pp=4, ep=2, dp=2, microbatches=8)
    stages = split_layers(model, 4)
    degrees = {"tp": 1, "ep": 2, "etp": 1}
    expected = [
        sum(one.rank_numel(degrees) for one in stage_parameters(model, stage, tied_ranks=1)) for stage in stages
    ]
    memory = memory_by_rank(model, layout, FRONTIER, stages)
    assert [lines["weights"] for lines in memory] == pytest.approx([2 * numel for numel in expected])
    fullest = max(sum(lines.values()) for lines in memory)
    assert fullest <= float(peak_memory(model, layout, FRONTIER)) <= 1.1 * fullest
    seconds = stage_times(model, layout, FRONTIER, stages)
    alone = [
        float(layer_s(times(model, layout, FRONTIER, stage.layers).block, layout, FRONTIER)[0]) for stage in stages
    ]
    assert alone[1] > 1.2 * alone[0] and alone[1] == alone[2] == alone[3]
    assert seconds[2].forward_s - seconds[0].forward_s > 7 * (alone[2] - alone[0])
    plan = simulate_layout(model, layout, FRONTIER)
    assert sum(breakdown(plan, FRONTIER).values()) == pytest.approx(plan.step_s)
    assert plan.closed_form_s == pytest.approx(plan.step_s, rel=0.1)
