"""Observer for MLflow. It writes to `mlflow.db` in the run directory unless MLFLOW_TRACKING_URI names a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frontier_llm.config import RunConfig
from frontier_llm.files import write_atomically
from frontier_llm.run.rank_env import environ
from frontier_llm.training.observers import Observer, scalars


class MlflowRun(Observer):
    """One MLflow run per run directory, also over resumes. `mlflow_run_id` holds its id."""

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
