"""Prediction of one run configuration: the simulated step, its throughput and its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from frontier_llm.config import RunConfig, phases_of, planned_tokens
from frontier_llm.errors import Problem
from frontier_llm.machine.load import load_machine, own_stack, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.breakdown import breakdown
from frontier_llm.planner.costs.memory import memory_by_rank
from frontier_llm.planner.operations import Campaign, campaign
from frontier_llm.planner.search import Plan, simulate_layout
from frontier_llm.planner.uncertainty import BANDS, basis
from frontier_llm.topology.expert_nodes import run_layout
from frontier_llm.topology.plan import split_layers
from frontier_llm.units import GIB

START_S = 600.0  # time from a job's start to its first step (assumed): environment, imports, rendezvous, weights
LOCAL_START_S = 30.0  # time from the start of ranks on this computer to their first step (assumed).
# Factor on the simulated step time for which walltimes are requested. For 175B on Frontier ORNL measured 48 tokens/s
# per GCD, and the planner predicts 63, which is 1.3 times more.
MARGIN = 1.5
WALLTIME_GRAIN_MINUTES = 5


def walltime_minutes(seconds: float) -> int:
    """Return a walltime of at least `seconds`, rounded up to WALLTIME_GRAIN_MINUTES."""
    return math.ceil(seconds / (60 * WALLTIME_GRAIN_MINUTES)) * WALLTIME_GRAIN_MINUTES


@dataclass(frozen=True)
class PointPrediction:
    """Predicted step time, throughput and memory of a run, simulated with the numbers of a machine file.

    For a run with phases, the step time is the mean over all steps, and `peak_bytes` is the maximum over the phases.
    """

    step_time_s: float
    tokens_per_s: float
    peak_bytes: float
    limit_bytes: float
    machine: str
    band: float  # relative half width of the prediction interval: its upper end is 1 + band times the prediction

    @property
    def cautious_step_s(self) -> float:
        """Step time for which walltime is requested: the band's slow end, or MARGIN times the prediction if longer."""
        return self.step_time_s * max(1 + self.band, MARGIN)

    def job_s(self, steps: int) -> float:
        """Return the seconds for which a job of `steps` steps requests walltime, including its start."""
        return START_S + steps * self.cautious_step_s

    def steps_within(self, seconds: float) -> int:
        """Return the number of steps whose `job_s` is at most `seconds`."""
        return max(0, int((seconds - START_S) / self.cautious_step_s))

    def memory_problems(self) -> list[Problem]:
        """Return a Problem if the predicted memory exceeds the device's memory."""
        if self.peak_bytes <= self.limit_bytes:
            return []
        what = (
            f"about {self.peak_bytes / GIB:.1f} GiB per device are needed, but a run can use only "
            f"{self.limit_bytes / GIB:.1f} on {self.machine!r}"
        )
        fix = (
            "find a layout that fits with frontier-llm plan, raise parallel.pipeline or parallel.tensor, or set "
            "train.recompute=full"
        )
        return [Problem(where="memory", what=what, fix=fix)]


def predict(config: RunConfig, devices: int, machine: str | None = None) -> PointPrediction:
    """Return the planner's prediction of a legal layout. Raises FrontierError for an unknown machine."""
    machine = machine or config.machine
    described = load_machine(machine)
    numbers = rates(described)
    phases = phases_of(config)
    plans = plans_of(config, devices, machine)
    fullest = max(plans, key=lambda plan: plan.peak_bytes)
    seconds = sum(phase.steps * plan.step_s for phase, plan in zip(phases, plans, strict=True))
    tokens = planned_tokens(phases)
    return PointPrediction(
        step_time_s=seconds / phases[-1].end,
        tokens_per_s=tokens / seconds,
        peak_bytes=fullest.peak_bytes,
        limit_bytes=fullest.limit_bytes,
        machine=machine,
        band=BANDS[basis(described, own_stack(described), breakdown(fullest, numbers))],
    )


def plans_of(config: RunConfig, devices: int, machine: str | None = None) -> list[Plan]:
    """Return the simulated plan of each phase of a run with a legal layout."""
    numbers = rates(load_machine(machine or config.machine))
    return [_simulated(phase.config, devices, numbers) for phase in phases_of(config)]


def stage_bytes(config: RunConfig, devices: int) -> tuple[float, ...]:
    """Return the predicted bytes of a device of each pipeline stage, without a simulation.

    `config` is a run without phases, or one phase of a run.
    """
    numbers = rates(load_machine(config.machine))
    layout = run_layout(config, devices, numbers)
    stages = split_layers(config.model, layout.pp * layout.chunks, config.parallel.stage_layers)
    return tuple(sum(lines.values()) for lines in memory_by_rank(config.model, layout, numbers, stages))


def planned_saves(config: RunConfig, devices: int, machine: str | None = None) -> Campaign | None:
    """Return the planner's campaign of a run: among others the seconds of a save and the best save interval in steps.

    A run with phases has the values of its last phase. Returns None if the machine file has no operations data. Raises
    FrontierError for an unknown machine.
    """
    numbers = load_machine(machine or config.machine)
    last = phases_of(config)[-1]
    return campaign(numbers, _simulated(last.config, devices, rates(numbers)), tokens=None)


def _simulated(config: RunConfig, devices: int, numbers: Rates) -> Plan:
    return simulate_layout(config.model, run_layout(config, devices, numbers), numbers, config.parallel.stage_layers)
