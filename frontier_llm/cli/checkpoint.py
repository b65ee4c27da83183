"""frontier-llm checkpoint list|verify|diff|import-hf|import-megatron|export-hf.

The exit code is 1 if a checkpoint is damaged or if two differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from frontier_llm.cli import interchange
from frontier_llm.cli.arguments import JSON, Command, ProgressBar, command, option, show
from frontier_llm.errors import FrontierError
from frontier_llm.tables import aligned
from frontier_llm.units import format_age, format_bytes, format_count, format_seconds, printable, strict_json

if TYPE_CHECKING:
    from frontier_llm.checkpoint.inspect import Difference


@command(
    option(
        "path",
        type=Path,
        metavar="CHECKPOINT",
        help="run directory, checkpoints folder or one checkpoint",
    ),
    JSON,
    line="show the complete checkpoints of a run",
    examples=("frontier-llm checkpoint list runs/quickstart",),
)
def _list(args: argparse.Namespace) -> int:
    from frontier_llm.checkpoint.inspect import find, summary

    rows = []
    for path in find(args.path):
        try:
            rows.append(summary(path))
        except FrontierError as error:
            rows.append({"path": str(path), "damaged": str(error)})
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
    age = format_age(time.time() - row["written_unix_s"])
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
    option(
        "path",
        type=Path,
        metavar="CHECKPOINT",
        help="run directory, checkpoints folder or one checkpoint",
    ),
    JSON,
    line="read every byte and compare it with its digest",
    examples=("frontier-llm checkpoint verify runs/quickstart",),
)
def _verify(args: argparse.Namespace) -> int:
    from frontier_llm.checkpoint.inspect import find, verify

    results = {}
    for path in find(args.path):
        started_s = time.monotonic()
        line = ProgressBar()
        problems = results[str(path)] = verify(path, line.on(path.name, "shards"))
        line.close()
        if not args.json:
            size_bytes = sum(file.lstat().st_size for file in path.glob("*"))
            read = f"{format_bytes(size_bytes)} read in {format_seconds(time.monotonic() - started_s)}"
            print(f"{printable(path.name)}  {'DAMAGED' if problems else 'intact'}  {read}", flush=True)
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
        help="run directory or checkpoints folder (its newest one), or one checkpoint",
    ),
    JSON,
    option(
        "second",
        type=Path,
        metavar="CHECKPOINT",
        help="another one",
    ),
    line="compare two checkpoints, whatever layouts wrote them",
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
    about="Look into the checkpoints of a run, and exchange models with Hugging Face. No ranks, no GPUs.",
    examples=(
        "frontier-llm checkpoint list runs/quickstart",
        "frontier-llm checkpoint verify runs/quickstart",
        "frontier-llm checkpoint export-hf runs/quickstart exported/",
    ),
    actions={
        "list": _list,
        "verify": _verify,
        "diff": _diff,
        "import-hf": interchange.import_hf,
        "import-megatron": interchange.import_megatron,
        "export-hf": interchange.export_hf,
    },
)
