"""frontier-llm status [DIR …]: state, progress, expected end and failures of runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from frontier_llm.cli.arguments import JSON, command, option, show


@command(
    option(
        "run_dirs",
        nargs="*",
        metavar="RUN_DIR",
        help="a run, shown in detail, or a directory that holds runs at any depth, one line each (default: runs/)",
    ),
    JSON,
    about="Show the state of runs, from their directories and Slurm: job, step, loss, speed, time left, last durable "
    "checkpoint, restarts.",
    examples=(
        "frontier-llm status",
        "frontier-llm status runs/train_1t --json",
        "frontier-llm status runs/scaling",
    ),
)
def status(args: argparse.Namespace) -> int:
    """Return exit code 0. 1 if no run was found, and 2 if a run could not be read."""
    from frontier_llm import log
    from frontier_llm.cluster.status import find_runs, read_statuses
    from frontier_llm.cluster.status_text import render, table
    from frontier_llm.errors import FrontierError

    given = [Path(word) for word in args.run_dirs]
    directories = [run for path in given for run in find_runs(path) or [path]] or find_runs()
    is_named = directories == given
    statuses, problems = read_statuses(directories)
    if statuses or args.json:
        show(args, [asdict(each) for each in statuses], lambda: render(statuses) if is_named else table(statuses))
        if not is_named and not args.json:
            log.info(f"details of one run: frontier-llm status {statuses[0].run_dir}")
    if problems:
        raise FrontierError(problems)
    if not statuses and not args.json:
        log.info("no runs under runs/; give the path of a run directory")
    return 0 if statuses else 1
