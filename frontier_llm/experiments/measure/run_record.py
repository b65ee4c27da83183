"""What a run directory says about a run: its steps, and the layouts that they ran on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frontier_llm.config import RunConfig, build, own_plugins
from frontier_llm.config.load import read_yaml
from frontier_llm.config.plugins import import_recorded, recorded_names
from frontier_llm.errors import DataError
from frontier_llm.run import run_dir
from frontier_llm.topology.plan import ParallelPlan, plan_as_given


@dataclass(frozen=True)
class LayoutSpan:
    """Steps of a run on one layout."""

    after_step: int
    incarnation: int  # that began it
    plan: ParallelPlan

    @property
    def name(self) -> str:
        """'TP2 x PP2 x DP1'."""
        return self.plan.grid.describe()


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says about a run."""

    directory: Path
    config: RunConfig  # of the last attempt
    parts: tuple[LayoutSpan, ...]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    operations: dict[str, dict[str, Any]]  # of rank 0 in the last attempt that has written them down (Ledger.summary)
    moved_on: LayoutSpan  # the layout of that attempt
    name: str  # of its curves


def read_run(directory: Path, plugins: Sequence[str] = ()) -> RunRecord:
    """Load a run directory. Lines of a torn metrics file are skipped.

    The run's plugins are imported, from `plugins`, which the user named, or as config.yaml names them if it belongs to
    this user. Raises DataError when the directory holds no run, ConfigError for a plugin that is needed and not named.
    """
    missing = [name for name in ("config.yaml", "plan.json", "metrics.jsonl") if not (directory / name).is_file()]
    if missing:
        raise DataError(
            f"{directory} is not a run directory: it lacks {', '.join(missing)}", fix="give the train.run_dir of a run"
        )
    content = read_yaml(directory / "config.yaml")
    where = str(directory / "config.yaml")
    config = build(RunConfig, content, where)
    import_recorded(recorded_names(content), given=plugins, own=own_plugins(directory), where=where)
    parts = tuple(_span(content, row, where) for row in run_dir.layouts(directory)) or (_only_span(config, directory),)
    moved: dict[str, Any] = next(
        (row for row in reversed(run_dir.rows(directory)) if row.get("kind") == "communication"), {}
    )
    moved_on = [part for part in parts if part.incarnation <= moved.get("incarnation", 0)] or parts
    names = list(dict.fromkeys(part.name for part in parts))
    name = names[0] if len(names) == 1 else f"{len(names)} layouts"
    return RunRecord(
        directory=directory,
        config=config,
        parts=parts,
        steps=run_dir.steps(directory),
        evaluations=run_dir.evaluations(directory),
        tasks=run_dir.tasks(directory),
        operations=moved.get("operations", {}),
        moved_on=moved_on[-1],
        name=name,
    )


def _span(content: Mapping[str, Any], row: Mapping[str, Any], where: str) -> LayoutSpan:
    """The plan of an attempt from the configuration with its own layout (`metrics.layout_of`)."""
    parallel = dict(row["layout"])
    batch = {**content["batch"], "micro_batch": parallel.pop("micro_batch")}
    config = build(RunConfig, {**content, "parallel": parallel, "batch": batch}, where)
    world_size = parallel["tensor"] * parallel["pipeline"] * parallel["data"]
    return LayoutSpan(row["step"], row["incarnation"], plan_as_given(config, world_size))


def _only_span(config: RunConfig, directory: Path) -> LayoutSpan:
    """A run from before layouts were written into metrics.jsonl: all that is known is the last."""
    grid = json.loads((directory / "plan.json").read_text(encoding="utf-8"))["grid"]
    return LayoutSpan(0, 0, plan_as_given(config, grid["tp"] * grid.get("cp", 1) * grid["pp"] * grid["dp"]))


def told_apart(records: list[RunRecord]) -> list[RunRecord]:
    """Runs of one layout are named by their directories."""
    layouts = [record.name for record in records]
    names = [record.directory.resolve().name for record in records]
    own = names if len(set(names)) == len(names) else [str(record.directory) for record in records]
    return [
        record if layouts.count(record.name) == 1 else replace(record, name=f"{name}, {record.name}")
        for record, name in zip(records, own, strict=True)
    ]
