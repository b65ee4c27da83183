"""The choice among simulated plans prefers plans that are fast with slow constants too, and that stay within safe
memory. Among these it prefers the simplest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.choice import RESOLUTION, TIE, complexity, losses, preference, ranked, why_not
from frontier_llm.planner.search import Plan, default_global_batch, search, simulate_layout
from tests.harness.marks import exhaustive

FRONTIER = rates(load_machine("frontier"))
MODEL = load_model("gpt-tiny")
BASE = simulate_layout(MODEL, Layout(pp=2, dp=2, microbatches=8), FRONTIER)


def plan(seconds: float, slow_s: float, **changes: Any) -> Plan:
    """Return a plan with these step times and a layout with these changes."""
    other_s = BASE.step_s - BASE.simulated.pipeline_s
    simulated = replace(BASE.simulated, pipeline_s=seconds - other_s)
    return replace(BASE, layout=replace(BASE.layout, **changes), simulated=simulated, slow_s=slow_s)


def test_within_one_percent_the_simplest_plan_is_chosen() -> None:
    fast = plan(100.0, 150.0, chunks=2, schedule="v-half")
    near = plan(100.9, 150.9)
    far = plan(101.5, 150.9)
    assert ranked([fast, near]) == [near, fast]
    assert ranked([fast, far]) == [fast, far]
    assert "simplest" in why_not(near, fast, [fast, near])
    assert why_not(fast, near, [fast, near]) == ""
    # a plan whose memory is above the largest memory with which plans have run is ranked after the others
    full = replace(near, safe_bytes=near.peak_bytes - 1)
    assert ranked([fast, full]) == [fast, full]
    assert "memory" in why_not(near, replace(fast, safe_bytes=1.0), [fast, near])


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 2},
        {"chunks": 2},
        {"schedule": "zb-h1"},
        {"axis_order": "tp-pp-dp"},
        {"gradient_wire": "bf16"},
        {"tensor_chunks": 2},
        {"recompute": "full,none"},
    ],
)
def test_each_axis_and_special_setting_makes_a_plan_less_simple(changes: dict[str, Any]) -> None:
    assert complexity(replace(BASE.layout, **changes)) > complexity(BASE.layout)


def test_a_plan_that_loses_with_slow_constants_is_not_chosen() -> None:
    fragile = plan(100.0, 160.0)
    robust = plan(102.0, 150.0, tp=2)
    assert ranked([fragile, robust]) == [robust, fragile]
    assert "slow values" in why_not(robust, fragile, [fragile, robust])
    # no plan is within 3 % of the best in both cases, so the plan with the smallest loss of speed is chosen
    slow = plan(110.0, 150.0, tp=2)
    worse = plan(100.0, 180.0)
    assert losses([worse, slow]) == pytest.approx([0.2, 0.1])
    assert ranked([worse, slow])[0] == slow


def test_only_estimated_shares_that_another_stack_has_lower_are_slow() -> None:
    assert FRONTIER.slow == {"gemm_efficiency": 0.5, "flash_efficiency": 0.3, "fabric_share": 0.4, "dp_overlap": 0.0}
    assert rates(load_machine("frontier"), "megatron-deepspeed").slow == {}
    machine = load_machine("frontier")
    stacks = {**machine.stacks, "frontier-llm": machine.stacks["frontier-llm"].model_copy(update={"slow_as": "mine"})}
    with pytest.raises(ValueError, match="slow_as 'mine' of stack frontier-llm"):
        type(machine).model_validate({**machine.model_dump(), "stacks": {k: v.model_dump() for k, v in stacks.items()}})


@pytest.mark.parametrize(("model", "nodes"), [("gpt-22b", 8), ("gpt-175b", 64)])
def test_the_choice_is_robust_and_simple_on_shipped_models(model: str, nodes: int) -> None:
    described = load_model(model)
    found = search(described, FRONTIER, nodes, default_global_batch(described, nodes, 8))
    check_choice(list(found.plans))
    if found.best.peak_bytes > FRONTIER.safe_bytes:
        assert found.safe is None or found.safe.peak_bytes <= FRONTIER.safe_bytes
    else:
        assert found.safe is None


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["gpt-1t", "llama-3-8b", "llama-3-70b", "mixtral-8x7b", "mpt-7b"])
@pytest.mark.parametrize("nodes", [128, exhaustive(384)])
def test_the_choice_is_robust_and_simple_on_more_models(model: str, nodes: int) -> None:
    described = load_model(model)
    check_choice(list(search(described, FRONTIER, nodes, default_global_batch(described, nodes, 8)).plans))


def check_choice(plans: list[Plan]) -> None:
    """Assert that the first plan is robust, and that no other robust plan is as fast and simpler."""
    lost = losses(plans)
    assert all(one.slow_s > one.step_s for one in plans)  # slow constants make each plan slower
    assert lost[0] <= max(RESOLUTION, min(lost))
    for other, loss in zip(plans, lost, strict=True):
        if loss <= RESOLUTION and preference(other) <= preference(plans[0]):
            assert plans[0].is_safe or not other.is_safe
            assert plans[0].is_safe > other.is_safe or complexity(other.layout) >= complexity(plans[0].layout)
            assert preference(plans[0]) <= (1 + TIE) * preference(other)


def test_the_best_plan_within_safe_memory_is_named_beside_a_choice_above_it() -> None:
    model = load_model("gpt-22b")
    free = search(model, FRONTIER, 8, 512)
    assert free.safe is None or free.best.peak_bytes > FRONTIER.safe_bytes
    tighter = replace(FRONTIER, safe_bytes=0.7 * free.best.peak_bytes)
    found = search(model, tighter, 8, 512)
    if found.best.is_safe:
        assert preference(found.best) <= (1 + TIE) * preference(free.best)
    else:
        assert found.safe is not None
        assert found.safe.is_safe and preference(found.safe) > (1 + TIE) * preference(found.best)
    assert search(model, replace(FRONTIER, safe_bytes=1.0), 8, 512).safe is None


def test_fsdp_is_a_finalist_if_the_machine_allows_it() -> None:
    model = load_model("gpt-175b")
    free = replace(FRONTIER, one_in_flight=False)
    found = search(model, free, 64, 2048)
    assert any(one.layout.sharding == "weights" for one in found.plans)
