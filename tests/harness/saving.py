"""Saves checkpoints of a training state that a test has built itself."""

from __future__ import annotations

from pathlib import Path

from frontier_llm.checkpoint.checkpoints import Checkpoints
from frontier_llm.checkpoint.facts import JobFacts
from frontier_llm.checkpoint.manifest import Progress
from frontier_llm.training.build import TrainState


def checkpoints_of(state: TrainState, run_dir: Path, *allowed: str) -> Checkpoints:
    """Return the checkpoints of a run in `run_dir`. Collective."""
    config = state.config
    train = config.train.model_copy(update={"run_dir": str(run_dir)})
    facts = JobFacts(config=config.model_dump(mode="json"))
    return Checkpoints(train, state.mesh, state.optimizer, facts, allowed)


def save_step(state: TrainState, run_dir: Path, step: int, samples: int = 0, tokens: int = 0) -> None:
    """Save the state after `step` steps, none of which was skipped. Collective."""
    progress = Progress(
        step=step,
        consumed_samples=samples,
        tokens=tokens,
        optimizer_updates=step,
        loss_scale=1.0,
        scaler_clean_steps=0,
        skipped_steps=0,
    )
    checkpoints = checkpoints_of(state, run_dir)
    checkpoints.begin(progress)
    checkpoints.close()
