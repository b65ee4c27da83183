"""What the planner says about a point: the simulated step, its throughput and its memory."""

from __future__ import annotations

from dataclasses import dataclass

from frontier_llm.config import RunConfig, phases_of, planned_tokens
from frontier_llm.errors import Problem
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.operations import Campaign, campaign
from frontier_llm.planner.search import Plan, simulate_layout
from frontier_llm.topology.expert_nodes import run_layout
from frontier_llm.units import GIB

START_S = 600.0  # of a job, until its first step: environment, imports, rendezvous, weights (assumed)


@dataclass(frozen=True)
class PointPrediction:
    """One point, simulated on a machine file; never a measurement. Of a run with phases: its mean step, and its
    fullest phase's memory.
    """

    step_time_s: float
    tokens_per_s: float
    peak_bytes: float
    limit_bytes: float
    machine: str

    def memory_problems(self) -> list[Problem]:
        """A problem when the predicted memory exceeds the device's."""
        if self.peak_bytes <= self.limit_bytes:
            return []
        what = (
            f"about {self.peak_bytes / GIB:.1f} GiB per device, of {self.limit_bytes / GIB:.1f} that a run can "
            f"have on {self.machine!r}"
        )
        fix = (
            "frontier-llm plan finds layouts that fit; or raise parallel.pipeline or tensor, or set "
            "train.recompute=full"
        )
        return [Problem(where="memory", what=what, fix=fix)]


def predict(config: RunConfig, devices: int, machine: str | None = None) -> PointPrediction:
    """The planner's prediction of a legal layout. Raises FrontierError for an unknown machine."""
    machine = machine or config.machine
    numbers = rates(load_machine(machine))
    phases = phases_of(config)
    plans = [_simulated(phase.config, devices, numbers) for phase in phases]
    fullest = max(plans, key=lambda plan: plan.peak_bytes)
    seconds = sum(phase.steps * plan.step_s for phase, plan in zip(phases, plans, strict=True))
    tokens = planned_tokens(phases)
    return PointPrediction(seconds / phases[-1].end, tokens / seconds, fullest.peak_bytes, fullest.limit_bytes, machine)


def planned_saves(config: RunConfig, devices: int, machine: str | None = None) -> Campaign | None:
    """The planner's campaign of a legal layout: how long a save takes and after how many steps one pays. None without
    operations data.

    Of a run with phases: as in its last one. Raises FrontierError for an unknown machine.
    """
    numbers = load_machine(machine or config.machine)
    last = phases_of(config)[-1]
    return campaign(numbers, _simulated(last.config, devices, rates(numbers)), tokens=None)


def _simulated(config: RunConfig, devices: int, numbers: Rates) -> Plan:
    return simulate_layout(config.model, run_layout(config, devices, numbers), numbers, config.parallel.stage_layers)
