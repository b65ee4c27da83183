"""frontier-llm tune RUN --max-node-hours H: find the fastest layout by short runs, beginning with the planner's
choice.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import (
    JSON,
    amount,
    command,
    natural,
    option,
    positive,
    positive_amount,
    run_options,
    show,
    yaml_file,
)
from frontier_llm.cli.settings import refuse_layout
from frontier_llm.tables import aligned

if TYPE_CHECKING:
    from frontier_llm.experiments.scaling.launch import Launcher, ToolJob
    from frontier_llm.experiments.tuning.search import Tuner

DIRECTORY = "runs/tune"


@command(
    *run_options(),
    option(
        "--max-node-hours",
        type=amount,
        required=True,
        metavar="H",
        help="node-hours that all trials together may use; 0: only write the report",
    ),
    option(
        "--nodes",
        type=positive,
        metavar="N",
        help="number of nodes of a trial (default: all nodes of the allocation except the spares)",
    ),
    option(
        "--spares",
        type=natural,
        default=0,
        metavar="N",
        help="nodes of the allocation that stay free and replace nodes that fail (default: 0)",
    ),
    option(
        "--ranks",
        type=positive,
        metavar="N",
        help="outside an allocation: ranks on this machine (default: its devices)",
    ),
    option(
        "--steps",
        type=positive,
        default=10,
        metavar="N",
        help="steps of a trial; the first three are not timed (default: %(default)s)",
    ),
    option(
        "--trials",
        type=positive,
        metavar="N",
        help="largest number of trials (default: as many as the budget and the expected gain allow)",
    ),
    option(
        "--fix",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="search only layouts with this value, as in `plan`; may be repeated",
    ),
    option(
        "--layouts",
        type=positive,
        default=256,
        metavar="N",
        help="search among the N layouts that the planner predicts as fastest (default: %(default)s)",
    ),
    option(
        "--within",
        type=positive_amount,
        default=2.0,
        metavar="X",
        help="leave out layouts that are predicted slower than X times the fastest (default: %(default)s)",
    ),
    option("--allow-cross-node-tp", action="store_true", help="also try tensor parallelism beyond the node"),
    option("--exhaustive", action="store_true", help="try every layout of the space, in random order"),
    option(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="seed of the random choices (default: 0)",
    ),
    option(
        "--output",
        metavar="DIR",
        help=f"directory of trials, table and report; a search that is in it continues (default: {DIRECTORY}/RUN)",
    ),
    option(
        "--emit",
        type=yaml_file,
        metavar="FILE",
        help="write the fastest layout as a run file (default: best.yaml in the output)",
    ),
    option(
        "--emit-machine",
        type=yaml_file,
        metavar="FILE",
        help="write a machine file with the constants that the trials have changed",
    ),
    option("--preflight", action="store_true", help="`doctor` on every node of the allocation first"),
    option("--dry-run", action="store_true", help="show the space and what a trial costs, run nothing"),
    JSON,
    about="Find the fastest layout of a run by running it. Each trial trains a few steps, by srun inside an allocation "
    "(slurm/tune.sbatch) or on this machine. The first trial is the planner's choice. A model of the planner's error "
    "then chooses the next ones. Each trial has a time limit. A trial that runs out of memory, hangs or has no finite "
    "loss counts as slow, and the table names the failure. To continue after the walltime, repeat the command.",
    examples=(
        "frontier-llm tune train_small --ranks 4 --max-node-hours 0.2",
        "frontier-llm tune train_22b --nodes 16 --max-node-hours 40 --dry-run",
    ),
)
def tune(args: argparse.Namespace) -> int:
    """Return exit code 0 if a layout was measured."""
    from frontier_llm import log
    from frontier_llm.cli.checks import require_data
    from frontier_llm.experiments.tuning.measure import Bench
    from frontier_llm.experiments.tuning.search import Limits, run_search
    from frontier_llm.experiments.tuning.trials import TRIALS_FILE, write_trials

    refuse_layout(args.overrides, kept=("precision.gradient_wire",))
    root = Path(args.output or Path(DIRECTORY) / Path(args.run).stem).resolve()
    tool = _tool_job(args, root)
    if tool is not None:
        launcher: Launcher = tool.ranks
        overrides = list(tool.overrides)
    else:
        launcher = _local_ranks(args)
        overrides = list(args.overrides)
    if args.allow_cross_node_tp:
        overrides.append("parallel.cross_node_tensor=true")
    search = _search(args, overrides, launcher, root)
    log.info(_cost(search, launcher.nodes, args, root))
    if args.dry_run:
        from frontier_llm.data.loader import data_problems
        from frontier_llm.planner.choice import not_by_time

        for problem in data_problems(search.space.config):
            log.warn(f"the trials would be refused: {problem}")
        rows = _plan_rows(search)
        seconds = [plan.step_s for plan in search.space.plans]
        if seconds != sorted(seconds):
            log.info(not_by_time())
        show(args, rows, lambda: aligned((">step_s", ">gib", "layout"), (row.values() for row in rows)))
        return 0
    require_data(search.space.config)
    if tool is not None:
        tool.record()
    if args.preflight:
        launcher.preflight(root)
    bench = Bench(launcher, args.run, overrides, args.steps, root)
    why = run_search(
        search,
        args.steps,
        Limits(args.max_node_hours, launcher.nodes, args.trials, launcher.time_left_s),
        lambda proposal, limit_s: bench.measure(search, proposal, limit_s),
        lambda trials: write_trials(root / TRIALS_FILE, trials),
    )
    log.info(f"the search ends: {why}")
    return _conclude(args, search, overrides, root)


def _tool_job(args: argparse.Namespace, root: Path) -> ToolJob | None:
    """Return the job of this allocation. None outside of an allocation."""
    from frontier_llm.cluster.sites import load_site
    from frontier_llm.experiments.scaling.launch import open_tool_job
    from frontier_llm.run.rank_env import environ

    if not (environ("SLURM_JOB_ID") and environ("SLURM_JOB_NODELIST")):
        return None
    return open_tool_job(
        root,
        args.run,
        args.overrides,
        site=load_site(),
        nodes=args.nodes,
        spares=args.spares,
        max_node_hours=args.max_node_hours or None,
    )


def _local_ranks(args: argparse.Namespace) -> Launcher:
    """Return a launcher for this machine. Raises ConfigError if more than one node is requested."""
    from frontier_llm.config import load_run
    from frontier_llm.errors import ConfigError
    from frontier_llm.experiments.scaling.launch import LocalRanks
    from frontier_llm.machine.load import load_machine

    devices = load_machine(load_run(args.run, args.overrides).machine).devices_per_node
    nodes = args.nodes or 1
    if nodes > 1 and not args.dry_run:
        fix = (
            f"sbatch --nodes={nodes} slurm/tune.sbatch --max-node-hours {args.max_node_hours:g}; --dry-run "
            f"shows the space"
        )
        raise ConfigError(f"is {nodes}, but this process is not inside an allocation", fix, "--nodes")
    return LocalRanks(nodes * (args.ranks or devices), nodes)


def _search(args: argparse.Namespace, overrides: list[str], launcher: Launcher, root: Path) -> Tuner:
    """Return the search space with the results of earlier trials."""
    from frontier_llm.experiments.tuning.search import Everything, Tuner
    from frontier_llm.experiments.tuning.space import make_space
    from frontier_llm.experiments.tuning.trials import TRIALS_FILE, read_trials
    from frontier_llm.machine.load import load_machine, own_stack, rates
    from frontier_llm.machine.precision import load_resolved
    from frontier_llm.planner.candidates import parse_fixed

    config = load_resolved(args.run, overrides)
    machine = load_machine(config.machine)
    numbers = rates(machine, own_stack(machine))
    if args.allow_cross_node_tp:
        tp_max = launcher.devices
    else:
        tp_max = min(numbers.node_devices, launcher.devices // launcher.nodes)
    space = make_space(
        config=config,
        rates=numbers,
        devices=launcher.devices,
        tp_max=tp_max,
        fixed=parse_fixed(args.fix),
        most=args.layouts,
        within=args.within,
    )
    trials = read_trials(root / TRIALS_FILE, space.plans[0].layout)
    search = Everything if args.exhaustive else Tuner
    return search(space, trials, args.seed)


def _cost(search: Tuner, nodes: int, args: argparse.Namespace, root: Path) -> str:
    """Return a text about the search space and the cost of its trials."""
    from frontier_llm.cluster.admission import written
    from frontier_llm.experiments.tuning.search import Proposal
    from frontier_llm.units import format_seconds, plural

    plans = search.space.plans
    used = sum(trial.node_hours for trial in search.trials)
    trial_s = search.expected_s(Proposal(0, "planner", plans[0].step_s), args.steps)
    start = "measured" if any(trial.ok for trial in search.trials) else "assumed, until one is measured"
    left = max(0.0, args.max_node_hours - used)
    steps_s = [plan.step_s for plan in plans]
    return (
        f"{len(plans)} of {plural(search.space.legal, 'layout')} that fit are searched, "
        f"{format_seconds(min(steps_s))} to {format_seconds(max(steps_s))} per step (predicted)\n"
        f"cost: a trial of {args.steps} steps on {plural(nodes, 'node')} takes about {format_seconds(trial_s)} "
        f"(start {start}), "
        f"{trial_s * nodes / 3600:.3g} node-hours; {used:.3g} of {args.max_node_hours:.3g} node-hours are used\n"
        f"cost: {plural(nodes, 'node')} for at most {left / nodes * 60:,.0f} minutes of trials, {left:.3g} node-hours\n"
        f"cost: trials write {written(search.space.config, 0, root)}"
    )


def _plan_rows(search: Tuner) -> list[dict[str, str]]:
    from frontier_llm.planner.report import layout_words
    from frontier_llm.units import GIB

    return [
        {"step_s": f"{plan.step_s:.4g}", "gib": f"{plan.peak_bytes / GIB:.1f}", "layout": layout_words(plan)}
        for plan in search.space.plans
    ]


def _conclude(args: argparse.Namespace, search: Tuner, overrides: list[str], root: Path) -> int:
    """Write the report and the requested files. Return the exit code."""
    from frontier_llm import log
    from frontier_llm.experiments.measure.machine_file import write_machine
    from frontier_llm.experiments.tuning.constants import tuned_machine
    from frontier_llm.experiments.tuning.report import summary, write_best, write_report

    best = search.best
    written = [write_report(search, root)] if search.trials else []
    if best is not None:
        written.append(write_best(args.emit or root / "best.yaml", args.run, overrides, search))
    if args.emit_machine and best is not None:
        write_machine(args.emit_machine, tuned_machine(search))
        written.append(args.emit_machine)
    shown = {key: value for key, value in summary(search).items() if value not in (None, {})}
    show(args, summary(search), lambda: "\n".join(f"{key}: {value}" for key, value in shown.items()))
    if written:
        log.info(f"wrote {', '.join(map(str, written))}")
    return 0 if best is not None else 1
