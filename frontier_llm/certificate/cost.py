"""Cost: jobs, node-hours, days and the budget of a run."""

from __future__ import annotations

from collections.abc import Iterator

from frontier_llm.certificate.section import Section, judged
from frontier_llm.certificate.subject import Subject
from frontier_llm.cluster.admission import Cost, synthetic_problems
from frontier_llm.cluster.submit import JobRequest, job_problems
from frontier_llm.errors import Problem
from frontier_llm.planner.predict import START_S

NAME = "cost"


def check_cost(subject: Subject) -> Section:
    """Refuse a job that the site or Slurm would refuse, and a budget that ends before the first step."""
    cost = subject.cost
    request = subject.request
    band = subject.predicted.band
    budget = None if request is None else request.job.max_node_hours
    evidence = [
        f"a step takes about {cost.step_s:.3g} s on {subject.config.machine} (predicted, within {100 * band:.0f} %)",
        *(line.removeprefix("cost: ") for line in cost.describe(budget).splitlines()),
        f"{cost.days:,.1f} days of training and starts, without the time in the queue",
    ]
    problems: list[Problem] = []
    if request is not None:
        problems += job_problems(request)
        problems += synthetic_problems(subject.config, cost)
        problems += _budget_problems(request, cost)
    return judged(NAME, evidence, problems)


def _budget_problems(request: JobRequest, cost: Cost) -> Iterator[Problem]:
    """Yield a problem if the budget does not suffice for one step. The job saves a warning time before its end."""
    budget = request.job.max_node_hours
    least = (START_S + cost.step_s + cost.warning_s) / 3600 * cost.nodes
    if budget is not None and cost.steps and budget < least:
        what = f"{budget:g} node-hours are too few: the start, one step and a save take about {least:,.1f} (predicted)"
        yield Problem("--max-node-hours", what, f"--max-node-hours {2 * least:.0f} or more")
