"""Predicted and measured memory of pipeline stages, as the first steps of a run record it in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from frontier_llm.run import run_dir
from frontier_llm.run.records import is_count
from frontier_llm.tables import aligned
from frontier_llm.units import GIB

KIND = "memory"  # kind of the row in metrics.jsonl


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one pipeline stage. A measured value is the maximum over the ranks of the stage."""

    stage: int
    # Memory in use on the device, also by other processes. On a CPU: the peak of the rank's resident memory.
    used_bytes: int
    predicted_bytes: int | None = None  # the planner's prediction; None: no prediction for this run.
    # Peak of the tensors in torch's allocator; None on a CPU, for which torch does not count memory
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None  # peak that torch's allocator took from the device; None on a CPU

    @property
    def error(self) -> float | None:
        """Relative error of the prediction. If it is negative, the prediction is too small."""
        return None if self.predicted_bytes is None else self.predicted_bytes / self.used_bytes - 1

    @property
    def surplus_bytes(self) -> int | None:
        """Used memory that belongs to no tensor: the allocator's slack, runtime and communicators. None on a CPU."""
        return None if self.allocated_bytes is None else self.used_bytes - self.allocated_bytes


def as_row(stages: Sequence[StageMemory]) -> dict[str, Any]:
    """Return the values of the row in metrics.jsonl."""
    return {"stages": [asdict(stage) for stage in stages]}


def read_stage_memory(directory: Path) -> tuple[StageMemory, ...]:
    """Return the newest record of a run directory. () if it has none. Rows that this program cannot write are skipped.

    Raises DamagedRecord if metrics.jsonl is not a regular file.
    """
    for row in reversed(run_dir.rows(directory)):
        stages = row.get("stages")
        if row.get("kind") == KIND and isinstance(stages, list) and stages and all(map(_is_stage, stages)):
            return tuple(StageMemory(**stage) for stage in stages)
    return ()


def _is_stage(content: Any) -> bool:
    if not isinstance(content, Mapping) or {*content} != {one.name for one in fields(StageMemory)}:
        return False
    measured = is_count(content["stage"]) and is_count(content["used_bytes"]) and content["used_bytes"] > 0
    optional = [value for name, value in content.items() if name not in ("stage", "used_bytes")]
    return measured and all(value is None or is_count(value) for value in optional)


def fullest(stages: Sequence[StageMemory]) -> StageMemory:
    """Return the stage that uses the most memory."""
    return max(stages, key=lambda stage: stage.used_bytes)


def table(stages: Sequence[StageMemory]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return heading and rows of a table: GiB of each stage, and the error of the prediction."""
    head = ["stage", ">predicted", ">used", ">error"]
    counts_tensors = stages[0].allocated_bytes is not None
    if counts_tensors:
        head[2:2] = [">allocated", ">reserved"]
    rows = []
    for stage in stages:
        row = [str(stage.stage), _gib(stage.predicted_bytes), _gib(stage.used_bytes), format_error(stage)]
        if counts_tensors:
            row[2:2] = [_gib(stage.allocated_bytes), _gib(stage.reserved_bytes)]
        rows.append(tuple(row))
    return tuple(head), rows


def describe(stages: Sequence[StageMemory], steps: int) -> Iterator[str]:
    """Yield the lines of the log: a table of the first, the fullest and the last stage."""
    shown = sorted({0, fullest(stages).stage, len(stages) - 1})
    yield f"memory after {steps} steps, {meaning(stages)}:"
    yield from aligned(*table([stages[index] for index in shown]), indent="  ").splitlines()


def meaning(stages: Sequence[StageMemory]) -> str:
    """Return the unit and the meaning of the numbers in a table."""
    used = "of the device" if stages[0].allocated_bytes is not None else "of the process, at its peak"
    return f"GiB {used}, the largest of the ranks of a stage"


def format_error(stage: StageMemory) -> str:
    """Return the error of the prediction in percent. '' without a prediction."""
    return "" if stage.error is None else f"{100 * stage.error:+.1f} %"


def _gib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / GIB:.2f}"
