"""The two plans of a job: the run's own layout, and a roomier one for a run that is out of memory.

`submit --fallback-plan` makes and checks both. The supervisor changes to the roomier plan at most once
(cluster/decide.py). Global batch, order of samples and number of steps stay those of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from frontier_llm.certificate.subject import of_job
from frontier_llm.cluster.admission import admit
from frontier_llm.cluster.submit import JobRequest
from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError
from frontier_llm.planner.report import layout_words
from frontier_llm.planner.roomier import plan_overrides, roomier_plan
from frontier_llm.planner.search import Plan
from frontier_llm.units import GIB


def with_fallback(
    request: JobRequest, load: Callable[[Sequence[str]], RunConfig]
) -> tuple[JobRequest, JobRequest, Plan]:
    """Return (the request whose job has both plans, the request with the roomier layout, the roomier plan).

    `load` returns the run's configuration with further overrides. Raises ConfigError if no layout leaves more room, or
    if the roomier layout is refused.
    """
    subject = of_job(request)
    own = subject.fullest_plan
    roomier = roomier_plan(request.config, request.job.nodes, subject.world_size, own)
    if roomier is None:
        what = f"no layout on these nodes needs clearly less than the {own.peak_bytes / GIB:.1f} GiB of the run's own"
        raise ConfigError(what, "use more nodes, set train.recompute=full, or submit without it", "--fallback-plan")
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
