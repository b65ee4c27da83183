"""Options that describe the job of a run at a site, and a function that makes the job from them. The commands that
check or queue a job use both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from frontier_llm.cli.arguments import JOB, natural, option, positive_amount

if TYPE_CHECKING:
    from frontier_llm.cluster.sites import Site
    from frontier_llm.cluster.submit import JobRequest
    from frontier_llm.config import RunConfig

RUN_JOB = (
    option(
        "--spares",
        type=natural,
        default=0,
        metavar="N",
        help="additional nodes, which replace nodes that fail (default: 0)",
    ),
    *JOB,
    option("--time", metavar="H:MM:SS", help="walltime of one slice (default: predicted, at most the site's)"),
    option(
        "--max-node-hours",
        type=positive_amount,
        metavar="H",
        help="save and end the run when all its jobs together have used this number of node-hours",
    ),
)


def load_current(run: str, words: Sequence[str]) -> RunConfig:
    """Return the configuration that a job would use now: with the run directory's changes and a known precision."""
    from frontier_llm.data.recorded import as_it_stands
    from frontier_llm.machine.precision import load_resolved

    return as_it_stands(load_resolved(run, words))


def job_request(
    args: argparse.Namespace,
    site: Site,
    config: RunConfig,
    *,
    continuation: str | None = None,
    of_job: dict[str, Any] | None = None,
    **of_request: Any,
) -> JobRequest:
    """Return the job that the options RUN_JOB and `--nodes` describe.

    `of_job` has further fields of `Job`, and `of_request` further fields of `JobRequest`.
    """
    from frontier_llm.cluster import submit
    from frontier_llm.cluster.batch import default_continuation
    from frontier_llm.cluster.sites import parse_walltime

    job = submit.wanted_job(
        config,
        site,
        args.nodes,
        spares=args.spares,
        continuation=continuation or default_continuation(config),
        max_node_hours=args.max_node_hours,
        **(of_job or {}),
    )
    return submit.JobRequest(
        job=job,
        config=config,
        site=site,
        account=args.account or submit.default_account(),
        partition=args.partition,
        minutes=parse_walltime(args.time) if args.time else None,
        **of_request,
    )
