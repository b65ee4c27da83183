"""frontier-llm train RUN [key=value …]: check everything in one process, then join the launcher's ranks or start local ones."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
from pathlib import Path

from frontier_llm import log
from frontier_llm.cli.arguments import add_resume, add_run, examples, resume_flags
from frontier_llm.config import RunConfig, load_run
from frontier_llm.errors import ConfigError, FrontierError, Problem
from frontier_llm.units import format_bytes, plural


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a run file",
        description="Train a run file. Under srun, mpirun or torchrun each process is one rank; otherwise local ranks are started: "
        "tensor x pipeline x data of them (data = 1 unless the run says more). In the run directory a file SAVE makes a checkpoint "
        "within a step, a file STOP makes one and ends the run; starting it again goes on from the last one.",
        epilog=examples(
            "frontier-llm train quickstart train.steps=500",
            "frontier-llm train train_small parallel.data=1 --check",
            "srun --ntasks-per-node=8 frontier-llm train train_22b",
        ),
    )
    add_run(parser)
    parser.add_argument("--no-jit", action="store_true", help="make any attempt to compile while training an error (ops.no_jit)")
    add_resume(parser)
    parser.add_argument("--check", action="store_true", help="check the run and its data, print the layout, train nothing")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when the run reached its last step."""
    from frontier_llm.cluster.signals import held

    with held():  # until ranks can hear what they are told: what is read and imported before takes seconds
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from frontier_llm.cluster.rank_env import discover
    from frontier_llm.cluster.signals import SignalWatcher

    overrides = [*args.overrides, *(["ops.no_jit=true"] if args.no_jit else [])]
    config = load_run(args.run, overrides)
    place = discover()
    world_size = place.world_size if place else local_world_size(config)
    if place is None or (place.rank == 0 and place.launcher != "local"):  # the parent of local ranks has checked
        check(config, world_size)
        _check_resume(config, args.allow_change)
    if args.check:
        return 0
    if place is None and world_size > 1:
        return _start_local_ranks(config, world_size, ["train", args.run, *overrides, *resume_flags(args)])
    with SignalWatcher() as signals:
        from frontier_llm.train.loop import Resume, train

        code = train(config, place, signals, Resume(args.strict, tuple(args.allow_change)))
    if place is not None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm's warning must not make a crash of a rank that is done and leaving
    return code


def local_world_size(config: RunConfig) -> int:
    """Ranks to start when no launcher has: the degrees as given, data = 1 where the run leaves it open."""
    return config.parallel.tensor * config.parallel.pipeline * (config.parallel.data or 1)


def _start_local_ranks(config: RunConfig, world_size: int, argv: list[str]) -> int:
    from frontier_llm.cluster.local import run_local_ranks
    from frontier_llm.cluster.rank_env import environment

    return run_local_ranks(world_size, argv, environment(), Path(config.train.run_dir) / "logs")


def check(config: RunConfig, world_size: int) -> None:
    """Refuse in one process, in seconds, whatever would fail on the ranks: layout, data, run directory.

    Raises ConfigError (or its kin) with every problem found.
    """
    from frontier_llm.data.loader import data_problems
    from frontier_llm.topology import make_plan, plan_problems

    problems = [*plan_problems(config, world_size), *data_problems(config), *_named_file_problems(config)]
    problems += _tensorboard_problems(config)
    problems += _run_dir_problems(Path(config.train.run_dir)) or _space_problems(config, world_size)
    if problems:
        raise ConfigError(problems)
    plan = make_plan(config, world_size)
    if config.optimizer.engine == "deepspeed":
        _check_deepspeed(config, plan.microbatches)
    log.info(f"{config.model.name}: {plan.describe()}, {plural(world_size, 'rank')}")


def _check_resume(config: RunConfig, allowed: list[str]) -> None:
    checkpoints = Path(config.train.run_dir) / "checkpoints"
    if any(checkpoints.glob("step_*")):  # importing torch takes two seconds
        from frontier_llm.checkpoint.inspect import check_resume

        check_resume(checkpoints, config, allowed)


def _check_deepspeed(config: RunConfig, microbatches: int) -> None:
    from frontier_llm.config.deepspeed import INSTALL, deepspeed_settings

    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("deepspeed is not installed", f"{INSTALL}, or set optimizer.engine=native", "optimizer.engine")
    deepspeed_settings(config, microbatches)


def _named_file_problems(config: RunConfig) -> list[Problem]:
    """The machine file and the table of algorithms that the run names."""
    from frontier_llm.config.load import find_file
    from frontier_llm.machine import load_machine

    found: list[Problem] = []
    try:
        load_machine(config.machine)
    except FrontierError as error:
        found += error.problems
    try:
        if config.comm.algorithms not in ("flat", "hierarchical"):
            find_file(config.comm.algorithms, "algorithms")
    except FrontierError as error:
        found += [Problem("comm.algorithms", problem.what, problem.fix) for problem in error.problems]
    return found


def _tensorboard_problems(config: RunConfig) -> list[Problem]:
    if not config.train.tensorboard or importlib.util.find_spec("tensorboard") is not None:
        return []
    return [Problem("train.tensorboard", "tensorboard is not installed", "pip install tensorboard, or set train.tensorboard=false")]


def _run_dir_problems(run_dir: Path) -> list[Problem]:
    others = run_dir / "config.yaml"
    if others.is_file() and not any((run_dir / name).exists() for name in ("plan.json", "checkpoints")):
        what = f"{others} is not from a run, and a run there would overwrite it"
        return [Problem("train.run_dir", what, "rename that file, or choose another directory")]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        file = next((path for path in (run_dir, *run_dir.parents) if path.is_file()), None)
        why = f"{file} is a file" if file else error.strerror
        return [Problem("train.run_dir", f"{run_dir} cannot be written: {why}", "choose a directory you can write to")]
    return []


def _space_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """The checkpoints that this start writes before it may delete one must fit, in bytes and in files."""
    from frontier_llm.costs.parameters import total_parameters
    from frontier_llm.costs.workload import statistics_bytes

    train = config.train
    checkpoints = Path(train.run_dir) / "checkpoints"
    existing = len(list(checkpoints.glob("step_????????"))) if checkpoints.is_dir() else 0
    saves = 1 + (train.steps - 1) // train.save_interval if train.save_interval else 1
    count = min(saves, 1 if existing >= train.keep_checkpoints else 2)
    values = 3 * total_parameters(config.model)  # master weights and two moments
    needed_bytes = count * values * statistics_bytes(config.precision.dtype)
    needed_files = count * (world_size + 3)  # a shard per rank, manifest, its digest, the folder
    where = next(path for path in (checkpoints, *checkpoints.parents) if path.exists())
    disk = os.statvfs(where)
    free_bytes, free_files = disk.f_bavail * disk.f_frsize, disk.f_favail
    if needed_bytes <= free_bytes and (needed_files <= free_files or disk.f_files == 0):  # 0: a file system without a table of files
        return []
    return [
        Problem(
            "train.run_dir",
            f"the first {count} checkpoints need {format_bytes(needed_bytes)} and {needed_files} files; "
            f"{where} has {format_bytes(free_bytes)} and {free_files} files free",
            "free space, raise the quota, or choose another train.run_dir",
        )
    ]


__all__ = ["FrontierError", "add_parser", "check", "run"]
