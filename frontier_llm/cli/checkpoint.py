"""frontier-llm checkpoint list|verify|diff|push|pull|import-hf|import-megatron|export-hf.

The exit code is 1 if a checkpoint is damaged or if two differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from frontier_llm.cli import interchange, remote
from frontier_llm.cli.arguments import JSON, Command, ProgressBar, command, option, show
from frontier_llm.errors import CheckpointError, Problem
from frontier_llm.tables import aligned
from frontier_llm.units import format_age, format_bytes, format_count, format_seconds, printable, strict_json

if TYPE_CHECKING:
    from frontier_llm.checkpoint.inspect import Difference


PLACE = option(
    "path",
    metavar="CHECKPOINT",
    help="run directory, checkpoints folder, one checkpoint, or the URL of one of them",
)


@dataclass(frozen=True)
class _Found:
    """A checkpoint at a path or at a URL."""

    path: str
    summary: Callable[[], dict[str, Any]]
    verify: Callable[[Callable[[int, int], None]], list[Problem]]
    size_bytes: Callable[[], int]


def _found(place: str) -> list[_Found]:
    """Return the checkpoints at a path or URL, oldest first. Raises CheckpointError if there is none."""
    from frontier_llm.config.urls import is_url

    if is_url(place):
        from frontier_llm.checkpoint.remote import at_url, summary, verify

        return [_Found(str(one), partial(summary, one), partial(verify, one), one.size_bytes) for one in at_url(place)]
    from frontier_llm.checkpoint import inspect

    return [
        _Found(str(path), partial(inspect.summary, path), partial(inspect.verify, path), partial(_size_bytes, path))
        for path in inspect.find(Path(place))
    ]


def _size_bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.glob("*"))


@command(
    PLACE,
    JSON,
    line="show the complete checkpoints of a run",
    examples=("frontier-llm checkpoint list runs/quickstart",),
)
def _list(args: argparse.Namespace) -> int:
    from frontier_llm.checkpoint.directory import DeletedCheckpoint

    rows = []
    for found in _found(args.path):
        try:
            rows.append(found.summary())
        except DeletedCheckpoint:
            continue
        except CheckpointError as error:
            rows.append({"path": found.path, "damaged": str(error)})
    head = ("checkpoint", "model", ">tokens", ">size", ">shards", "written as", "age", "")
    show(args, rows, lambda: aligned(head, map(_list_row, rows)))
    damages = [row["damaged"] for row in rows if "damaged" in row]
    if damages and not args.json:
        print(*(f"\n{damage}" for damage in damages), sep="\n", file=sys.stderr)
    return int(bool(damages))


def _list_row(row: dict[str, Any]) -> tuple[str, ...]:
    name = Path(row["path"]).name
    if "damaged" in row:
        return (name, "DAMAGED", *[""] * 6)
    written_unix_s = row["written_unix_s"]
    age = "unknown" if written_unix_s is None else format_age(time.time() - written_unix_s)
    pointer = " ".join(name.upper() for name in ("latest", "best") if row[name])
    return (
        name,
        row["model"],
        format_count(row["tokens"]),
        format_bytes(row["bytes"]),
        str(row["shards"]),
        row["layout"],
        age,
        pointer,
    )


@command(
    PLACE,
    JSON,
    line="read every byte and compare it with its digest",
    examples=("frontier-llm checkpoint verify runs/quickstart",),
)
def _verify(args: argparse.Namespace) -> int:
    from frontier_llm.checkpoint.directory import DeletedCheckpoint

    results = {}
    for found in _found(args.path):
        started_s = time.monotonic()
        line = ProgressBar()
        name = found.path.rpartition("/")[2]
        try:
            problems = found.verify(line.on(name, "shards"))
        except DeletedCheckpoint:
            print(f"{printable(name)}  was deleted by its run while it was read", file=sys.stderr)
            continue
        finally:
            line.close()
        results[found.path] = problems
        if not args.json:
            read = f"{format_bytes(found.size_bytes())} read in {format_seconds(time.monotonic() - started_s)}"
            print(f"{printable(name)}  {'DAMAGED' if problems else 'intact'}  {read}", flush=True)
            for problem in problems:
                print(f"  {problem}", file=sys.stderr)
    if args.json:
        print(strict_json({path: [asdict(problem) for problem in problems] for path, problems in results.items()}))
    return int(any(results.values()))


@command(
    option(
        "first",
        type=Path,
        metavar="CHECKPOINT",
        help="run directory or checkpoints folder (of which the newest checkpoint is used), or one checkpoint",
    ),
    JSON,
    option(
        "second",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoint with which the first one is compared",
    ),
    line="compare two checkpoints, which may have different layouts",
    examples=("frontier-llm checkpoint diff runs/a runs/b",),
)
def _diff(args: argparse.Namespace) -> int:
    from frontier_llm.checkpoint.inspect import compare, find

    first = find(args.first)[-1]  # the newest checkpoint
    second = find(args.second)[-1]
    result = compare(first, second)
    show(args, {**asdict(result), "same_state": result.same_state}, lambda: "\n".join(_difference_lines(result, args)))
    return int(not result.same_state)


def _difference_lines(result: Difference, args: argparse.Namespace) -> Iterator[str]:
    sections = {
        "progress, configuration, environment": map(str, result.changes),
        f"only in {args.first.name}": result.only_first,
        f"only in {args.second.name}": result.only_second,
        "reshaped": result.reshaped,
    }
    for title, lines in sections.items():
        if text := "\n".join(f"  {shorten(line, 160, placeholder=' …')}" for line in lines):
            yield f"{title}\n{text}"
    if result.tensors:
        rows = [
            (one.name, one.kind, f"{one.differing:,} of {one.elements:,}", f"{one.largest:.3g}")
            for one in result.tensors
        ]
        yield "tensors"
        yield aligned(("name", "kind", ">elements that differ", ">by at most"), rows, indent="  ")
    yield "weights and optimizer state are bit-equal" if result.same_state else "weights or optimizer state differ"


checkpoint = Command(
    about="Inspect the checkpoints of a run, and exchange models with Hugging Face. Needs no ranks and no GPUs.",
    examples=(
        "frontier-llm checkpoint list runs/quickstart",
        "frontier-llm checkpoint verify runs/quickstart",
        "frontier-llm checkpoint export-hf runs/quickstart exported/",
    ),
    actions={
        "list": _list,
        "verify": _verify,
        "diff": _diff,
        "push": remote.push,
        "pull": remote.pull,
        "import-hf": interchange.import_hf,
        "import-megatron": interchange.import_megatron,
        "export-hf": interchange.export_hf,
    },
)
