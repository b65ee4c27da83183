"""Which algorithm a collective takes, by operation, nodes and message size: a table in configs/algorithms, measured or estimated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from frontier_llm.config.load import find_file, read_yaml
from frontier_llm.errors import ConfigError, Problem, suggest

ALGORITHMS = ("flat", "hierarchical")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True)
class Rule:
    """From so many nodes and so many bytes of the whole tensor on, an operation takes this algorithm."""

    operation: str
    nodes_from: int
    bytes_from: int
    algorithm: Literal["flat", "hierarchical"]
    tag: Literal["measured", "estimated"]
    source: str


@dataclass(frozen=True)
class AlgorithmTable:
    """Rules in rising order of importance: the last one that applies wins; flat when none does."""

    rules: tuple[Rule, ...]

    def choose(self, operation: str, nodes: int, size_bytes: int) -> str:
        """'flat' or 'hierarchical'."""
        chosen = "flat"
        for rule in self.rules:
            if rule.operation == operation and nodes >= rule.nodes_from and size_bytes >= rule.bytes_from:
                chosen = rule.algorithm
        return chosen


FLAT = AlgorithmTable(())
HIERARCHICAL = AlgorithmTable(tuple(Rule(operation, 2, 0, "hierarchical", "estimated", "asked for") for operation in OPERATIONS))


def load_algorithms(name_or_path: str) -> AlgorithmTable:
    """'flat', 'hierarchical', or a table by its shipped name or path (`bench comm --emit` writes one).

    Raises ConfigError with every violation of the file.
    """
    fixed = {"flat": FLAT, "hierarchical": HIERARCHICAL}
    if name_or_path in fixed:
        return fixed[name_or_path]
    path = find_file(name_or_path, "algorithms")
    content = read_yaml(path)
    rows = content.get("rules")
    if not isinstance(rows, list):
        raise ConfigError("has no list `rules:`", "see configs/algorithms/frontier.yaml", str(path))
    problems = [problem for number, row in enumerate(rows) for problem in _problems(path, number, row)]
    if problems:
        raise ConfigError(problems)
    return AlgorithmTable(tuple(Rule(**row) for row in rows))


def _problems(path: Path, number: int, row: Any) -> Iterator[Problem]:
    where, keys = f"{path}: rules[{number}]", {field.name for field in fields(Rule)}
    if not isinstance(row, dict) or set(row) != keys:
        yield Problem(where, f"must have exactly the keys {', '.join(sorted(keys))}")
        return
    for key, valid in (("operation", OPERATIONS), ("algorithm", ALGORITHMS), ("tag", ("measured", "estimated"))):
        if row[key] not in valid:
            yield Problem(f"{where}.{key}", f"{row[key]!r} is unknown", suggest(str(row[key]), valid))
    for key in ("nodes_from", "bytes_from"):
        if not isinstance(row[key], int) or row[key] < 0:
            yield Problem(f"{where}.{key}", f"{row[key]!r} is not a number of nodes or bytes")
