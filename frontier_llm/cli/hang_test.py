"""frontier-llm bench comm RUN --hang-test: which modes of comm.in_flight are safe on this machine."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frontier_llm.cli.arguments import show

if TYPE_CHECKING:
    from frontier_llm.config import RunConfig
    from frontier_llm.experiments.measure.hang import Verdict


def hang_test(args: argparse.Namespace) -> int:
    """Return exit code 0 if a mode is safe.

    Without --mode, each mode of comm.in_flight is tried in local ranks. With --mode, only this mode is run. This
    process is then one of the test's ranks, or starts local ranks.
    """
    from frontier_llm.cli.checks import check
    from frontier_llm.cli.ranks import local_world_size, start_local_ranks
    from frontier_llm.errors import LayoutError
    from frontier_llm.experiments.measure import hang
    from frontier_llm.machine.precision import load_resolved
    from frontier_llm.run.node_folders import temporary_folder
    from frontier_llm.run.rank_env import COMMAND, discover, environment, with_this_package
    from frontier_llm.topology.rank_variables import set_rank_variables

    config = load_resolved(args.run, args.overrides)
    place = discover()
    world_size = local_world_size(config)
    if args.mode:
        if place is None:
            return start_local_ranks(config, world_size, args.typed)
        set_rank_variables(config, place)  # torch reads these variables when it is imported
        hang.run_steps(config, place, args.steps, Path(config.train.run_dir) / "progress")
        return 0
    if place is not None:
        fix = (
            "start it once on the node, without a launcher's ranks: srun -N1 -n1 --gpus-per-node=8 frontier-llm "
            "bench comm RUN --hang-test"
        )
        raise LayoutError(
            "the hang test starts its own ranks, but a launcher has started this process", fix, "--hang-test"
        )
    if world_size < 2:
        raise LayoutError("a layout of one rank has no communication", "add e.g. parallel.pipeline=2", "--hang-test")

    many = load_resolved(args.run, [*args.overrides, *hang.settings_of(config, "many")])
    check(many, world_size, saves=False)
    verdicts = []
    with temporary_folder() as folder:
        for mode in hang.MODES:
            run_dir = Path(folder, mode)
            run_dir.mkdir()
            words = [
                "bench",
                "comm",
                args.run,
                *args.overrides,
                *hang.settings_of(config, mode),
                f"train.run_dir={run_dir}",
            ]
            words += ["--hang-test", "--mode", mode, "--steps", str(args.steps)]
            command = [sys.executable, *COMMAND, *words]
            verdict = hang.watch(
                command=command,
                environment=with_this_package(environment()),
                mode=mode,
                times=args.steps,
                limit_s=args.step_limit,
                folder=run_dir,
            )
            print(verdict.describe(), file=sys.stderr, flush=True)
            verdicts.append(verdict)
    return _report(args, config, verdicts)


def _report(args: argparse.Namespace, config: RunConfig, verdicts: list[Verdict]) -> int:
    import platform

    from frontier_llm import log
    from frontier_llm.cli.ranks import local_world_size
    from frontier_llm.experiments.measure.hang import in_flight_of
    from frontier_llm.experiments.measure.machine_file import write_machine
    from frontier_llm.topology.plan import plan_as_given

    mode = in_flight_of(verdicts)
    plan = plan_as_given(config, local_world_size(config))
    outcomes = ", ".join(f"{verdict.mode} {verdict.steps} of {verdict.wanted}" for verdict in verdicts)
    source = (
        f"bench comm --hang-test on {platform.node()}, {plan.grid.describe(plan.chunks)}, {plan.schedule}: "
        f"{outcomes} steps"
    )
    if args.emit_machine and mode:
        content = {"base": config.machine, "title": f"{config.machine}, hang test passed"}
        write_machine(args.emit_machine, {**content, "in_flight": {"mode": mode, "tag": "measured", "source": source}})
        log.info(f"wrote {args.emit_machine}: machine={args.emit_machine} makes comm.in_flight=auto mean {mode}")
    rows: list[dict[str, Any]] = [{**asdict(verdict), "safe": verdict.safe} for verdict in verdicts]
    last = f"comm.in_flight: {mode}" if mode else "no mode is safe here: see the last lines of the ranks above"
    show(
        args,
        {"modes": rows, "in_flight": mode, "source": source},
        lambda: "\n".join([*(v.describe() for v in verdicts), last]),
    )
    return int(mode is None)
