"""frontier-llm scaling weak|strong|report: make a series, queue it, harvest it."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import JOB, JSON, Command, command, one_of, option, positive, show

if TYPE_CHECKING:
    from frontier_llm.cluster.sites import Site
    from frontier_llm.config import RunConfig
    from frontier_llm.scaling.harvest import Row
    from frontier_llm.scaling.series import Mode, Point


def _series_command(mode: Mode, batch: str, line: str) -> Command:
    """`scaling weak` and `scaling strong`."""
    options = (
        one_of(
            option("--model", help="one with a shipped training run, e.g. gpt-175b"),
            option("--run", metavar="RUN", help="run file, or the name of one in configs/runs"),
        ),
        option("overrides", nargs="*", metavar="key=value", help="changes to every point, e.g. train.steps=50"),
        option("--nodes", required=True, metavar="N,N,…", help="node counts, e.g. 16,32,64,128"),
        option("--site", required=True, help="frontier, lumi, generic, local, or the path of a site file"),
        option(batch, dest="batch", type=positive, metavar="N", help="in sequences (default: ORNL's for that model)"),
        option("--repeats", type=positive, default=1, metavar="N", help="runs of each point; from 2 on with a confidence interval"),
        option("--output", metavar="DIR", help="directory of the series (default: runs/scaling)"),
        *JOB,
        option("--time", metavar="H:MM:SS", help="walltime of each point (default: its predicted time, within the site's bin)"),
        option("--simulate", action="store_true", help="run nothing: the planner's throughput, marked as simulated"),
        option("--dry-run", action="store_true", help="show the points, write and queue nothing"),
        JSON,
    )
    return Command(partial(_series, mode), options, line=f"make and queue a {mode} series: {line}")


def _series(mode: Mode, args: argparse.Namespace) -> int:
    from frontier_llm import log
    from frontier_llm.cluster.sites import load_site
    from frontier_llm.config import load_run
    from frontier_llm.errors import ConfigError
    from frontier_llm.scaling.series import default_batch, find_run, make_series

    overrides = ["train.save_interval=0", "train.save_final=false", "train.tensorboard=false", *args.overrides]
    config = load_run(args.run or find_run(args.model), overrides)
    site = load_site(args.site)
    try:
        nodes = [int(count) for count in args.nodes.split(",")]
    except ValueError:
        raise ConfigError(f"{args.nodes!r} is not a list of numbers", "write e.g. 16,32,64", "--nodes") from None
    root = Path(args.output or "runs/scaling").resolve()
    points = make_series(mode, config, site, nodes, args.batch or default_batch(mode, config), root, args.repeats)
    if args.simulate:
        return _simulate(args, points, site, root)
    queued = _submit(args, points, site, config)
    rows = [
        {**point.describe(), "run_dir": str(point.directory), "minutes": minutes, "job_id": job_id} for point, minutes, job_id in queued
    ]
    show(args, rows, lambda: _queue_table(queued))
    log.info("dry run: nothing is written or queued" if args.dry_run else f"when they have run: frontier-llm scaling report {root}")
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
    from frontier_llm import log
    from frontier_llm.cluster import submit
    from frontier_llm.cluster.sites import parse_walltime
    from frontier_llm.errors import ConfigError
    from frontier_llm.scaling.admission import admit, cost_of
    from frontier_llm.scaling.series import announce, submission_problems
    from frontier_llm.scaling.walltime import with_walltime
    from frontier_llm.units import plural

    account = args.account or submit.default_account()
    minutes = parse_walltime(args.time) if args.time else None
    if problems := submission_problems(points, site, account, args.partition, minutes):
        raise ConfigError(problems)
    steps = config.train.steps if any(word.startswith("train.steps=") for word in args.overrides) else None
    timed = with_walltime(points, site, args.partition, minutes, steps)
    requests = [
        submit.JobRequest(
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
    requests = [admit(request) for request in requests]  # all of them are legal before the first is queued
    costs = [cost_of(request) for request in requests]
    predicted, walltime = sum(cost.node_hours for cost in costs), sum((cost.slice_hours or 0) * cost.nodes for cost in costs)
    total = f"{plural(sum(cost.steps for cost in costs), 'step')} in {plural(len(costs), 'job')}"
    log.info(f"cost: {total}: {predicted:,.1f} node-hours (predicted), at most {walltime:,.1f} by their walltimes")
    if args.dry_run:
        return [(point, own_minutes, None) for point, own_minutes in timed]
    queued: list[tuple[Point, int | None, str | None]] = []
    for (point, own_minutes), request in zip(timed, requests, strict=True):
        announce(point)
        queued.append((point, own_minutes, submit.submit(request).job_id))
    return queued


def _print_rows(args: argparse.Namespace, rows: list[Row], paths: list[Path]) -> None:
    """The table, and which files hold it."""
    from frontier_llm import log
    from frontier_llm.scaling.harvest import as_json, as_text

    print(as_json(rows) if args.json else as_text(rows))
    if paths:
        log.info(f"wrote {', '.join(map(str, paths))}")


def _simulate(args: argparse.Namespace, points: list[Point], site: Site, root: Path) -> int:
    from frontier_llm.scaling.figure import write_report
    from frontier_llm.scaling.simulate import simulated_rows

    rows = simulated_rows(points, site.machine)
    directory = root / f"simulated_{points[0].mode}_{points[0].config.model.name}"
    _print_rows(args, rows, [] if args.dry_run else write_report(rows, directory))
    return 0


@command(
    option("directory", metavar="DIR", help="holds the points, at any depth"),
    option("--output", metavar="DIR", help="where to write (default: the same directory)"),
    JSON,
    line="harvest run directories into a table and figures",
    about="Harvest run directories into a table and figures: CSV, JSON and a self-contained HTML page.",
)
def _report(args: argparse.Namespace) -> int:
    from frontier_llm.scaling.figure import write_report
    from frontier_llm.scaling.harvest import harvest

    rows = harvest(Path(args.directory))
    _print_rows(args, rows, write_report(rows, Path(args.output or args.directory)))
    return 0 if all(row.status == "ok" for row in rows) else 1


scaling = Command(
    about="Make a series of runs that differ only in nodes, queue it, harvest it into a table and figures.",
    examples=(
        "frontier-llm scaling weak --model gpt-175b --nodes 16,32 --site frontier -A ABC1",
        "frontier-llm scaling strong --model gpt-1t --nodes 64,384 --site lumi --simulate",
        "frontier-llm scaling report runs/scaling",
    ),
    actions={
        "weak": _series_command("weak", "--batch-per-replica", "the global batch grows with data parallelism"),
        "strong": _series_command("strong", "--global-batch", "the global batch stays"),
        "report": _report,
    },
)
