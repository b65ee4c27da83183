"""The planner must use the predicted time of the faster collective algorithm for the gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.algorithms import (
    bucket_bytes,
    gradient_choices,
    gradient_words,
    node_counts,
    times_by_nodes,
    uses_hierarchical,
)
from frontier_llm.planner.costs.collectives import collective_s, flat_s, hierarchical_s
from frontier_llm.planner.costs.time import gradient_reduction_s
from frontier_llm.planner.search import Plan, simulate_layout

FRONTIER = rates(load_machine("frontier"))
ORNL = rates(load_machine("frontier"), "megatron-deepspeed")


def plan(dp: int, sharding: str = "optimizer", tp: int = 8) -> Plan:
    layout = Layout(tp=tp, pp=2, dp=dp, microbatches=4, recompute="full", sharding=sharding)
    return simulate_layout(load_model("gpt-22b"), layout, FRONTIER)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_the_price_is_that_of_the_faster_algorithm(operation: str) -> None:
    sizes = 2.0 ** np.arange(12, 33)[:, None]
    ranks = np.array([8.0, 64, 512, 75264])
    price = collective_s(FRONTIER, ranks, 8, 1, sizes, operation)
    flat, staged = (np.asarray(way(FRONTIER, ranks, 8, 1, sizes, operation)) for way in (flat_s, hierarchical_s))
    assert np.array_equal(price, np.minimum(flat, staged))
    assert (flat < staged).any()  # otherwise one algorithm would be enough
    assert (staged < flat).any()
    assert np.array_equal(
        collective_s(ORNL, ranks, 8, 1, sizes, operation),
        flat_s(ORNL, ranks, 8, 1, sizes, operation),
    )


def test_two_stages_win_by_more_the_more_nodes_there_are() -> None:
    """RCCL's reduce-scatter is a ring whose hops grow with the number of ranks.

    In two stages the hops grow with the logarithm of that number. PCCL reports a factor of 168 at 2,048 GCDs.
    """
    assert node_counts(FRONTIER)[-1] == 9408
    _, flat, staged = times_by_nodes(FRONTIER, 1, 8, 160e6, "reduce_scatter")
    gain = flat / staged
    assert gain[-1] > 5
    assert np.all(np.diff(gain[4:]) > 0)


def test_the_choice_of_a_plan_is_that_of_its_buckets() -> None:
    many = plan(256)
    sizes = bucket_bytes(many, FRONTIER)
    assert sizes == {"reduce_scatter": 160e6, "all_gather": 80e6}
    scatter, gather = gradient_choices(many, FRONTIER)
    assert (scatter.nodes, scatter.ranks, gather.size_bytes) == (256, 256, 80e6)
    assert scatter.flat_s == float(flat_s(FRONTIER, 256, 1, 8, 160e6, "reduce_scatter"))
    assert uses_hierarchical(many, FRONTIER) == (
        scatter.hierarchical_s < scatter.flat_s or gather.hierarchical_s < gather.flat_s
    )
    assert "in two stages" in gradient_words(many, FRONTIER)[0]
    assert [one.operation for one in gradient_choices(plan(256, sharding="none"), FRONTIER)] == ["all_reduce"]
    assert gradient_choices(plan(4, tp=2), FRONTIER) == []  # dp lies inside the node
    assert gradient_words(many, ORNL) == []  # there is only one algorithm


def test_a_stack_that_sums_all_gradients_on_every_rank_has_an_all_reduce() -> None:
    """The predicted time contains an all-reduce (`gradient_reduction_s`), although ZeRO shards the state and gathers
    the weights.
    """
    numbers = replace(FRONTIER, all_reduces_gradients=True)
    assert bucket_bytes(plan(256), numbers) == {"all_reduce": 160e6, "all_gather": 80e6}
    assert [one.operation for one in gradient_choices(plan(256), numbers)] == ["all_reduce", "all_gather"]


def test_gradients_are_reduced_bucket_by_bucket() -> None:
    """Above the bucket size, twice the parameters need twice the calls. Below it there is one call of any size."""
    layout = plan(256).layout
    one, two = (float(gradient_reduction_s(layout, FRONTIER, parameters)[0]) for parameters in (40e6, 80e6))
    assert two == pytest.approx(2 * one)
    whole = replace(FRONTIER, bucket_parameters=0.0)
    assert float(gradient_reduction_s(layout, whole, 80e6)[0]) < two  # the latencies are paid once
    assert float(gradient_reduction_s(layout, FRONTIER, 4e6)[0]) == pytest.approx(
        float(gradient_reduction_s(layout, whole, 4e6)[0])
    )
