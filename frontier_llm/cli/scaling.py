"""frontier-llm scaling weak|strong|report: make a series, queue it, harvest it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import add_job, add_json, examples, positive

if TYPE_CHECKING:
    from frontier_llm.cluster.sites import Site
    from frontier_llm.config import RunConfig
    from frontier_llm.scaling.series import Point


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "scaling",
        help="weak and strong scaling experiments",
        description="Make a series of runs that differ only in nodes, queue it, harvest it into a table and figures.",
        epilog=examples(
            "frontier-llm scaling weak --model gpt-175b --nodes 16,32 --site frontier -A ABC1",
            "frontier-llm scaling strong --model gpt-1t --nodes 64,384 --site lumi --simulate",
            "frontier-llm scaling report runs/scaling",
        ),
    )
    inner = parser.add_subparsers(dest="what", required=True, metavar="ACTION")
    for mode, text in (("weak", "the global batch grows with data parallelism"), ("strong", "the global batch stays")):
        _add_series(
            inner.add_parser(mode, help=f"make and queue a {mode} series: {text}", description=f"Make and queue a {mode} series: {text}.")
        )
    line = "harvest run directories into a table and figures"
    report = inner.add_parser(
        "report", help=line, description=f"{line[0].upper()}{line[1:]}: CSV, JSON, PNG and a self-contained HTML page."
    )
    report.add_argument("directory", metavar="DIR", help="holds the points, at any depth")
    report.add_argument("--output", metavar="DIR", help="where to write (default: the same directory)")
    add_json(report)


def _add_series(parser: argparse.ArgumentParser) -> None:
    """Arguments of weak and strong."""
    weak = parser.prog.endswith("weak")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--model", help="one with a shipped training run, e.g. gpt-175b")
    chosen.add_argument("--run", metavar="RUN", help="run file, or the name of one in configs/runs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to every point, e.g. train.steps=50")
    parser.add_argument("--nodes", required=True, metavar="N,N,…", help="node counts, e.g. 16,32,64,128")
    parser.add_argument("--site", required=True, help="frontier, lumi, generic, local, or the path of a site file")
    batch = "--batch-per-replica" if weak else "--global-batch"
    parser.add_argument(batch, dest="batch", type=positive, metavar="N", help="in sequences (default: ORNL's for that model)")
    parser.add_argument("--repeats", type=positive, default=1, metavar="N", help="runs of each point; from 2 on with a confidence interval")
    parser.add_argument("--output", metavar="DIR", help="directory of the series (default: runs/scaling)")
    add_job(parser)
    parser.add_argument("--time", metavar="H:MM:SS", help="walltime of each point (default: its predicted time, within the site's bin)")
    parser.add_argument("--simulate", action="store_true", help="run nothing: the planner's throughput, marked as simulated")
    parser.add_argument("--dry-run", action="store_true", help="show the points, write and queue nothing")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0; a report over failed points is 1."""
    return _report(args) if args.what == "report" else _series(args)


def _series(args: argparse.Namespace) -> int:
    from frontier_llm import log
    from frontier_llm.cluster.sites import load_site
    from frontier_llm.config import load_run
    from frontier_llm.errors import ConfigError
    from frontier_llm.scaling.series import as_dict, default_batch, find_run, make_series

    overrides = ["train.save_interval=0", "train.tensorboard=false", *args.overrides]
    config = load_run(args.run or find_run(args.model), overrides)
    site = load_site(args.site)
    try:
        nodes = [int(count) for count in args.nodes.split(",")]
    except ValueError:
        raise ConfigError(f"{args.nodes!r} is not a list of numbers", "write e.g. 16,32,64", "--nodes") from None
    root = Path(args.output or "runs/scaling").resolve()
    points = make_series(args.what, config, site, nodes, args.batch or default_batch(args.what, config), root, args.repeats)
    if args.simulate:
        return _simulate(args, points, site, root)
    queued = _submit(args, points, site, config)
    if args.json:
        print(json.dumps([{**as_dict(point), "minutes": minutes, "job_id": job_id} for point, minutes, job_id in queued], indent=1))
    else:
        print(_queue_table(queued))
    if args.dry_run:
        log.info("dry run: nothing is written or queued")
    else:
        log.info(f"when they have run: frontier-llm scaling report {root}")
    return 0


def _queue_table(queued: list[tuple[Point, int | None, str | None]]) -> str:
    """The points of a series with their jobs."""
    from frontier_llm.cluster.sites import format_walltime

    lines = [f"{'nodes':>6} {'devices':>8} {'batch':>7} {'steps':>6} {'repeat':>7} {'walltime':>11}  job"]
    for point, minutes, job_id in queued:
        walltime = format_walltime(minutes) if minutes else "-"
        config = point.config
        row = f"{point.nodes:>6} {point.devices:>8} {config.batch.global_batch:>7} {config.train.steps:>6} {point.repeat:>7}"
        lines.append(f"{row} {walltime:>11}  {job_id or '-'}")
    return "\n".join(lines)


def _submit(args: argparse.Namespace, points: list[Point], site: Site, config: RunConfig) -> list[tuple[Point, int | None, str | None]]:
    """(point, minutes of walltime, job id) for each point; the id is None in a dry run."""
    from frontier_llm.cluster import submit
    from frontier_llm.cluster.sites import parse_walltime
    from frontier_llm.errors import ConfigError
    from frontier_llm.scaling.series import announce, submission_problems
    from frontier_llm.scaling.walltime import with_walltime

    account = args.account or submit.default_account()
    minutes = parse_walltime(args.time) if args.time else None
    if problems := submission_problems(points, site, account, args.partition, minutes):
        raise ConfigError(problems)
    steps = config.train.steps if any(word.startswith("train.steps=") for word in args.overrides) else None
    timed = with_walltime(points, site, args.partition, minutes, steps)
    requests = [
        submit.Request(
            config=point.config,
            site=site,
            nodes=point.nodes,
            account=account,
            partition=args.partition,
            minutes=own_minutes,
            continue_with="never",
            saves=False,
            name=f"{point.mode}-{point.nodes}",
        )
        for point, own_minutes in timed
    ]
    for request in requests:
        submit.prepare(request)  # all of them are legal before the first is queued
    if args.dry_run:
        return [(point, own_minutes, None) for point, own_minutes in timed]
    queued: list[tuple[Point, int | None, str | None]] = []
    for (point, own_minutes), request in zip(timed, requests, strict=True):
        announce(point)
        queued.append((point, own_minutes, submit.submit(request).job_id))
    return queued


def _simulate(args: argparse.Namespace, points: list[Point], site: Site, root: Path) -> int:
    from frontier_llm import log
    from frontier_llm.scaling.figure import write_report
    from frontier_llm.scaling.harvest import as_json, as_text
    from frontier_llm.scaling.simulate import simulated_rows

    rows = simulated_rows(points, site.machine)
    print(as_json(rows) if args.json else as_text(rows))
    if not args.dry_run:
        paths = write_report(rows, root / f"simulated_{points[0].mode}_{points[0].config.model.name}")
        log.info(f"wrote {', '.join(str(path) for path in paths)}")
    return 0


def _report(args: argparse.Namespace) -> int:
    from frontier_llm import log
    from frontier_llm.scaling.figure import write_report
    from frontier_llm.scaling.harvest import as_json, as_text, harvest

    rows = harvest(Path(args.directory))
    paths = write_report(rows, Path(args.output or args.directory))
    print(as_json(rows) if args.json else as_text(rows))
    log.info(f"wrote {', '.join(str(path) for path in paths)}")
    return 0 if all(row.status == "ok" for row in rows) else 1
