"""The gain of interleaved microbatches for a mixture of experts: rows overlap the other microbatch's compute, and the
bubble grows little.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from frontier_llm.blueprint.expert_work import DISPATCH, LAUNCHES_AFTER_WAIT
from frontier_llm.blueprint.layout import Layout
from frontier_llm.config.load import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.planner import pipeline
from frontier_llm.planner.breakdown import breakdown
from frontier_llm.planner.costs.seconds import times
from frontier_llm.planner.costs.time import layer_s, pair_s, step_s
from frontier_llm.planner.pipeline import simulate_step
from frontier_llm.planner.search import simulate_layout
from frontier_llm.topology.plan import split_layers

LARGE = load_model("xmoe-large")
FRONTIER = rates(load_machine("frontier"))  # these rates are for one communication in flight
MANY = replace(FRONTIER, one_in_flight=False)


def layout(**changes: Any) -> Layout:
    common = {
        "tp": 2,
        "pp": 4,
        "dp": 32,
        "ep": 16,
        "expert_nodes": 2,
        "chunks": 2,
        "microbatches": 48,
        "schedule": "dualpipe-v",
    }
    return Layout(**{**common, "sequence_parallel": True, "axis_order": "tp-dp-pp", **changes})


def saved_s(spread: Layout, numbers: Rates = MANY) -> float:
    """Return the seconds saved in a layer's forward and backward."""
    return float(pair_s(times(LARGE, spread, numbers).block, spread, numbers))


def test_each_halfs_rows_hide_under_the_others_compute_and_no_more() -> None:
    block = times(LARGE, layout(), MANY).block
    rows_s = (block.rows_s, block.rows_backward_s)
    computed_s = [float(s) for s in layer_s(block, layout(), MANY)]
    assert 0 < rows_s[0] < 0.5 * computed_s[0]
    assert saved_s(layout()) == pytest.approx(sum(rows_s) * MANY.dp_overlap)  # compute takes longer than the rows here
    endless = block._replace(rows_s=computed_s[0] + 1, rows_backward_s=1.0, forward_s=computed_s[0] + 1)
    forward_s, backward_s = endless.both(48, MANY)
    expected = min(endless.rows_s * MANY.dp_overlap, backward_s - 1.0) + min(
        MANY.dp_overlap,
        forward_s - endless.rows_s,
    )
    assert float(pair_s(endless, layout(), MANY)) == pytest.approx(expected)


def test_the_hosts_wait_for_numbers_of_rows_hides_with_them() -> None:
    """The host waits twice per layer if rows go over nodes."""
    slow = replace(MANY, launch_s=2 * MANY.launch_s)
    waits_s = 2 * LAUNCHES_AFTER_WAIT * MANY.launch_s
    assert saved_s(layout(), slow) - saved_s(layout()) == pytest.approx(MANY.dp_overlap * waits_s)


def test_where_attentions_collectives_wait_for_the_rows_the_half_counts() -> None:
    assert saved_s(layout(), FRONTIER) == pytest.approx(saved_s(layout()) / 2)
    alone = layout(tp=1, dp=64, sequence_parallel=False)
    assert saved_s(alone, FRONTIER) == pytest.approx(saved_s(alone))


def test_without_pairs_without_experts_over_ranks_and_on_a_cpu_nothing_hides() -> None:
    assert saved_s(layout(schedule="zb-v")) == saved_s(layout(ep=1, expert_nodes=1)) == 0.0
    assert saved_s(layout(), replace(MANY, host_executes=True)) == 0.0


@pytest.mark.parametrize("numbers", [MANY, FRONTIER], ids=["many", "one in flight"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"tp": 1, "dp": 64, "sequence_parallel": False, "recompute": "full"}, {"pp": 2, "dp": 64}],
    ids=str,
)
def test_the_simulated_step_has_the_gain_and_the_breakdown_says_where(
    numbers: Rates,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spread = layout(**changes)
    plan = simulate_layout(LARGE, spread, numbers)
    parts = breakdown(plan, numbers)
    busiest = int(np.argmax(plan.simulated.busy_s))
    assert sum(parts.values()) == pytest.approx(plan.step_s, rel=1e-6)
    assert parts[DISPATCH] > 0 and plan.simulated.hidden_s[busiest] > 0
    assert float(step_s(LARGE, spread, numbers)) == pytest.approx(plan.step_s, rel=0.05)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "pair_s", lambda *_: 0.0)
        apart = simulate_layout(LARGE, spread, numbers)
    gained = (apart.step_s - plan.step_s) / plan.simulated.hidden_s[busiest]
    # With one communication in flight the gain can be larger. Messages between pairs then wait less for each other than
    # messages between the halves.
    assert 0.5 < gained < (1.05 if numbers is MANY else 2.0)


def test_an_extended_schedule_equals_the_full_list_in_pairs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = layout(microbatches=150)
    stages = split_layers(LARGE, 8)
    short = simulate_step(LARGE, spread, MANY, stages)
    assert short.timeline.schedule.microbatches < 150
    monkeypatch.setattr(pipeline, "STEADY_MICROBATCHES", 10**6)
    full = simulate_step(LARGE, spread, MANY, stages)
    assert full.timeline.schedule.microbatches == 150
    for what in ("step_s", "end_s", "busy_s", "hidden_s"):
        assert getattr(short, what) == pytest.approx(getattr(full, what), rel=1e-9)
