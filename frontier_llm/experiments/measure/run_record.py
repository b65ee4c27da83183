"""Reads a run directory: the recorded steps of the run and their parallel layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from frontier_llm.config import RunConfig, build, own_plugins
from frontier_llm.config.load import read_yaml
from frontier_llm.config.plugins import import_recorded, recorded_names
from frontier_llm.data.recorded import position_of
from frontier_llm.errors import DataError
from frontier_llm.run import run_dir
from frontier_llm.run.evaluations import Evaluated, all_results
from frontier_llm.run.stage_memory import StageMemory, read_stage_memory
from frontier_llm.topology.plan import ParallelPlan, plan_as_given


@dataclass(frozen=True)
class LayoutSpan:
    """Consecutive steps of a run with the same layout."""

    after_step: int  # number of steps done before the span
    incarnation: int  # number of the start of the run (incarnation) that began the span
    plan: ParallelPlan

    @property
    def name(self) -> str:
        """Layout as text, such as 'TP2 x PP2 x DP1'."""
        return self.plan.grid.describe()


@dataclass(frozen=True)
class RunRecord:
    """Content of a run directory."""

    directory: Path
    config: RunConfig  # configuration of the last attempt
    parts: tuple[LayoutSpan, ...]  # spans of steps with one layout, in order
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    blend_changes: tuple[int, ...]  # steps after which the run has read its sources with other weights
    operations: dict[str, dict[str, Any]]  # Ledger.summary of rank 0 in the last attempt that recorded it
    moved_on: LayoutSpan  # span of the attempt that recorded `operations`, with its layout
    name: str  # name of the run in figures
    evaluated: tuple[Evaluated, ...] = ()  # results of `evaluate --follow`, in ascending order of steps
    memory: tuple[StageMemory, ...] = ()  # memory of each pipeline stage after the newest start's first steps


def read_run(directory: Path, plugins: Sequence[str] = ()) -> RunRecord:
    """Load a run directory. Incomplete lines of the metrics file are skipped.

    The run's plugins are imported. If the directory belongs to this user, config.yaml may name them. Otherwise the
    user must name them in `plugins`. Raises DataError if the directory holds no run, ConfigError if a plugin is needed
    but not named.
    """
    missing = [name for name in ("config.yaml", "plan.json", "metrics.jsonl") if not (directory / name).is_file()]
    if missing:
        what = f"{directory.absolute()} is not a run directory: it lacks {', '.join(missing)}"
        raise DataError(what, fix="give the train.run_dir of a run")
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
        blend_changes=blend_changes(run_dir.rows(directory)),
        operations=moved.get("operations", {}),
        moved_on=moved_on[-1],
        name=name,
        evaluated=tuple(all_results(directory)),
        memory=read_stage_memory(directory),
    )


def blend_changes(rows: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the steps after which a record of the data names other weights than the previous record."""
    blends = []
    for row in rows:
        if row.get("kind") == "data" and (position := position_of(row)):
            weights = {position.streams[share.stream].dataset: share.weight for share in position.blend}
            blends.append((row["step"], weights))
    return tuple(step for (_, before), (step, after) in pairwise(blends) if after != before)


def _span(content: Mapping[str, Any], row: Mapping[str, Any], where: str) -> LayoutSpan:
    """Return the span that an attempt began, with the layout that the attempt recorded (`metrics.layout_of`)."""
    parallel = dict(row["layout"])
    batch = {**content["batch"], "micro_batch": parallel.pop("micro_batch")}
    config = build(RunConfig, {**content, "parallel": parallel, "batch": batch}, where)
    world_size = config.parallel.model_ranks * parallel["data"]
    return LayoutSpan(row["step"], row["incarnation"], plan_as_given(config, world_size))


def _only_span(config: RunConfig, directory: Path) -> LayoutSpan:
    """Return one span for all steps of an old run whose metrics.jsonl records no layouts."""
    grid = json.loads((directory / "plan.json").read_text(encoding="utf-8"))["grid"]
    return LayoutSpan(0, 0, plan_as_given(config, grid["tp"] * grid.get("cp", 1) * grid["pp"] * grid["dp"]))


def told_apart(records: list[RunRecord]) -> list[RunRecord]:
    """Return the records with unique names: directory and layout. A single run is named by its layout."""
    if len(records) == 1:
        return records
    names = [record.directory.resolve().name for record in records]
    own = names if len(set(names)) == len(names) else [str(record.directory) for record in records]
    return [replace(record, name=f"{name}, {record.name}") for record, name in zip(records, own, strict=True)]
