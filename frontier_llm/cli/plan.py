"""`frontier-llm plan`: choose and explain the layout of a model on a machine. `--validate` compares predictions with
measurements.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frontier_llm.cli.arguments import JSON, PLUGIN, command, count_of, option, positive, show, yaml_file
from frontier_llm.cli.settings import machine_of, refuse_layout, refuse_settings
from frontier_llm.errors import ConfigError

if TYPE_CHECKING:
    from frontier_llm.config import ModelConfig, RunConfig
    from frontier_llm.machine.rates import Rates
    from frontier_llm.machine.schema import Machine
    from frontier_llm.planner.search import Search
    from frontier_llm.planner.steps import Steps

_DEFAULT_MACHINE = "frontier"


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
    from frontier_llm.config import phases_of
    from frontier_llm.config.load import parse_overrides
    from frontier_llm.config.plugins import import_plugins
    from frontier_llm.config.validate import fp16_note
    from frontier_llm.machine.load import (
        load_machine,
        own_stack,
        rates,
    )
    from frontier_llm.machine.precision import load_resolved
    from frontier_llm.planner import report
    from frontier_llm.planner.candidates import parse_fixed
    from frontier_llm.planner.operations import campaign
    from frontier_llm.planner.refusal import check_found
    from frontier_llm.planner.search import default_global_batch, search

    import_plugins(args.plugin)
    run = load_resolved(args.run, args.overrides) if args.run else None
    longest = max(phases_of(run), key=lambda phase: phase.config.model.sequence_length) if run else None
    base = longest.config if longest else None
    if run and longest and run.train.phases:
        print(
            f"note: the layout is planned for {longest.describe()}, which has the longest sequences; submit and train "
            "check all phases",
            file=sys.stderr,
        )
    settings = parse_overrides(args.overrides)
    model = base.model if base else _model(args, settings)
    args.machine = args.machine or _machine_of_run(run)
    machine = load_machine(args.machine)
    stack = args.stack or own_stack(machine)
    numbers = rates(machine, stack)
    if note := base and fp16_note(base.precision, machine.device.flushes_fp16):
        print(f"note: {note}", file=sys.stderr)
    fixed = parse_fixed(args.fix)
    nodes = args.nodes or _smallest(model, machine, numbers)
    if nodes > numbers.nodes:
        print(f"note: {machine.name} has {numbers.nodes} nodes; the plan assumes {nodes}", file=sys.stderr)
    batch = (
        base.batch.global_batch
        if base
        else _global_batch(settings) or default_global_batch(model, nodes, numbers.node_devices)
    )
    shared = {"dtype": base.precision.dtype, "optimizer": base.optimizer.name} if base else _state_choices(settings)
    outcome = search(
        model,
        numbers,
        nodes,
        batch,
        fixed,
        cross_node=args.allow_cross_node_tp,
        **shared,
    )
    check_found(outcome, machine, numbers)
    # The list of layouts is shortened after the search, so that --top does not change the chosen layout.
    best = outcome.best
    outcome = replace(outcome, plans=outcome.plans[: args.top])
    run_of = campaign(machine, best, args.tokens)

    steps = _steps(args, outcome, machine, numbers)

    def text() -> str:
        explained = ["", report.explain(best, machine, stack, numbers, _width())] if args.explain else []
        if steps:
            explained += ["", report.wrapped(steps.words(), _width())]
        return "\n".join(
            [
                report.text(
                    outcome=outcome,
                    machine=machine,
                    stack=stack,
                    rates=numbers,
                    run=run_of,
                    width=_width(),
                ),
                *explained,
            ]
        )

    content = report.search_as_dict(outcome, machine, stack, numbers, run_of) if args.json else {}
    if steps:
        content["steps_from_measured"] = steps.as_dict()
    show(args, content, text)
    if args.emit:
        from frontier_llm.planner.emit import Request, emit

        request = Request(
            model=args.model,
            machine=args.machine,
            run=args.run,
            tokens=args.tokens,
            settings=settings,
        )
        print(
            emit(
                path=args.emit,
                request=request,
                machine=machine,
                outcome=outcome,
                rates=numbers,
                saves=run_of,
            ),
            file=sys.stderr if args.json else sys.stdout,
        )
    _extras(
        args=args,
        outcome=outcome,
        machine=machine,
        stack=stack,
        numbers=numbers,
        fixed=fixed,
    )
    return 0


def _machine_of_run(run: RunConfig | None) -> str:
    """Return the machine that the run file names. frontier without a run, or if the file names none."""
    if run is not None and "machine" in run.model_fields_set:
        return run.machine
    return _DEFAULT_MACHINE


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


# key=value settings that affect a plan of a model, without a run
_USED = ("batch.global_batch", "precision.dtype", "optimizer.name")


def _global_batch(settings: Mapping[str, Any]) -> int:
    """Return the typed global batch. 0 if there is none."""
    from frontier_llm.config import BatchConfig, build

    if "batch" not in settings:
        return 0
    return build(BatchConfig, {"micro_batch": 1, **settings["batch"]}, where="command line: batch").global_batch


def _state_choices(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the typed precision and optimizer as arguments of the search."""
    from frontier_llm.config import OptimizerConfig, PrecisionConfig, build

    precision = build(PrecisionConfig, settings.get("precision", {}), where="command line: precision")
    if precision.dtype == "auto":
        raise ConfigError("auto is chosen for a run on its machine", "name a type, or --run RUN", "precision.dtype")
    optimizer = build(OptimizerConfig, {"lr": 1e-4, **settings.get("optimizer", {})}, where="command line: optimizer")
    return {"dtype": precision.dtype, "optimizer": optimizer.name}


def _model(args: argparse.Namespace, settings: Mapping[str, Any]) -> ModelConfig:
    """Return the named model with the typed changes. Raises ConfigError with the closest valid name."""
    from frontier_llm.config import available, load_model
    from frontier_llm.errors import suggest

    refuse_settings(
        args.overrides,
        lambda key: not key.startswith("model.") and key not in _USED,
        f"without --run, plan uses model.* and {', '.join(_USED)}",
    )
    if not args.model:
        raise ConfigError("no model is named", "valid: " + ", ".join(available("models")), "plan MODEL")
    if args.model not in available("models") and _is_run(args.model):
        raise ConfigError(f"{args.model} is a run, not a model", f"frontier-llm plan --run {args.model}", "plan MODEL")
    try:
        return load_model(args.model, settings.get("model"))
    except ConfigError as error:
        if "no model file" in str(error) and not args.model.endswith((".yaml", ".yml")):
            raise ConfigError(f"no model {args.model!r}", suggest(args.model, available("models"))) from None
        raise


def _is_run(name: str) -> bool:
    from frontier_llm.config import available
    from frontier_llm.config.load import read_yaml

    path = Path(name)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return not {"model", "batch", "train"}.isdisjoint(read_yaml(path))
    return name in available("runs")


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


def _extras(
    args: argparse.Namespace,
    outcome: Search,
    machine: Machine,
    stack: str,
    numbers: Rates,
    fixed: dict[str, Any],
) -> None:
    """Print what-if lines and write the requested files."""
    if args.what_if:
        from frontier_llm.planner.compare import what_if

        print(what_if(outcome, numbers, fixed, args.what_if, _width()), file=sys.stderr if args.json else sys.stdout)
    if args.chrome_trace:
        from frontier_llm.planner.figures import write_chrome_trace

        write_chrome_trace(args.chrome_trace, outcome.best)
        print(f"wrote {args.chrome_trace}", file=sys.stderr)
    if args.figures:
        from frontier_llm.planner.figures import write_figures

        print(f"wrote {write_figures(args.figures, outcome, machine, stack, numbers)}", file=sys.stderr)


def _smallest(model: ModelConfig, machine: Machine, numbers: Rates) -> int:
    from frontier_llm.planner.refusal import too_big
    from frontier_llm.planner.search import smallest_machine

    nodes = smallest_machine(model, numbers)
    if nodes is None:
        raise too_big(model, machine, numbers)
    print(f"note: --nodes not given; {nodes} is the smallest power of two on which {model.name} fits", file=sys.stderr)
    return nodes
