"""frontier-llm submit RUN --site SITE --nodes N [key=value …]: check everything, freeze the code, queue one job."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frontier_llm.cluster.submit import Request
    from frontier_llm.errors import Problem


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "submit",
        help="queue a run on a Slurm site",
        description="Queue a run. The job saves before its walltime and continues by itself until train.steps, a file STOP in the run "
        "directory, or three attempts without progress. Hosts that failed before are excluded.",
    )
    parser.add_argument("run", help="a run file, or the name of one in configs/runs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. train.steps=100")
    parser.add_argument("--site", required=True, help="frontier, lumi, generic, local, or the path of a site file")
    parser.add_argument("--nodes", type=int, required=True, help="nodes that compute")
    parser.add_argument("--spares", type=int, default=0, help="nodes kept in the allocation to replace dead ones")
    parser.add_argument("-A", "--account", help="project to charge")
    parser.add_argument("--partition", help="default: the site's")
    parser.add_argument("--qos", help="e.g. debug")
    parser.add_argument("--time", help="walltime of one slice; default: the longest of the site's bin")
    parser.add_argument(
        "--continue-with", choices=("requeue", "successor", "never"), default="requeue", help="what follows an unfinished slice"
    )
    parser.add_argument("--dependency", help="as sbatch's")
    parser.add_argument("--exclude", help="hosts to avoid, e.g. n[3,7-8]")
    parser.add_argument("--dry-run", action="store_true", help="show the script and the command, write and queue nothing")
    parser.add_argument("--json", action="store_true", help="machine-readable result on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when the job is queued (or the dry run is legal)."""
    from frontier_llm import log
    from frontier_llm.cluster import submit as submission
    from frontier_llm.cluster.sites import load_site, parse_walltime
    from frontier_llm.config import load_run
    from frontier_llm.errors import ConfigError

    site = load_site(args.site)
    request = submission.Request(
        config=load_run(args.run, [f"machine={site.machine}", *args.overrides]),
        site=site,
        nodes=args.nodes,
        spares=args.spares,
        account=args.account or submission.default_account(),
        partition=args.partition,
        qos=args.qos,
        minutes=parse_walltime(args.time) if args.time else None,
        continue_with=args.continue_with,
        dependency=args.dependency,
        exclude=submission.parse_hosts(args.exclude),
    )
    if found := [*submission.problems(request), *_memory_problems(request)]:
        raise ConfigError(found)
    made = submission.prepare(request) if args.dry_run else submission.submit(request)
    log.info(submission.describe(request, made))
    if args.json:
        print(json.dumps(made.as_dict(), indent=1))
    else:
        print(made.script if args.dry_run else made.job_id)
    return 0


def _memory_problems(request: Request) -> list[Problem]:
    """The planner's verdict on a layout that is legal at all."""
    from frontier_llm.scaling.predict import memory_problems
    from frontier_llm.topology import plan_problems

    devices = request.nodes * request.site.tasks_per_node
    return (
        []
        if request.nodes < 1 or plan_problems(request.config, devices)
        else memory_problems(request.config, devices, request.site.machine)
    )
