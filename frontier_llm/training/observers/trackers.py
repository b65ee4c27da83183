"""Observers that send a run's metrics to an experiment tracker: TensorBoard, Weights & Biases, MLflow.

An error of a tracker ends the record in this tracker until the next start, but never the run.

TensorBoard's event files are in the folder `events/` of the run directory.

Weights & Biases is offline unless WANDB_MODE sets another mode, because compute nodes have no internet access.
`wandb sync` uploads the run later.

MLflow writes to `mlflow.db` in the run directory unless MLFLOW_TRACKING_URI names a server.
"""

from __future__ import annotations

import hashlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from frontier_llm import log
from frontier_llm.config import RunConfig
from frontier_llm.errors import FrontierError
from frontier_llm.files import folder_below, write_atomically
from frontier_llm.run.rank_env import environ
from frontier_llm.training.observers import Observer, scalars

MLFLOW_MAX_VALUE = 6000  # characters of a parameter's value; an MLflow server may refuse longer values


class Tracker(Observer, ABC):
    """Base class of trackers. A subclass implements `_open`, `_record` and `_close`, which may raise any exception."""

    name: ClassVar[str]

    def __init__(self, config: RunConfig) -> None:
        self._has_failed = False
        self._attempt("at the start", lambda: self._open(config))

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of a line with their step."""
        self._attempt(f"at step {step}", lambda: self._record(kind, step, values))

    def close(self) -> None:
        """Flush and close."""
        self._attempt("at the end of the run", self._close)

    def _attempt(self, when: str, action: Callable[[], None]) -> None:
        """Call `action`, unless an earlier call has failed: a server that does not respond delays every call."""
        if self._has_failed:
            return
        try:
            action()
        except FrontierError:  # a refusal of this package, such as a link in the run directory
            raise
        except Exception as error:  # trackers have exceptions of their own, which are no OSError
            self._has_failed = True
            cause = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            log.warn(f"the record in {self.name} ends {when}: {cause}; metrics.jsonl is still written")

    @abstractmethod
    def _open(self, config: RunConfig) -> None: ...

    @abstractmethod
    def _record(self, kind: str, step: int, values: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


class Events(Tracker):
    """Writes scalars for TensorBoard.

    If the package `tensorboard` is not installed, nothing is written, and `cli.checks.check` reports it.
    """

    name = "TensorBoard"

    def _open(self, config: RunConfig) -> None:
        self._directory = Path(config.train.run_dir) / "events" if find_spec("tensorboard") else None
        self._writer: Any = None

    def _record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write the scalars of a line. After a start or rewind, TensorBoard drops the earlier events of later steps."""
        if kind in ("start", "rewind") and self._directory is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._close()
            folder_below(self._directory.parent, self._directory.name)
            self._writer = SummaryWriter(str(self._directory), purge_step=step + 1)
        if self._writer is None or "layout" in values:  # a line with a layout has no scalars
            return
        for name, number in scalars(kind, values).items():
            self._writer.add_scalar(name, number, step)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases(Tracker):
    """Logs to Weights & Biases. A run directory is one W&B run, which a resume continues."""

    name = "Weights & Biases"

    def _open(self, config: RunConfig) -> None:
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

    def _record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**scalars(kind, values), "train_step": step})

    def _close(self) -> None:
        self._run.finish()


class MlflowRun(Tracker):
    """Logs to MLflow. A run directory is one MLflow run, which a resume continues. `mlflow_run_id` holds its id."""

    name = "MLflow"

    def _open(self, config: RunConfig) -> None:
        from mlflow.tracking import MlflowClient

        directory = Path(config.train.run_dir).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(environ("MLFLOW_TRACKING_URI") or f"sqlite:///{directory}/mlflow.db")
        known = directory / "mlflow_run_id"
        if known.is_file():
            self._run_id = known.read_text(encoding="utf-8").strip()
            return
        experiment_name = environ("MLFLOW_EXPERIMENT_NAME") or "frontier_llm"
        experiment = self._client.get_experiment_by_name(experiment_name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(experiment_name)
        self._run_id = self._client.create_run(experiment_id, run_name=directory.name).info.run_id
        write_atomically(known, self._run_id)  # before the next requests, so that a failure leaves no second run
        for section, keys in config.model_dump(mode="json").items():
            for key, value in (keys if isinstance(keys, dict) else {"": keys}).items():
                name = f"{section}.{key}".rstrip(".")
                self._client.log_param(self._run_id, name, str(value)[:MLFLOW_MAX_VALUE])

    def _record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [
            # MLflow refuses names with other characters, such as the parentheses of "tp (blocked)"
            Metric(re.sub(r"[^\w./ -]", "", name), number, now_ms, step)
            for name, number in scalars(kind, values).items()
        ]
        self._client.log_batch(self._run_id, metrics)

    def _close(self) -> None:
        """Mark the MLflow run as ended. The next start of a resumed run continues it."""
        self._client.set_terminated(self._run_id)
