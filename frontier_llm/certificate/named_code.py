"""Checks parts of a run whose code can import torch: losses, observers, DeepSpeed, and the checkpoint to resume."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from frontier_llm.config import RunConfig
from frontier_llm.errors import FrontierError, Problem
from frontier_llm.training import observers


def code_problems(config: RunConfig, microbatches: int) -> Iterator[Problem]:
    """Yield problems of observers, losses and DeepSpeed that the run names.

    torch is only imported if the run names losses or DeepSpeed.
    """
    yield from observers.problems(config)
    if config.train.loss_weights:
        from frontier_llm.model import losses

        try:
            losses.select(config.train.loss_weights)
        except FrontierError as error:
            yield from error.problems
    if config.optimizer.engine == "deepspeed":
        yield from _deepspeed_problems(config, microbatches)


def resume_problems(config: RunConfig, allowed: Sequence[str]) -> Iterator[Problem]:
    """Yield problems if the newest checkpoint was made with other mathematics than `config`.

    The keys in `allowed` can differ.
    """
    checkpoints = Path(config.train.run_dir) / "checkpoints"
    if not any(checkpoints.glob("step_*")):  # importing torch takes two seconds
        return
    from frontier_llm.checkpoint import inspect

    try:
        inspect.check_resume(checkpoints, config, allowed)
    except FrontierError as error:
        yield from error.problems


def _deepspeed_problems(config: RunConfig, microbatches: int) -> Iterator[Problem]:
    from frontier_llm.config.deepspeed import INSTALL, deepspeed_settings
    from frontier_llm.ops.deepspeed_ops import missing_ops
    from frontier_llm.run.rank_env import environment

    if importlib.util.find_spec("deepspeed") is None:
        fix = f"{INSTALL}, or set optimizer.engine=native"
        yield Problem("optimizer.engine", "deepspeed is not installed", fix)
        return
    try:
        deepspeed_settings(config, microbatches)
    except FrontierError as error:
        yield from error.problems
        return
    yield from missing_ops(config, environment())
