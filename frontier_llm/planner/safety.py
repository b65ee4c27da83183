"""What it costs a plan that only one communication of a rank may be in flight (comm.in_flight), where the machine
file wants it so.
"""

from __future__ import annotations

from dataclasses import replace

from frontier_llm.machine import Machine, Rates
from frontier_llm.planner.pipeline import play
from frontier_llm.planner.search import Plan


def cost_of_one(plan: Plan, rates: Rates) -> float | None:
    """Share by which the step is longer than with many in flight, both simulated; None where many are, or nothing
    could be.
    """
    if not rates.one_in_flight or plan.layout.devices == 1:
        return None
    many = play(plan.model, plan.layout, replace(rates, one_in_flight=False), plan.stages)
    return plan.step_s / many.step_s - 1


def safety_words(plan: Plan, machine: Machine, rates: Rates) -> list[str]:
    """A line for the report."""
    cost = cost_of_one(plan, rates)
    if cost is None:
        return []
    why = f"{machine.in_flight.tag}: {machine.in_flight.source}"
    return [f"  one communication in flight (comm.in_flight) costs {100 * cost:.1f} % of this step, in messages; {why}"]
