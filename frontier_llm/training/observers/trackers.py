"""Observers that send a run's metrics to an experiment tracker: TensorBoard, Weights & Biases, MLflow.

TensorBoard's event files are in the folder `events/` of the run directory.

Weights & Biases is offline unless WANDB_MODE sets another mode, because compute nodes have no internet access.
`wandb sync` uploads the run later.

MLflow writes to `mlflow.db` in the run directory unless MLFLOW_TRACKING_URI names a server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from frontier_llm import log
from frontier_llm.config import RunConfig
from frontier_llm.files import folder_below, write_atomically
from frontier_llm.run.rank_env import environ
from frontier_llm.training.observers import Observer, scalars


class Events(Observer):
    """Writes scalars for TensorBoard.

    If the package `tensorboard` is not installed, nothing is written, and `cli.checks.check` reports it.
    """

    def __init__(self, config: RunConfig) -> None:
        self._directory = Path(config.train.run_dir) / "events" if find_spec("tensorboard") else None
        self._writer: Any = None

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write the scalars of a line. After a start or rewind, TensorBoard drops the earlier events of later steps."""
        if kind in ("start", "rewind") and self._directory is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.close()
            folder_below(self._directory.parent, self._directory.name)
            self._writer = SummaryWriter(str(self._directory), purge_step=step + 1)
        if self._writer is None or "layout" in values:  # a line with a layout has no scalars
            return
        try:
            for name, number in scalars(kind, values).items():
                self._writer.add_scalar(name, number, step)
        except OSError as error:  # raised by TensorBoard's own writer thread, which has ended
            log.warn(f"TensorBoard's events end at step {step}: {error.strerror}; metrics.jsonl is still written")
            self._writer = None

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            with suppress(OSError):  # the disk can be full, and then writing the last events fails
                self._writer.close()
            self._writer = None


class WeightsAndBiases(Observer):
    """Logs to Weights & Biases. A run directory is one W&B run, which a resume continues."""

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
        # W&B's own step must never decrease, but a rewind decreases the training step.
        self._run.define_metric("*", step_metric="train_step")

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Log the numbers of a line with their step."""
        self._run.log({**scalars(kind, values), "train_step": step})

    def close(self) -> None:
        """Flush and close."""
        self._run.finish()


class MlflowRun(Observer):
    """Logs to MLflow. A run directory is one MLflow run, which a resume continues. `mlflow_run_id` holds its id."""

    def __init__(self, config: RunConfig) -> None:
        from mlflow.tracking import MlflowClient

        directory = Path(config.train.run_dir).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(environ("MLFLOW_TRACKING_URI") or f"sqlite:///{directory}/mlflow.db")
        known = directory / "mlflow_run_id"
        if known.is_file():
            self._run_id = known.read_text(encoding="utf-8").strip()
            return
        name = environ("MLFLOW_EXPERIMENT_NAME") or "frontier_llm"
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._run_id = self._client.create_run(experiment_id, run_name=directory.name).info.run_id
        for section, keys in config.model_dump(mode="json").items():
            for key, value in (keys if isinstance(keys, dict) else {"": keys}).items():
                self._client.log_param(self._run_id, f"{section}.{key}".rstrip("."), value)
        write_atomically(known, self._run_id)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Log the numbers of a line at its step."""
        for name, number in scalars(kind, values).items():
            self._client.log_metric(self._run_id, name, number, step=step)

    def close(self) -> None:
        """Mark the MLflow run as ended. The next start of a resumed run continues it."""
        self._client.set_terminated(self._run_id)
