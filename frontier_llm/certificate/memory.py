"""Sections "memory" and "cost", from the planner's predictions: memory of each stage by purpose, free memory, jobs,
node-hours, budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from frontier_llm.certificate.section import CertificateSection, judged
from frontier_llm.certificate.subject import Subject, of_job
from frontier_llm.cluster.admission import admit, cost_problems
from frontier_llm.cluster.submit import JobRequest
from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.emit import FULL_SHARE, plan_overrides, roomier_plan
from frontier_llm.planner.report import layout_words
from frontier_llm.planner.search import Plan, memory_summary
from frontier_llm.units import GIB, format_days

NAME = "memory"
COST = "cost"
LEAST_GIB = 0.05  # smaller parts of a stage's memory are not listed


def check_memory(subject: Subject) -> CertificateSection:
    """Refuse a run whose predicted memory exceeds the device's memory."""
    plan = subject.fullest_plan
    fullest, _ = memory_summary(plan)
    shown = sorted({0, fullest, len(plan.memory) - 1})
    limit = plan.limit_bytes / GIB
    peak = plan.peak_bytes / GIB
    evidence = [
        f"{peak:.1f} of {limit:.0f} GiB on the fullest stage ({fullest}), {limit - peak:.1f} GiB left (predicted)"
    ]
    evidence += [_stage_words(plan, stage) for stage in shown]
    if plan.peak_bytes > FULL_SHARE * plan.limit_bytes:
        evidence += _roomier(subject, plan)
    return judged(NAME, evidence, subject.predicted.memory_problems())


def _stage_words(plan: Plan, stage: int) -> str:
    lines = plan.memory[stage]
    parts = [f"{name} {size / GIB:.1f}" for name, size in lines.items() if size >= LEAST_GIB * GIB]
    return f"stage {stage}: {sum(lines.values()) / GIB:.1f} GiB = {' + '.join(parts)}"


def _roomier(subject: Subject, plan: Plan) -> Iterator[str]:
    """Yield a line about the fastest layout that needs less memory."""
    nodes = subject.nodes_of_ranks
    best = roomier_plan(subject.config, nodes, max(nodes, subject.world_size), plan)
    if best is None:
        yield "no layout on these nodes leaves more room"
        return
    yield (
        f"a layout with more room: {layout_words(best)}: {best.peak_bytes / GIB:.1f} GiB, "
        f"{100 * (best.step_s / plan.step_s - 1):+.1f} % time"
    )


def check_cost(subject: Subject) -> CertificateSection:
    """Refuse a job that the site or Slurm would refuse, and a budget that ends before the first step."""
    cost = subject.cost
    request = subject.request
    band = subject.predicted.band
    budget = None if request is None else request.job.max_node_hours
    evidence = [
        f"a step takes about {cost.step_s:.3g} s on {subject.config.machine} (predicted, within {100 * band:.0f} %)",
        *(line.removeprefix("cost: ") for line in cost.describe(budget).splitlines()),
        f"{format_days(cost.days)} of training and starts, without the time in the queue",
    ]
    return judged(COST, evidence, () if request is None else cost_problems(request))


def with_fallback(
    request: JobRequest, load: Callable[[Sequence[str]], RunConfig]
) -> tuple[JobRequest, JobRequest, Plan]:
    """Return (the request whose job has both plans, the request with the roomier layout, the roomier plan).

    The roomier plan has the fastest layout that needs less memory than the run's own plan. `load` returns the run's
    configuration with further overrides. Raises ConfigError if there is no such layout, or if this layout is refused.
    """
    subject = of_job(request)
    own = subject.fullest_plan
    roomier = roomier_plan(request.config, request.job.nodes, subject.world_size, own)
    if roomier is None:
        what = (
            f"no layout on these nodes needs clearly less memory than the {own.peak_bytes / GIB:.1f} GiB of the run's "
            "own layout"
        )
        raise ConfigError(
            what, "use more nodes, set train.recompute=full, or submit without --fallback-plan", "--fallback-plan"
        )
    plans = plan_overrides(request.config, roomier)
    fallback = admit(replace(request, config=load(plans[1])))
    warning_s = max(request.job.warning_s, fallback.job.warning_s)
    job = replace(request.job, plans=plans, warning_s=warning_s)
    return replace(request, job=job), replace(fallback, job=job), roomier


def describe_fallback(own: Plan, roomier: Plan) -> str:
    """Return a line about the roomier plan for the user."""
    return (
        f"if the run is out of memory: {layout_words(roomier)}: {roomier.peak_bytes / GIB:.1f} instead of "
        f"{own.peak_bytes / GIB:.1f} GiB, {100 * (roomier.step_s / own.step_s - 1):+.1f} % time (predicted)"
    )
