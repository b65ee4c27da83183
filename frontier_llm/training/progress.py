"""Copies the scalars of a run (step, position in the data, loss scale, …) from the training state to a checkpoint and
back. It also collects the facts of the job that a checkpoint records. `checkpoint/` saves the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from frontier_llm.checkpoint.facts import JobFacts
from frontier_llm.checkpoint.manifest import Progress
from frontier_llm.comm import broadcast_json
from frontier_llm.config import RunConfig, plugins
from frontier_llm.data.identity import Dataset, datasets_of
from frontier_llm.data.position import START
from frontier_llm.run.rank_env import environ, start_number
from frontier_llm.training.build import BestLoss, TrainState
from frontier_llm.training.guard.provenance import provenance


@dataclass(frozen=True)
class Resume:
    """The user's options for resuming a run."""

    strict: bool = False  # If the newest checkpoint is damaged, stop instead of loading an older checkpoint.
    # Configuration keys that the user allows to change, although this may change the mathematics.
    allow_changes: tuple[str, ...] = ()
    leave_out: int = 0  # number of samples to skip at the position from which the run continues
    restart_sources: tuple[str, ...] = ()  # paths of datasets that are read from their beginning, in another order


AS_BEFORE = Resume()  # default: continue without changes


def progress_of(state: TrainState, rewinds: list[dict[str, Any]]) -> Progress:
    """Return the scalars of the training state for a checkpoint. `rewinds` lists the run's rewinds so far."""
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
    """Copy the scalars of a checkpoint into the training state."""
    state.current_step = progress.step
    state.skipped_steps = progress.skipped_steps
    state.optimizer.updates = progress.optimizer_updates
    state.scaler.scale = progress.loss_scale
    state.scaler.clean_steps = progress.scaler_clean_steps
    state.spikes.restore(progress.policy)
    state.best = BestLoss(**progress.policy["best"]) if "best" in progress.policy else None
    state.position = progress.position or START  # imported weights have no position


def run_datasets(config: RunConfig, state: TrainState) -> dict[str, Dataset]:
    """Return the run's datasets by path, as read by rank 0. Collective over the world."""
    found = datasets_of([config]) if state.mesh.world.rank == 0 else {}
    found = broadcast_json(found, state.mesh.world, state.device)
    return {path: Dataset(*dataset) for path, dataset in found.items()}


def job_facts(config: RunConfig, state: TrainState, datasets: Mapping[str, Dataset]) -> JobFacts:
    """Return the facts of this job that every checkpoint records.

    Only rank 0 records environment and plugins, because it writes the manifest.
    """
    is_first = state.mesh.world.rank == 0
    return JobFacts(
        config=config.model_dump(mode="json"),
        environment=provenance(state.device, state.stages[0].context.ops) if is_first else {},
        plugins=plugins.records_of(config.plugins) if is_first else (),
        datasets=datasets,
        job=environ("SLURM_JOB_ID", "") or "",
        restart=int(environ("SLURM_RESTART_COUNT", "0") or 0),
        incarnation=start_number(),
    )
