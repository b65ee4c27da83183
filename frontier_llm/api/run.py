"""Runs from Python: load a run file or a dictionary, find the runs of a folder, read a run's metrics."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from frontier_llm import log
from frontier_llm.config import RunConfig, dump
from frontier_llm.config import load_run as read_run
from frontier_llm.config.durations import as_content
from frontier_llm.config.load import read_yaml
from frontier_llm.errors import ConfigError, FrontierError
from frontier_llm.files import write_atomically
from frontier_llm.run import run_dir as records
from frontier_llm.units import strict_json


@dataclass(frozen=True)
class Run:
    """A valid, frozen run configuration, as returned by `load_run`."""

    config: RunConfig

    @property
    def run_dir(self) -> Path:
        """Directory of the run's logs, metrics and checkpoints."""
        return Path(self.config.train.run_dir)

    def with_(self, overrides: Mapping[str, Any]) -> Run:
        """Return the run with other values, for example `run.with_({"train.steps": 5})`. Raises FrontierError."""
        return load_run(self, overrides)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration with the keys of a run file.

        `train.steps` is missing if the run has phases in tokens or epochs: it is the sum of their steps.
        """
        return as_content(self.config)

    def to_yaml(self) -> str:
        """Return the text of a run file that loads to the same configuration."""
        return dump(self.config)

    def write(self, path: str | Path) -> Path:
        """Write the run file, for `frontier-llm train` or `submit`. Returns its path."""
        write_atomically(Path(path), self.to_yaml())
        return Path(path)


def load_run(
    source: str | Path | Mapping[str, Any] | Run,
    overrides: Mapping[str, Any] | None = None,
    /,
    **more: Any,
) -> Run:
    """Load a run.

    `source` is the path of a run file, the name of a shipped run, or a dictionary with the keys of a run file.
    `overrides` replaces values by their keys in YAML: `load_run("quickstart", {"train.steps": 5})`. Keys without a dot
    can also be keyword arguments: `load_run("quickstart", machine="mi250")`.

    Raises FrontierError with every unknown key and wrong value. The error's `.what`, `.why` and `.fix` describe the
    first problem.
    """
    words = [
        f"{key}={strict_json(_plain(value, key), indent=None, ensure_ascii=False)}"
        for key, value in {**(overrides or {}), **more}.items()
    ]
    if isinstance(source, Run):
        is_named = "machine" in source.config.model_fields_set  # `plan` uses the machine only if the run names it
        source = source.to_dict()
        if not is_named:
            del source["machine"]
    if isinstance(source, Mapping):
        # Relative paths in a dictionary are relative to the working directory, not to the temporary folder of this
        # file.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "dictionary.yaml"
            write_atomically(path, yaml.safe_dump(_plain(source), sort_keys=False))
            return Run(read_run(str(path), words, "overrides"))
    return Run(read_run(str(source), words, "overrides"))


def _plain(value: Any, where: str = "") -> Any:
    """Return a value with only types of YAML: paths become text, NumPy's numbers and arrays become Python's.

    Raises ConfigError for other types.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}" if where else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), where)
    if value is None or isinstance(value, str | int | float):
        return value
    raise ConfigError(
        f"has the type {type(value).__name__}",
        where=where,
        fix="give text, a number, a list or a dictionary",
    )


def list_runs(folder: str | Path = "runs") -> list[dict[str, Any]]:
    """Return the runs in `folder`, sorted by name.

    Each run is a dictionary with these keys: `path`, `model`, `steps` (planned), `step` (newest complete checkpoint),
    `logged_step` and `loss` (last row of the metrics; None before the first). Other directories are left out with a
    warning. Raises FrontierError if `folder` does not exist.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError("is not a directory", "give the folder that holds the run directories", str(folder))
    found = []
    for path in sorted(file.parent for file in folder.glob("*/config.yaml")):
        try:
            found.append(_described(path))
        except (FrontierError, KeyError, TypeError) as error:
            log.warn(f"{path} is left out: its config.yaml or its records are not those of a run ({error})")
    return found


def _described(path: Path) -> dict[str, Any]:
    content = read_yaml(path / "config.yaml")
    rows = records.steps(path)
    return {
        "path": path,
        "model": content["model"]["name"],
        "steps": content["train"]["steps"],
        "step": records.latest_step(path),
        "logged_step": rows[-1]["step"] if rows else None,
        "loss": rows[-1]["loss"] if rows else None,
    }


def read_metrics(run: str | Path | Run) -> Any:
    """Return a run's training metrics, one row per recorded step, in ascending order of steps.

    The result is a pandas DataFrame if pandas is installed, and a list of dictionaries otherwise. Losses are in nats
    per token. Raises FrontierError if the run has no metrics yet.
    """
    path = run.run_dir if isinstance(run, Run) else Path(run)
    rows = records.steps(path)
    if not rows:
        raise ConfigError("has no metrics yet", "give the directory of a run that has trained", str(path))
    return as_table(rows)


def as_table(rows: list[dict[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame if pandas is installed. Otherwise return the list itself."""
    if importlib.util.find_spec("pandas") is None:
        return rows
    import pandas as pd

    return pd.DataFrame(rows)
