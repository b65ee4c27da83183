"""The run that a certificate describes, with the facts that several sections use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from frontier_llm.cluster.admission import Cost, cost_of
from frontier_llm.cluster.readiness import why_not_here
from frontier_llm.cluster.submit import JobRequest, whole_node_problems
from frontier_llm.config import RunConfig, phases_of
from frontier_llm.data.position import START, Position
from frontier_llm.data.recorded import recorded_position
from frontier_llm.errors import Problem
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.machine.schema import Machine
from frontier_llm.planner.predict import LOCAL_START_S, PointPrediction, plans_of, predict
from frontier_llm.planner.search import Plan
from frontier_llm.run import run_dir
from frontier_llm.topology.plan import ParallelPlan, layout_problems, plan_as_given


@dataclass(frozen=True)
class Subject:
    """A run on `world_size` ranks.

    `request` is its job on a site. None means ranks on this computer, without Slurm. `elsewhere` is the reason why this
    computer cannot examine the run's files and installation; '' if it can.
    """

    config: RunConfig
    world_size: int
    request: JobRequest | None = None
    elsewhere: str = ""
    position: Position = START  # position in the data at the newest checkpoint
    allowed_changes: tuple[str, ...] = ()  # keys whose values may differ from the newest checkpoint

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.config.train.run_dir)

    @cached_property
    def layout_problems(self) -> tuple[Problem, ...]:
        """The rules that the layout violates. Sections that need a layout are only checked if there are none."""
        if self.request is not None and (problems := tuple(whole_node_problems(self.request))):
            return problems
        return tuple(layout_problems(self.config, self.world_size))

    @cached_property
    def plan(self) -> ParallelPlan:
        """The layout of the first phase. It exists only if `layout_problems` is empty."""
        return plan_as_given(phases_of(self.config)[0].config, self.world_size)

    @property
    def machine(self) -> Machine:
        """The machine file of the run."""
        return load_machine(self.config.machine)

    @property
    def rates(self) -> Rates:
        """The planner's numbers of the machine."""
        return rates(self.machine)

    @cached_property
    def predicted(self) -> PointPrediction:
        """The planner's prediction of the run."""
        return predict(self.config, self.world_size)

    @cached_property
    def fullest_plan(self) -> Plan:
        """The planner's simulation of the phase that needs the most memory."""
        return max(plans_of(self.config, self.world_size), key=lambda plan: plan.peak_bytes)

    @property
    def nodes_of_ranks(self) -> int:
        """Nodes on which the ranks run, without spares."""
        if self.request is not None:
            return self.request.job.nodes
        return -(-self.world_size // self.machine.devices_per_node)

    @cached_property
    def cost(self) -> Cost:
        """The predicted cost of the remaining steps of the run."""
        if self.request is not None:
            return cost_of(self.request)
        return Cost(
            config=self.config,
            directory=self.directory,
            done=run_dir.latest_step(self.directory),
            step_s=self.predicted.step_time_s,
            nodes=self.nodes_of_ranks,
            slice_hours=None,
            warning_s=0.0,
            chained=False,
            start_s=LOCAL_START_S,
        )


def of_job(request: JobRequest) -> Subject:
    """Return the run of a job."""
    directory = request.job.directory
    return Subject(
        config=request.config,
        world_size=request.job.nodes * request.tasks_per_node,
        request=request,
        elsewhere=why_not_here(request.site).removeprefix("not checkable here: "),
        position=recorded_position(directory) or START,
    )
