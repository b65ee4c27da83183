"""The scalars that a run continues from, between the training state and a checkpoint; the tensors are the checkpoint
room's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from frontier_llm.checkpoint.manifest import Progress
from frontier_llm.data.position import START
from frontier_llm.training.build import BestLoss, TrainState


@dataclass(frozen=True)
class Resume:
    """How the user wants to continue."""

    strict: bool = False  # a damaged newest checkpoint stops the run instead of falling back to the one before
    allow_changes: tuple[str, ...] = ()  # keys of the configuration that may change the mathematics
    leave_out: int = 0  # samples that nothing is trained on, from where the run goes on
    restart_sources: tuple[str, ...] = ()  # paths of datasets that are read from their beginning, in another order


AS_BEFORE = Resume()  # with the values of the checkpoint


def progress_of(state: TrainState, rewinds: list[dict[str, Any]]) -> Progress:
    """Where the run is now; `rewinds` are those of its course so far."""
    best = {} if state.best is None else {"best": asdict(state.best)}
    return Progress(
        step=state.current_step,
        consumed_samples=state.position.samples,
        tokens=state.position.tokens,
        position=state.position,
        optimizer_updates=state.optimizer.updates,
        loss_scale=state.scaler.scale,
        scaler_clean_steps=state.scaler.clean_steps,
        skipped_steps=state.skipped_steps,
        policy={**state.spikes.state(), "rewinds": rewinds, **best},
    )


def restore(state: TrainState, progress: Progress) -> None:
    """Put the scalars back."""
    state.current_step = progress.step
    state.skipped_steps = progress.skipped_steps
    state.optimizer.updates = progress.optimizer_updates
    state.scaler.scale = progress.loss_scale
    state.scaler.clean_steps = progress.scaler_clean_steps
    state.spikes.restore(progress.policy)
    state.best = BestLoss(**progress.policy["best"]) if "best" in progress.policy else None
    state.position = progress.position or START  # weights that were imported have none
