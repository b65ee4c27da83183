"""frontier-llm train RUN [key=value …]: check the run in one process, then join the launcher's ranks or start local
ranks.
"""

from __future__ import annotations

import argparse
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm import log
from frontier_llm.cli.arguments import RESUME, command, natural, option, run_options
from frontier_llm.errors import CheckpointError
from frontier_llm.units import printable

if TYPE_CHECKING:
    from frontier_llm.config import RunConfig


@command(
    *run_options(),
    option("--no-jit", action="store_true", help="make any attempt to compile while training an error (ops.no_jit)"),
    *RESUME,
    option(
        "--leave-out",
        type=natural,
        default=0,
        metavar="N",
        help="do not train on the next N samples; each start with this option leaves out N more",
    ),
    option(
        "--restart-source",
        action="append",
        default=[],
        metavar="PATH",
        help="read this dataset of the run from its beginning, in another order; repeatable",
    ),
    option("--dry-run", action="store_true", help="check the run as `frontier-llm check` does, and train nothing"),
    about="Train a run file. Under srun, mpirun or torchrun each process is one rank. Otherwise local ranks are "
    "started: parallel.tensor x parallel.pipeline x parallel.data of them (parallel.data is 1 if the run does not set "
    "it). A file SAVE in the run directory requests a checkpoint at the next step. A file STOP requests a checkpoint "
    "and ends the run. Remove STOP and repeat the command to continue from the newest checkpoint.",
    examples=(
        "frontier-llm train quickstart train.steps=500",
        "frontier-llm train train_small parallel.data=1",
        "srun --ntasks-per-node=8 frontier-llm train train_22b",
    ),
)
def train(args: argparse.Namespace) -> int:
    """Return exit code 0 if the run reached its last step."""
    from frontier_llm.run.rank_env import discover
    from frontier_llm.run.signals import BEFORE_RANKS, held

    if discover() is not None:
        # Signals stay pending until the rank can handle them by a save. Until then it reads files and imports modules
        # for several seconds.
        with held():
            return _run(args)
    with held(BEFORE_RANKS):  # until ranks start, SIGTERM ends the command at once, because nothing can be lost
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from frontier_llm.certificate.named_code import resume_problems
    from frontier_llm.cli.checks import check, check_start
    from frontier_llm.cli.ranks import local_world_size, read_run, start_local_ranks
    from frontier_llm.config.keys import check_allowable
    from frontier_llm.data.position import START
    from frontier_llm.data.recorded import as_it_stands, recorded_position
    from frontier_llm.machine.cores import set_own_threads
    from frontier_llm.run.holder import refuse_second_start
    from frontier_llm.run.rank_env import discover
    from frontier_llm.run.signals import SignalWatcher, held
    from frontier_llm.topology.rank_variables import set_rank_variables

    overrides = list(args.overrides)
    if args.no_jit:
        overrides.append("ops.no_jit=true")
    place = discover()
    if place is not None:
        log.set_rank(place.rank, place.world_size)  # only rank 0 reports notes about the run file
    config = read_run(args.run, overrides, place)
    check_allowable(args.allow_change)
    if place is not None:
        set_rank_variables(config, place)  # torch reads these variables when it is imported
    world_size = place.world_size if place else local_world_size(config)
    if place is None and world_size == 1:
        set_own_threads()
    if place is None:
        refuse_second_start(Path(config.train.run_dir))
    if args.dry_run:
        return _dry_run(args, overrides, as_it_stands(config), world_size) if place is None or place.rank == 0 else 0
    # Local ranks do not check the run again, because the process that started them has checked it.
    if place is None or (place.rank == 0 and place.launcher != "local"):
        check(as_it_stands(config), world_size, position=recorded_position(Path(config.train.run_dir)) or START)
        if problems := list(resume_problems(config, args.allow_change)):
            raise CheckpointError(problems)
    if place is None:
        check_start(config, world_size)
    with held():
        if place is None and world_size > 1:
            return start_local_ranks(config, world_size, args.typed)
        with SignalWatcher() as signals:
            from frontier_llm.training.loop import Resume, train

            resume = Resume(args.strict, tuple(args.allow_change), args.leave_out, tuple(args.restart_source))
            code = train(config, place, signals, resume, _stage_bytes)
        if place is not None:
            # Slurm's warning must not kill a rank that is finished and about to exit
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        return code


def _stage_bytes(config: RunConfig, ranks: int) -> tuple[float, ...]:
    """Return the predicted bytes of each pipeline stage. Rank 0 imports the planner when it needs them."""
    from frontier_llm.planner.predict import stage_bytes

    return stage_bytes(config, ranks)


def _dry_run(args: argparse.Namespace, overrides: Sequence[str], config: RunConfig, world_size: int) -> int:
    """Print the certificate of the run, and the command that prints it. Return the exit code of `check`."""
    from frontier_llm.certificate.certificate import certify
    from frontier_llm.certificate.page import as_text
    from frontier_llm.cli.check import on_this_computer

    allowed = [word for key in args.allow_change for word in ("--allow-change", key)]
    words = ["frontier-llm", "check", args.run, *overrides, *allowed]
    log.info(f"train --dry-run is now this command: {shlex.join(words)}")
    certificate = certify(on_this_computer(config, world_size, args.allow_change))
    print(printable(as_text(certificate)))
    return 1 if certificate.refused else 0
