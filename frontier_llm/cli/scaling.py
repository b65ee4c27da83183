"""frontier-llm scaling weak|strong|report: make a series of runs, queue it, and collect its results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import JOB, JSON, Command, Option, command, natural, one_of, option, positive, show
from frontier_llm.cli.settings import refuse_settings

if TYPE_CHECKING:
    from frontier_llm.cluster.sites import Site
    from frontier_llm.config import RunConfig
    from frontier_llm.experiments.scaling.forecast import Forecast
    from frontier_llm.experiments.scaling.harvest import Row
    from frontier_llm.experiments.scaling.launch import AllocationRanks
    from frontier_llm.experiments.scaling.series import Mode, Point


BATCH_PER_REPLICA = option(
    "--batch-per-replica",
    type=positive,
    metavar="N",
    help="sequences per step and replica (default: the value of ORNL's published runs of that model)",
)


def _series_command(mode: Mode, batch: Sequence[Option], line: str) -> Command:
    """Return the command `scaling weak` or `scaling strong`."""
    options = (
        one_of(
            option("--model", help="one with a shipped training run, e.g. gpt-175b"),
            option("--run", metavar="RUN", help="run file, or the name of one in configs/runs"),
        ),
        option(
            "overrides",
            nargs="*",
            metavar="key=value",
            help="changes to every point, e.g. train.steps=50",
        ),
        option(
            "--nodes",
            required=True,
            metavar="N,N,…",
            help="node counts, e.g. 16,32,64,128",
        ),
        option(
            "--site",
            help="a site (frontier-llm list sites), or the path of a site file (default: inside a job, its own)",
        ),
        *batch,
        option(
            "--repeats",
            type=positive,
            default=1,
            metavar="N",
            help="runs of each point; 2 or more give a confidence interval",
        ),
        option("--output", metavar="DIR", help="directory of the series (default: runs/scaling)"),
        *JOB,
        option(
            "--time",
            metavar="H:MM:SS",
            help="walltime of each point (default: its predicted time, within the site's bin)",
        ),
        option("--simulate", action="store_true", help="run nothing: the planner's throughput, marked as simulated"),
        option(
            "--dry-run",
            action="store_true",
            help="show each point's predicted step, efficiency, memory and node-hours; queue nothing",
        ),
        option(
            "--in-job",
            action="store_true",
            help="run the whole series now, inside this allocation: the smallest point first, then growing",
        ),
        option(
            "--side-by-side",
            action="store_true",
            help=(
                "with --in-job: run several points at the same time on disjoint nodes, if the allocation has enough "
                "nodes"
            ),
        ),
        option(
            "--spares",
            type=natural,
            default=0,
            metavar="N",
            help="with --in-job: nodes of the allocation that stay free and replace nodes that fail (default: 0)",
        ),
        option(
            "--preflight",
            action="store_true",
            help="with --in-job: `doctor` on every node of the allocation first",
        ),
        JSON,
    )
    start = f"frontier-llm scaling {mode} --model gpt-1t --nodes 64,384 --site lumi"
    return Command(
        work=partial(_series, mode),
        options=options,
        line=f"make and queue a {mode} series: {line}",
        examples=(f"{start} --dry-run", f"{start} --simulate"),
    )


def _series(mode: Mode, args: argparse.Namespace) -> int:
    from frontier_llm import log
    from frontier_llm.cluster.sites import load_site
    from frontier_llm.errors import ConfigError
    from frontier_llm.experiments.scaling.launch import BARE, open_tool_job
    from frontier_llm.experiments.scaling.series import find_run, make_series
    from frontier_llm.machine.precision import load_resolved

    for name in ("side_by_side", "spares", "preflight"):
        if getattr(args, name) and not args.in_job:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                "has an effect only inside a job",
                where=flag,
                fix=f"add --in-job, or omit {flag}",
            )
    if more := [word for word in args.overrides if word.isdecimal()]:
        typed = ",".join([args.nodes, *more])
        raise ConfigError(f"{more[0]} has no option", f"separate node counts by commas: --nodes {typed}", "--nodes")
    overrides = [*BARE, *args.overrides]
    run = args.run or find_run(args.model)
    root = Path(args.output or "runs/scaling").resolve()
    tool = open_tool_job(root, run, overrides, site=load_site(args.site), spares=args.spares) if args.in_job else None
    config = load_resolved(run, tool.overrides if tool else overrides)
    if args.site is None and tool is None:
        raise ConfigError("no site is given", "give the site of the nodes, e.g. --site frontier", "--site")
    site = tool.ranks.site if tool else load_site(args.site)
    try:
        nodes = [int(count) for count in args.nodes.split(",")]
    except ValueError:
        raise ConfigError(f"{args.nodes!r} is not a list of numbers", "write e.g. 16,32,64", "--nodes") from None
    points = make_series(
        mode=mode,
        config=config,
        site=site,
        nodes=nodes,
        batch=_batch(mode, args, config),
        root=root,
        repeats=args.repeats,
    )
    if args.simulate:
        return _simulate(args, points, root)
    if tool is not None:
        return _run_here(args, points, tool.ranks, tool.job.words, root)
    priced, jobs = _submit(args, points, site, config)
    _show_jobs(args, priced, jobs)
    _log_published(mode, config.model.name, [(row.point.devices, row.efficiency) for row in priced])
    log.info(
        "dry run: nothing is written or queued"
        if args.dry_run
        else f"after the runs: frontier-llm scaling report {root}"
    )
    return 0


def _show_jobs(args: argparse.Namespace, priced: Sequence[Forecast], jobs: Sequence[str | None]) -> None:
    """Print the points with their predictions and jobs."""
    from frontier_llm.experiments.scaling.forecast import as_text

    rows = [
        {
            **row.point.describe(),
            **row.describe(),
            "run_dir": str(row.point.directory),
            "job_id": job,
        }
        for row, job in zip(priced, jobs, strict=True)
    ]
    show(args, rows, lambda: as_text(priced, jobs))


def _to_run(priced: Sequence[Forecast]) -> list[Forecast]:
    """Return the points that still have to run. Raises ConfigError if a directory holds another point."""
    from frontier_llm import log
    from frontier_llm.experiments.scaling.harvest import is_measured
    from frontier_llm.experiments.scaling.series import refuse_other_runs
    from frontier_llm.units import plural

    refuse_other_runs([row.point for row in priced])
    left = [row for row in priced if not is_measured(row.point.directory)]
    if measured := len(priced) - len(left):
        log.info(
            f"{plural(measured, 'point')} of the series: already measured, not run again (or use another --output)"
        )
    return left


def _batch(mode: Mode, args: argparse.Namespace, config: RunConfig) -> int:
    """Return the batch per replica (weak scaling) or the global batch (strong scaling).

    The default is the published batch.
    """
    from frontier_llm.experiments.scaling.series import default_batch

    if mode == "weak":
        refuse_settings(args.overrides, lambda key: key == "batch.global_batch", "--batch-per-replica N")
        return args.batch_per_replica or default_batch(mode, config)
    if any(word.startswith("batch.global_batch=") for word in args.overrides):
        return config.batch.global_batch
    return default_batch(mode, config)


def _run_here(
    args: argparse.Namespace,
    points: list[Point],
    launcher: AllocationRanks,
    words: tuple[str, ...],
    root: Path,
) -> int:
    """Run the series with srun steps of this allocation (`--in-job`), and write its report."""
    from frontier_llm import log
    from frontier_llm.cli.checks import require_data
    from frontier_llm.cluster.admission import written
    from frontier_llm.errors import ConfigError
    from frontier_llm.experiments.scaling.figure import write_report
    from frontier_llm.experiments.scaling.forecast import forecasts
    from frontier_llm.experiments.scaling.harvest import harvest
    from frontier_llm.experiments.scaling.in_job import run_series
    from frontier_llm.experiments.scaling.walltime import steps_of
    from frontier_llm.units import plural

    if points[-1].nodes > launcher.nodes:
        what = (
            f"the largest point needs {points[-1].nodes} nodes, but this allocation has only {launcher.nodes} that are "
            "not spares"
        )
        raise ConfigError(what, f"sbatch --nodes={points[-1].nodes + args.spares}", "--nodes")
    require_data(points[-1].config)
    priced = _to_run(forecasts([(steps_of(point, _own_steps(args, point.config)), None) for point in points]))
    hours = sum(row.hours for row in priced)
    if args.dry_run or not args.json:  # otherwise the only output is the JSON of the results
        _show_jobs(args, priced, [None] * len(priced))
    have = len(launcher.allocation.nodes)
    log.info(
        f"cost: this job takes {plural(have, 'node')} for about {hours * 60:,.0f} minutes, points one after another "
        f"(predicted): "
        f"{hours * have:,.1f} node-hours"
    )
    log.info(f"cost: this job writes {written(points[0].config, 0, root)}")
    if args.dry_run:
        return 0
    if args.preflight:
        launcher.preflight(root)

    def words_of(row: Forecast) -> tuple[str, ...]:
        config = row.point.config
        own = [*words, f"batch.global_batch={config.batch.global_batch}", f"train.steps={config.train.steps}"]
        own.append(f"train.run_dir={row.point.directory}")
        return tuple(own)

    run_series(priced, launcher, words_of, side_by_side=args.side_by_side)
    rows = harvest(root)
    _print_rows(args, rows, write_report(rows, root))
    return 0 if all(row.status == "ok" for row in rows) else 1


def _own_steps(args: argparse.Namespace, config: RunConfig) -> int | None:
    """Return train.steps if the user has set it on the command line. None otherwise."""
    if any(word.startswith("train.steps=") for word in args.overrides):
        return config.train.steps
    return None


def _submit(
    args: argparse.Namespace,
    points: list[Point],
    site: Site,
    config: RunConfig,
) -> tuple[list[Forecast], list[str | None]]:
    """Queue all points. Return each point with its cost, and its job id (None in a dry run)."""
    from frontier_llm import log
    from frontier_llm.cluster import submit
    from frontier_llm.cluster.admission import admit, cost_of
    from frontier_llm.cluster.sites import parse_walltime
    from frontier_llm.errors import ConfigError
    from frontier_llm.experiments.scaling.forecast import forecasts
    from frontier_llm.experiments.scaling.series import announce, submission_problems
    from frontier_llm.experiments.scaling.walltime import with_walltime
    from frontier_llm.units import plural

    account = args.account or submit.default_account()
    minutes = parse_walltime(args.time) if args.time else None
    if problems := list(submission_problems(points, site, account, args.partition, minutes)):
        raise ConfigError(problems)
    priced = _to_run(forecasts(with_walltime(points, site, args.partition, minutes, _own_steps(args, config))))
    requests = [
        submit.JobRequest(
            job=submit.wanted_job(row.point.config, site, row.point.nodes, continuation="never"),
            config=row.point.config,
            site=site,
            account=account,
            partition=args.partition,
            minutes=row.minutes,
            saves=False,
            name=f"{row.point.mode}-{row.point.nodes}",
        )
        for row in priced
    ]
    requests = [admit(request) for request in requests]  # check all points before the first point is queued
    costs = [cost_of(request) for request in requests]
    walltime = sum((cost.slice_hours or 0) * cost.nodes for cost in costs)
    total = f"{plural(sum(cost.steps for cost in costs), 'step')} in {plural(len(costs), 'job')}"
    predicted = sum(row.node_hours for row in priced)
    log.info(
        f"cost: {total}: {predicted:,.1f} node-hours predicted, including the start of each job; at most "
        f"{walltime:,.1f} if every job uses its whole walltime"
    )
    if args.dry_run:
        return priced, [None] * len(priced)
    jobs: list[str | None] = []
    for row, request in zip(priced, requests, strict=True):
        jobs.append(submit.submit(request).job_id)
        announce(row.point)  # a refused submission keeps the point.json of the job that is already queued
    return priced, jobs


def _print_rows(args: argparse.Namespace, rows: list[Row], paths: list[Path]) -> None:
    """Print the table and the paths of its files."""
    from frontier_llm import log
    from frontier_llm.experiments.scaling.harvest import as_json, as_text, by_series
    from frontier_llm.units import printable

    print(as_json(rows) if args.json else printable(as_text(rows)))
    for (mode, model), points in by_series(rows).items():
        _log_published(mode, model, [(row.devices, row.predicted_efficiency) for row in points])
    if paths:
        log.info(f"wrote {', '.join(map(str, paths))}")


def _log_published(mode: str, model: str, efficiencies: list[tuple[int, float | None]]) -> None:
    """Print the published efficiencies of the same model and mode as these predicted efficiencies."""
    from frontier_llm import log
    from frontier_llm.planner.published import beside_published

    for line in beside_published(mode, model, efficiencies):
        log.info(line)


def _simulate(args: argparse.Namespace, points: list[Point], root: Path) -> int:
    from frontier_llm.experiments.scaling.figure import write_report
    from frontier_llm.experiments.scaling.forecast import simulated_rows

    rows = simulated_rows(points)
    directory = root / f"simulated_{points[0].mode}_{points[0].config.model.name}"
    _print_rows(args, rows, [] if args.dry_run else write_report(rows, directory))
    return 0


@command(
    option("directory", metavar="DIR", help="directory that holds the points, at any depth"),
    option("--output", metavar="DIR", help="where to write (default: the same directory)"),
    JSON,
    line="collect the results of run directories in a table and figures",
    about="Collect the results of run directories in a table and figures: CSV, JSON and a self-contained HTML page.",
    examples=("frontier-llm scaling report runs/scaling",),
)
def _report(args: argparse.Namespace) -> int:
    from frontier_llm.experiments.scaling.figure import write_report
    from frontier_llm.experiments.scaling.harvest import harvest

    rows = harvest(Path(args.directory))
    _print_rows(args, rows, write_report(rows, Path(args.output or args.directory)))
    return 0 if all(row.status == "ok" for row in rows) else 1


scaling = Command(
    about=(
        "Make and queue a series of runs that differ only in the number of nodes, and collect the results in a table "
        "and figures."
    ),
    examples=(
        "frontier-llm scaling weak --model gpt-175b --nodes 16,32 --site frontier -A ABC1",
        "frontier-llm scaling strong --model gpt-1t --nodes 64,384 --site lumi --simulate",
        "frontier-llm scaling report runs/scaling",
    ),
    actions={
        "weak": _series_command("weak", (BATCH_PER_REPLICA,), "the global batch grows with data parallelism"),
        "strong": _series_command("strong", (), "the global batch is constant"),
        "report": _report,
    },
)
