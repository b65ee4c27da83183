"""`frontier-llm plan`: choose and explain the layout of a model on a machine. `--validate` compares predictions with
measurements.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import JSON, PLUGIN, command, count_of, option, positive, show, yaml_file
from frontier_llm.cli.plan_subject import PlanSubject, read_subject
from frontier_llm.cli.settings import machine_of, refuse_layout, refuse_settings
from frontier_llm.errors import ConfigError

if TYPE_CHECKING:
    from frontier_llm.machine.rates import Rates
    from frontier_llm.machine.schema import Machine
    from frontier_llm.planner.operations import Campaign
    from frontier_llm.planner.search import Search
    from frontier_llm.planner.steps import Steps


@command(
    option(
        "model",
        nargs="?",
        metavar="MODEL",
        help="name in configs/models, or a path",
    ),
    option(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="changes to the run; without a run: model.*, batch.global_batch (default: about 16 Mi tokens), "
        "precision.dtype and optimizer.name",
    ),
    option(
        "--run",
        metavar="RUN",
        help="plan the model and the global batch of this run file; the file of --emit is based on it",
    ),
    option("--machine", help="name in configs/machines, or a path (default: the run's machine, or frontier)"),
    option(
        "--stack",
        metavar="NAME",
        help="software stack of the machine file (default: frontier-llm if the file has it)",
    ),
    option(
        "--nodes",
        type=positive,
        metavar="N",
        help="default: the smallest power of two on which the model fits",
    ),
    option(
        "--fix",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="compare only layouts with this value, e.g. tensor=8; may be repeated",
    ),
    option(
        "--what-if",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="compare the chosen layout with layouts that have this value instead",
    ),
    option(
        "--explain",
        action="store_true",
        help="the step and the memory line by line, with the source of each number",
    ),
    option("--allow-cross-node-tp", action="store_true", help="also price tensor parallelism beyond the node"),
    option(
        "--tokens",
        type=count_of,
        metavar="COUNT",
        help="token budget, e.g. 300B (default: 20 per parameter)",
    ),
    option(
        "--top",
        type=positive,
        default=8,
        metavar="N",
        help="plans to show, at most the simulated finalists (default: %(default)s)",
    ),
    option(
        "--measured",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="print only the predicted step time of these runs (default machine: the run's) and the measured one",
    ),
    PLUGIN,
    JSON,
    option(
        "--emit",
        type=yaml_file,
        metavar="FILE",
        help="write a run config with this layout",
    ),
    option(
        "--figures",
        type=Path,
        metavar="FILE",
        help="draw the plan into a self-contained HTML page",
    ),
    option(
        "--chrome-trace",
        type=Path,
        metavar="FILE",
        help="write the simulated pipeline for chrome://tracing or Perfetto",
    ),
    option(
        "--validate",
        nargs="*",
        metavar="FILE",
        help="score predictions against measurements (default: all of benchmarks/published; needs a checkout)",
    ),
    option("--rows", action="store_true", help="with --validate: print every prediction"),
    about="Pick the layout of a model on a machine by simulating the schedules that would run, and say why; "
    "--validate scores the predictions against published measurements.",
    examples=(
        "frontier-llm plan gpt-1t --machine frontier --nodes 384 --explain",
        "frontier-llm plan llama-2-7b --machine lumi --nodes 4 --emit my.yaml",
        "frontier-llm plan --validate",
    ),
)
def plan(args: argparse.Namespace) -> int:
    """Search a layout and print it with its predicted times. Raises FrontierError for faults that the user can
    repair.
    """
    alone = "--validate" if args.validate is not None else "--measured" if args.measured else ""
    if alone and args.model:
        raise ConfigError("would have no effect here", f"plan {alone} reads no model", args.model)
    if alone:
        refuse_settings(args.overrides, lambda key: True, f"plan {alone} changes no run")
    if args.validate is not None:
        return _validate(args)
    args.machine, args.overrides = machine_of(args.machine, args.overrides)
    if args.measured:
        return _measured(args)
    if args.model and args.run:
        fix = f"frontier-llm plan {args.model}, or frontier-llm plan --run {args.run}"
        raise ConfigError(
            f"a model and a run are given, but only one is planned: {args.model} and --run {args.run}",
            fix,
            "plan MODEL",
        )
    refuse_layout(args.overrides)
    from frontier_llm.planner.search import without_garbage_collection

    with without_garbage_collection():
        code = _plan(args)
        gc.freeze()  # so that the garbage collection at the interpreter's exit skips the objects of the plan
        return code


def _validate(args: argparse.Namespace) -> int:
    """Compare predictions with published measurements (`--validate`). Requires a source checkout, because a wheel does
    not contain the measurements.
    """
    from frontier_llm.cluster.sites import root_dir

    checkout = root_dir()
    if not (checkout / "benchmarks" / "published").is_dir():
        raise ConfigError(
            f"frontier_llm is installed from a wheel ({Path(__file__).resolve().parents[1]}), which does not contain "
            "the published measurements: they are in benchmarks/published of a source checkout",
            "in a checkout, run: python -m frontier_llm plan --validate [FILE]",
            "plan --validate",
        )
    sys.path.insert(0, str(checkout))
    validate = importlib.import_module("benchmarks.published.validate")
    exit_code: int = validate.validate_command(
        [Path(name) for name in args.validate],
        as_json=args.json,
        show_rows=args.rows,
    )
    return exit_code


def _plan(args: argparse.Namespace) -> int:
    from frontier_llm.config.plugins import import_plugins
    from frontier_llm.planner.operations import campaign
    from frontier_llm.planner.refusal import check_found
    from frontier_llm.planner.search import search

    import_plugins(args.plugin)
    subject = read_subject(args)
    outcome = search(
        subject.model,
        subject.rates,
        subject.nodes,
        subject.global_batch,
        subject.fixed,
        cross_node=args.allow_cross_node_tp,
        **subject.shared,
    )
    check_found(outcome, subject.machine, subject.rates)
    # The list of layouts is shortened after the search, so that --top does not change the chosen layout.
    outcome = replace(outcome, plans=outcome.plans[: args.top])
    saves = campaign(subject.machine, outcome.best, args.tokens)
    _show(args, subject, outcome, saves)
    if args.emit:
        _emit(args, subject, outcome, saves)
    _extras(args, subject, outcome)
    return 0


def _show(args: argparse.Namespace, subject: PlanSubject, outcome: Search, saves: Campaign | None) -> None:
    """Print the plans as text or JSON."""
    from frontier_llm.planner import report

    machine = subject.machine
    stack = subject.stack
    numbers = subject.rates
    steps = _steps(args, outcome, machine, numbers)

    def text() -> str:
        lines = [
            report.text(
                outcome=outcome,
                machine=machine,
                stack=stack,
                rates=numbers,
                run=saves,
                width=_width(),
            )
        ]
        if args.explain:
            lines += ["", report.explain(outcome.best, machine, stack, numbers, _width())]
        if steps:
            lines += ["", report.wrapped(steps.words(), _width())]
        return "\n".join(lines)

    content = report.search_as_dict(outcome, machine, stack, numbers, saves) if args.json else {}
    if steps:
        content["steps_from_measured"] = steps.as_dict()
    show(args, content, text)


def _emit(args: argparse.Namespace, subject: PlanSubject, outcome: Search, saves: Campaign | None) -> None:
    """Write a run file with the best layout (`--emit`)."""
    from frontier_llm.planner.emit import Request, emit

    request = Request(
        model=args.model,
        machine=args.machine,
        run=args.run,
        tokens=args.tokens,
        words=args.overrides,
    )
    written = emit(
        path=args.emit,
        request=request,
        machine=subject.machine,
        outcome=outcome,
        rates=subject.rates,
        saves=saves,
    )
    print(written, file=sys.stderr if args.json else sys.stdout)


def _steps(args: argparse.Namespace, outcome: Search, machine: Machine, numbers: Rates) -> Steps | None:
    """Return the steps from the best measured run to the choice, with --explain and if such a run is published."""
    if not args.explain:
        return None
    from frontier_llm.planner.steps import steps_of

    return steps_of(outcome, machine, numbers)


def _width() -> int:
    """Return the columns of the terminal. Output to a file has the full width."""
    from frontier_llm.planner.report import WIDTH

    return shutil.get_terminal_size((WIDTH, 24)).columns


def _measured(args: argparse.Namespace) -> int:
    """Show measured runs beside their predictions (`--measured`)."""
    from frontier_llm.experiments.measure.predicted import as_table, beside_prediction

    runs = [beside_prediction(directory, args.machine, args.stack, args.plugin) for directory in args.measured]
    show(
        args,
        [{**vars(run), "directory": str(run.directory), "error": run.error} for run in runs],
        lambda: as_table(runs),
    )
    return 0


def _extras(args: argparse.Namespace, subject: PlanSubject, outcome: Search) -> None:
    """Print what-if lines and write the requested files."""
    if args.what_if:
        from frontier_llm.planner.compare import what_if

        compared = what_if(outcome, subject.rates, subject.fixed, args.what_if, _width())
        print(compared, file=sys.stderr if args.json else sys.stdout)
    if args.chrome_trace:
        from frontier_llm.planner.figures import write_chrome_trace

        write_chrome_trace(args.chrome_trace, outcome.best)
        print(f"wrote {args.chrome_trace}", file=sys.stderr)
    if args.figures:
        from frontier_llm.planner.figures import write_figures

        path = write_figures(args.figures, outcome, subject.machine, subject.stack, subject.rates)
        print(f"wrote {path}", file=sys.stderr)
