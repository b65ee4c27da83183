"""Observer for Weights & Biases. It is offline unless WANDB_MODE sets another mode.

Compute nodes have no internet access. `wandb sync` uploads the run later.
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
    """One W&B run per run directory, also over resumes."""

    def __init__(self, config: RunConfig) -> None:
        import wandb

        directory = Path(config.train.run_dir).resolve()
        self._run = wandb.init(
            project=environ("WANDB_PROJECT") or "frontier_llm",
            name=directory.name,
            id=hashlib.sha256(str(directory).encode()).hexdigest()[:16],
            dir=directory,
            mode=environ("WANDB_MODE") or "offline",  # type: ignore[arg-type]  # W&B checks the value
            resume="allow",
            config=config.model_dump(mode="json"),
            # W&B's console capture would repeat every line of the log
            settings=wandb.Settings(silent=True, console="off"),
        )
        # W&B's own step may never decrease, but the step of a rewound run does
        self._run.define_metric("*", step_metric="train_step")

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Log the numbers of a line with their step."""
        self._run.log({**scalars(kind, values), "train_step": step})

    def close(self) -> None:
        """Flush and close."""
        self._run.finish()
