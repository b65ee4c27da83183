"""frontier-llm scaling weak|strong|report: make a series, queue it, harvest it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frontier_llm.cluster.sites import Site
    from frontier_llm.scaling.series import Point


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = subparsers.add_parser("scaling", help="weak and strong scaling experiments")
    inner = parser.add_subparsers(dest="what", required=True)
    for mode, text in (("weak", "the global batch grows with data parallelism"), ("strong", "the global batch stays")):
        series = inner.add_parser(mode, help=f"make and queue a {mode} series: {text}")
        series.add_argument("overrides", nargs="*", metavar="key=value", help="for every point, e.g. train.steps=50")
        chosen = series.add_mutually_exclusive_group(required=True)
        chosen.add_argument("--model", help="a model with a shipped training run, e.g. gpt-175b")
        chosen.add_argument("--run", help="a run file")
        series.add_argument("--nodes", required=True, help="node counts, e.g. 16,32,64,128")
        series.add_argument("--site", required=True, help="frontier, lumi, generic, local, or the path of a site file")
        series.add_argument("--batch-per-replica" if mode == "weak" else "--global-batch", dest="batch", type=int, help="default: ORNL's")
        series.add_argument("--repeats", type=int, default=1, help="runs of each point; three or more give a confidence interval")
        series.add_argument("--out", default=None, help="directory of the series; default runs/scaling")
        series.add_argument("-A", "--account", help="project to charge")
        series.add_argument("--partition", help="default: the site's")
        series.add_argument("--time", default="1:00:00", help="walltime of each point")
        series.add_argument("--simulate", action="store_true", help="run nothing: the planner's throughput, marked as simulated")
        series.add_argument("--dry-run", action="store_true", help="show the points, write and queue nothing")
        series.add_argument("--json", action="store_true", help="machine-readable result on stdout")
    report = inner.add_parser("report", help="harvest run directories into a table and figures")
    report.add_argument("runs", help="directory that holds the points")
    report.add_argument("--out", help="where to write; default: the same directory")
    report.add_argument("--json", action="store_true", help="the table as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; a report over failed points is 1."""
    return _report(args) if args.what == "report" else _series(args)


def _series(args: argparse.Namespace) -> int:
    from frontier_llm import log
    from frontier_llm.cluster.sites import load_site
    from frontier_llm.config import load_run
    from frontier_llm.errors import ConfigError
    from frontier_llm.scaling.series import as_dict, default_batch, find_run, make_series

    overrides = ["train.steps=20", "train.save_interval=0", "train.tensorboard=false", *args.overrides]
    config = load_run(args.run or find_run(args.model), overrides)
    site = load_site(args.site)
    try:
        nodes = [int(count) for count in args.nodes.split(",")]
    except ValueError:
        raise ConfigError(f"{args.nodes!r} is not a list of numbers", "write e.g. 16,32,64", "--nodes") from None
    root = Path(args.out or "runs/scaling").resolve()
    points = make_series(args.what, config, site, nodes, args.batch or default_batch(args.what, config), root, args.repeats)
    if args.simulate:
        return _simulate(args, points, site, root)
    queued = _submit(args, points, site)
    for point, job_id in zip(points, queued, strict=True):
        log.info(
            f"{point.nodes} nodes, {point.devices} devices, batch {point.config.batch.global_batch}, repeat {point.repeat}: {job_id or 'not queued'}"
        )
    if args.json:
        print(json.dumps([{**as_dict(point), "job_id": job_id} for point, job_id in zip(points, queued, strict=True)], indent=1))
    elif not args.dry_run:
        log.info(f"when they have run: frontier-llm scaling report {root}")
    return 0


def _submit(args: argparse.Namespace, points: list[Point], site: Site) -> list[str | None]:
    from frontier_llm.cluster import submit
    from frontier_llm.cluster.sites import parse_walltime
    from frontier_llm.errors import ConfigError
    from frontier_llm.scaling.series import announce, submission_problems

    account = args.account or submit.default_account()
    minutes = parse_walltime(args.time)
    if problems := submission_problems(points, site, account, args.partition, minutes):
        raise ConfigError(problems)
    requests = [
        submit.Request(
            config=point.config,
            site=site,
            nodes=point.nodes,
            account=account,
            partition=args.partition,
            minutes=minutes,
            continue_with="never",
            name=f"{point.mode}-{point.nodes}",
        )
        for point in points
    ]
    for request in requests:
        submit.prepare(request)  # all of them are legal before the first is queued
    if args.dry_run:
        return [None] * len(points)
    queued: list[str | None] = []
    for point, request in zip(points, requests, strict=True):
        announce(point)
        queued.append(submit.submit(request).job_id)
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

    rows = harvest(Path(args.runs))
    paths = write_report(rows, Path(args.out or args.runs))
    print(as_json(rows) if args.json else as_text(rows))
    log.info(f"wrote {', '.join(str(path) for path in paths)}")
    return 0 if all(row.status == "ok" for row in rows) else 1
