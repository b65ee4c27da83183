"""frontier-llm checkpoint list|verify|diff|import-hf|export-hf; exit code 1 when a checkpoint is damaged or two differ."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from frontier_llm.cli import huggingface
from frontier_llm.errors import FrontierError
from frontier_llm.units import format_bytes, format_count


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command and its actions."""
    parser = subparsers.add_parser("checkpoint", help="list, verify, compare, import and export checkpoints")
    actions = parser.add_subparsers(dest="action", required=True)
    _add(actions, "list", "the complete checkpoints of a run", _list, "path", "run directory, checkpoints folder or one checkpoint")
    _add(
        actions,
        "verify",
        "read every byte and compare it with its digest",
        _verify,
        "path",
        "run directory, checkpoints folder or one checkpoint",
    )
    diff = _add(actions, "diff", "compare two checkpoints, whatever layouts wrote them", _diff, "first", "a step_… folder")
    diff.add_argument("second", type=Path, help="another one")
    huggingface.add_commands(actions)


def _add(
    actions: argparse._SubParsersAction, name: str, line: str, work: Callable[[argparse.Namespace], int], argument: str, what: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=line, description=line)
    parser.add_argument(argument, type=Path, help=what)
    parser.add_argument("--json", action="store_true", help="machine-readable result on stdout")
    parser.set_defaults(work=work)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the chosen action."""
    return int(args.work(args))


def _list(args: argparse.Namespace) -> int:
    from frontier_llm.checkpoint.inspect import find, summary

    rows, damaged = [], False
    for path in find(args.path):
        try:
            rows.append(summary(path))
        except FrontierError as error:
            damaged = True
            rows.append({"path": str(path), "damaged": str(error)})
    if args.json:
        print(json.dumps(rows, indent=1))
        return int(damaged)
    for row in rows:
        if "damaged" in row:
            print(f"{Path(row['path']).name}  DAMAGED: {row['damaged']}")
            continue
        pointer = "  ← LATEST" if row["latest"] else ""
        tokens, size = format_count(row["tokens"]), format_bytes(row["bytes"])
        print(
            f"{Path(row['path']).name}  {row['model']}  {tokens} tokens  {size} in {row['shards']} shards  written as {row['layout']}{pointer}"
        )
    return int(damaged)


def _verify(args: argparse.Namespace) -> int:
    from frontier_llm.checkpoint.inspect import find, verify

    results = {str(path): verify(path) for path in find(args.path)}
    if args.json:
        print(json.dumps({path: [asdict(problem) for problem in problems] for path, problems in results.items()}, indent=1))
    else:
        for path, problems in results.items():
            print(f"{path}  {'DAMAGED' if problems else 'intact'}")
            for problem in problems:
                print(f"  {problem}", file=sys.stderr)
    return int(any(results.values()))


def _diff(args: argparse.Namespace) -> int:
    from frontier_llm.checkpoint.inspect import compare

    result = compare(args.first, args.second)
    if args.json:
        print(json.dumps({**asdict(result), "same_state": result.same_state}, indent=1))
        return int(not result.same_state)
    for change in result.changes:
        print(change)
    for label, names in (
        ("only in the first", result.only_first),
        ("only in the second", result.only_second),
        ("reshaped", result.reshaped),
    ):
        for name in names:
            print(f"{label}: {name}")
    for tensor in result.tensors:
        print(f"{tensor.kind} of {tensor.name}: {tensor.differing} of {tensor.elements} elements differ, by at most {tensor.largest:.3g}")
    if result.same_state:
        print("weights and optimizer state are bit-equal")
    return int(not result.same_state)
