"""frontier-llm train RUN [key=value …]: check everything in one process, then join the launcher's ranks or start local ones."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from frontier_llm import log
from frontier_llm.config import RunConfig, load_run
from frontier_llm.errors import ConfigError, FrontierError, Problem


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a run file",
        description="Train a run file. Under srun, mpirun or torchrun each process is one rank; otherwise local ranks are started: "
        "tensor x pipeline x data of them (data = 1 unless the run says more).",
    )
    parser.add_argument("run", help="a run file, or the name of one in configs/runs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. train.steps=100 parallel.tensor=2")
    parser.add_argument("--no-jit", action="store_true", help="make any attempt to compile while training an error (ops.no_jit)")
    parser.add_argument("--strict", action="store_true", help="stop when the newest checkpoint is damaged; default: use the one before it")
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="let this key (e.g. optimizer.betas) differ from the checkpoint's although it changes the mathematics; repeatable",
    )
    parser.add_argument("--check", action="store_true", help="check the run and its data, print the layout, train nothing")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when the run reached its last step."""
    from frontier_llm.cluster.rank_env import discover

    overrides = [*args.overrides, *(["ops.no_jit=true"] if args.no_jit else [])]
    config = load_run(args.run, overrides)
    place = discover()
    world_size = place.world_size if place else local_world_size(config)
    if place is None or (place.rank == 0 and place.launcher != "local"):  # the parent of local ranks has checked
        check(config, world_size)
    if args.check:
        return 0
    if place is None and world_size > 1:
        return _start_local_ranks(config, world_size, ["train", args.run, *overrides, *_resume_flags(args)])
    from frontier_llm.train.loop import Resume, train

    return train(config, place, Resume(args.strict, tuple(args.allow_change)))


def _resume_flags(args: argparse.Namespace) -> list[str]:
    return [*(["--strict"] if args.strict else []), *(word for key in args.allow_change for word in ("--allow-change", key))]


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

    problems = [*plan_problems(config, world_size), *data_problems(config), *_machine_problems(config)]
    problems += [*_run_dir_problems(Path(config.train.run_dir)), *_tensorboard_problems(config)]
    if problems:
        raise ConfigError(problems)
    log.info(f"{config.model.name}: {make_plan(config, world_size).describe()}, {world_size} ranks")


def _machine_problems(config: RunConfig) -> list[Problem]:
    from frontier_llm.machine import load_machine

    try:
        load_machine(config.machine)
    except FrontierError as error:
        return list(error.problems)
    return []


def _tensorboard_problems(config: RunConfig) -> list[Problem]:
    if not config.train.tensorboard or importlib.util.find_spec("tensorboard") is not None:
        return []
    return [Problem("train.tensorboard", "tensorboard is not installed", "pip install tensorboard, or set train.tensorboard=false")]


def _run_dir_problems(run_dir: Path) -> list[Problem]:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        return [Problem("train.run_dir", f"{run_dir} cannot be written: {error.strerror}", "choose a directory you can write to")]
    return []


__all__ = ["FrontierError", "add_parser", "check", "run"]
