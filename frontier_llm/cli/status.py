"""frontier-llm status [DIR …]: what runs, how far it is, when it ends, what has failed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from frontier_llm.cli.arguments import add_json, examples


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "status",
        help="what runs, how far it is, when it ends",
        description="Where runs stand, from their directories and Slurm: job, step, loss, speed, time left, last durable checkpoint, restarts.",
        epilog=examples("frontier-llm status", "frontier-llm status runs/train_1t --json", "frontier-llm status runs/scaling"),
    )
    parser.add_argument("run_dirs", nargs="*", metavar="DIR", help="a run, or a directory that holds runs at any depth (default: runs/)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 when no run was found."""
    from frontier_llm import log
    from frontier_llm.cluster.status import find_runs, read_status, render

    given = [Path(word) for word in args.run_dirs]
    directories = [found for path in given for found in find_runs(path) or [path]] or find_runs()
    statuses = [read_status(directory) for directory in directories]
    if args.json:
        print(json.dumps([status.as_dict() for status in statuses], indent=1))
    elif statuses:
        print(render(statuses))
    else:
        log.info("no runs under runs/; give the path of a run directory")
    return 0 if statuses else 1
