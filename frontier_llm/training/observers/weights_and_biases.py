"""Weights & Biases, offline unless WANDB_MODE says otherwise: compute nodes have no way out, and `wandb sync` sends
the run later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frontier_llm.config import RunConfig
from frontier_llm.run.rank_env import environ
from frontier_llm.training.observers import Observer, scalars


class WeightsAndBiases(Observer):
    """One W&B run per run directory, however often it is resumed."""

    def __init__(self, config: RunConfig) -> None:
        import wandb

        directory = Path(config.train.run_dir).resolve()
        self._run = wandb.init(
            project=environ("WANDB_PROJECT") or "frontier_llm",
            name=directory.name,
            id=hashlib.sha256(str(directory).encode()).hexdigest()[:16],
            dir=directory,
            mode=environ("WANDB_MODE") or "offline",  # type: ignore[arg-type]  # W&B says which it knows
            resume="allow",
            config=config.model_dump(mode="json"),
            # its console capture would double every line of the log
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="train_step")  # W&B's own step may never go back, a rewound run does

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """The line's numbers under the step they belong to."""
        self._run.log({**scalars(kind, values), "train_step": step})

    def close(self) -> None:
        """Flush."""
        self._run.finish()
