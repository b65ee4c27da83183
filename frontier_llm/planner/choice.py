"""Choice of one plan among the simulated finalists of a search.

The chosen plan must be good with the predicted constants and with the slow constants (`Rates.slow`). Among nearly equal
plans the simplest is chosen. Plans are expected to run up to a certain memory (`Rates.safe_bytes`). If the choice needs
more, the best plan within this memory is reported too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from frontier_llm.blueprint.layout import Layout
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.time import step_s

if TYPE_CHECKING:
    from frontier_llm.planner.search import Plan

# Share of a step below which a difference between two plans is not significant. Predictions are 3-6 % off
# (docs/benchmarks/planner.md).
RESOLUTION = 0.03
TIE = 0.01  # if the step times of plans differ by at most this share, the simplest of these plans is chosen


def preference(plan: Plan) -> float:
    """Return the sort key of a plan: the seconds of its step, times 1 + RESOLUTION if the plan is risky.

    FSDP is risky because the overlap of its communication is estimated and not simulated. A plan within 5 % of the
    device's memory is risky, because the allocator may need more memory than estimated.
    """
    return plan.step_s * (1 + RESOLUTION if plan.layout.sharding == "weights" or plan.tight else 1.0)


def not_by_time() -> str:
    """Return the reason for an order of plans by `preference` that is not the order of their steps."""
    return (
        "plans are not sorted by time alone: FSDP (its overlap is an estimate) and plans that fill memory to within "
        f"5 % must be faster by {100 * RESOLUTION:.0f} %"
    )


def complexity(layout: Layout) -> tuple[int, int, int]:
    """Return the numbers of parallel axes besides dp, of virtual stages per rank, and of special settings.

    A special setting is a schedule other than 1F1B, an axis order or gradient wire other than the default, matrix
    products that are split into pieces, or recomputation that differs between layers.
    """
    axes = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.ep, layout.etp))
    plain = Layout()
    special = (
        layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved"),
        layout.axis_order != plain.axis_order,
        layout.gradient_wire != plain.gradient_wire,
        layout.tensor_chunks > 1,
        "," in layout.recompute,
    )
    return axes, layout.chunks, sum(special)


def with_slow(rates: Rates) -> Rates:
    """Return the rates with the slow values of their constants."""
    changes: dict[str, Any] = {**rates.slow, "slow": {}}
    return replace(rates, **changes)


def with_slow_step(plan: Plan, rates: Rates) -> Plan:
    """Return the plan with its step time under the slow constants.

    This step time is the simulated step time, multiplied by the ratio of the closed forms (slow / predicted constants).
    """
    if not rates.slow:
        return replace(plan, slow_s=plan.step_s)
    slow_s = float(step_s(plan.model, plan.layout, with_slow(rates)))
    return replace(plan, slow_s=plan.step_s * slow_s / plan.closed_form_s)


def losses(plans: Sequence[Plan]) -> list[float]:
    """Return for each plan how much longer its step is than the step of the best plan, as a fraction.

    The fraction is computed with the predicted constants and with the slow constants. The larger one is returned.
    """
    fastest_s = min(map(preference, plans))
    fastest_slow_s = min(map(_slow_preference, plans))
    return [max(preference(plan) / fastest_s, _slow_preference(plan) / fastest_slow_s) - 1 for plan in plans]


def _slow_preference(plan: Plan) -> float:
    return preference(plan) * plan.slow_s / plan.step_s


def ranked(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans in order: first the chosen plan, then all other plans by `preference`.

    A plan is robust if its loss is at most RESOLUTION. If no plan is robust, the plan with the smallest loss is chosen.
    Otherwise the choice is a robust plan within TIE of the fastest robust plan. Plans within `Plan.safe_bytes` are
    preferred, and then the simplest plan.
    """
    if not plans:
        return []
    lost = losses(plans)
    robust = [plan for plan, loss in zip(plans, lost, strict=True) if loss <= max(RESOLUTION, min(lost))]
    limit_s = (1 + TIE) * min(map(preference, robust))
    near = [plan for plan in robust if preference(plan) <= limit_s]
    choice = min(near, key=lambda plan: (not plan.is_safe, complexity(plan.layout), preference(plan)))
    return [choice, *sorted((plan for plan in plans if plan is not choice), key=preference)]


def why_not(choice: Plan, other: Plan, plans: Sequence[Plan]) -> str:
    """Return why `other` was not chosen although its step is shorter, or an empty text if it is not shorter."""
    if other.step_s >= choice.step_s:
        return ""
    risks = {
        "its overlap is an estimate": other.layout.sharding == "weights",
        "it fills memory to within 5 %": other.tight,
    }
    reasons = " and ".join(risk for risk, applies in risks.items() if applies)
    if reasons and preference(other) >= preference(choice):
        return f"{reasons}, so it must be faster by {100 * RESOLUTION:.0f} % to be chosen"
    loss = dict(zip(map(id, plans), losses(plans), strict=True)).get(id(other), 0.0)
    if loss > RESOLUTION:
        return (
            f"with the slow values of the estimated constants it is up to {100 * loss:.1f} % slower than the best plan"
        )
    if choice.is_safe and not other.is_safe:
        return f"within {100 * TIE:.0f} % a plan is chosen that needs no more memory than plans have run with"
    return f"within {100 * TIE:.0f} % the simplest plan is chosen: fewest axes, virtual stages and special settings"
