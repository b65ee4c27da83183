"""Ranks of a run on this machine, for the commands that no launcher has started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from frontier_llm.cluster.local import run_local_ranks
from frontier_llm.cluster.rank_env import environment
from frontier_llm.config import RunConfig


def local_world_size(config: RunConfig) -> int:
    """Ranks to start when no launcher has: the degrees as given, data = 1 where the run leaves it open."""
    return config.parallel.tensor * config.parallel.pipeline * (config.parallel.data or 1)


def start_local_ranks(config: RunConfig, world_size: int, argv: Sequence[str]) -> int:
    """Run `frontier-llm ARGV` as `world_size` ranks, with their logs in the run directory; the exit code of the first that failed, or 0."""
    run_dir = Path(config.train.run_dir)
    return run_local_ranks(world_size, argv, environment(), run_dir / "logs", run_dir=run_dir)
