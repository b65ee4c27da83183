"""Ranks of a run on this machine, for the commands that no launcher has started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cluster.local import run_local_ranks
from frontier_llm.cluster.rank_variables import set_rank_variables
from frontier_llm.config import RunConfig, load_run
from frontier_llm.run.rank_env import discover, environment

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from frontier_llm.run.launchers import RankEnv


def local_world_size(config: RunConfig) -> int:
    """Ranks to start when no launcher has: the degrees as given, data = 1 where the run leaves it open."""
    return config.parallel.model_ranks * (config.parallel.data or 1)


def start_local_ranks(config: RunConfig, world_size: int, argv: Sequence[str]) -> int:
    """Run `frontier-llm ARGV` as `world_size` ranks, with their logs in the run directory; the exit code of the
    first that failed, or 0.
    """
    run_dir = Path(config.train.run_dir)
    return run_local_ranks(world_size, argv, environment(), run_dir / "logs", run_dir=run_dir)


def measure_on_ranks(args: Namespace, measure: Callable[[RunConfig, RankEnv | None], None]) -> int:
    """`measure` in the run's layout: on this rank of a launcher, alone where one rank suffices, else on local ranks
    that type the same.
    """
    from frontier_llm.cli.checks import check

    config = load_run(args.run, args.overrides)
    place = discover()
    if place is not None:
        set_rank_variables(config, place)  # before anything imports torch
    world_size = place.world_size if place else local_world_size(config)
    if place is None:
        check(config, world_size, saves=False)
    if place is None and world_size > 1:
        return start_local_ranks(config, world_size, args.typed)
    measure(config, place)
    return 0
