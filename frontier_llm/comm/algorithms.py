"""Which algorithm a collective takes, by operation, nodes and message size: a table in configs/algorithms, measured
or estimated.
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import ConfigDict

from frontier_llm.config import build
from frontier_llm.config.fields import NonNegativeInt, Section
from frontier_llm.config.load import find_file, read_yaml

Algorithm = Literal["flat", "hierarchical"]
Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]


class Rule(Section):
    """From so many nodes and so many bytes of the whole tensor on, an operation takes this algorithm."""

    model_config = ConfigDict(strict=True)

    operation: Operation
    nodes_from: NonNegativeInt
    bytes_from: NonNegativeInt
    algorithm: Algorithm
    tag: Literal["measured", "estimated"]
    source: str


class AlgorithmTable(Section):
    """Rules in rising order of importance: the last one that applies wins; flat when none does."""

    title: str = ""
    rules: tuple[Rule, ...]

    def choose(self, operation: str, nodes: int, size_bytes: int) -> str:
        """'flat' or 'hierarchical'."""
        chosen = "flat"
        for rule in self.rules:
            if rule.operation == operation and nodes >= rule.nodes_from and size_bytes >= rule.bytes_from:
                chosen = rule.algorithm
        return chosen


_ALWAYS = {"nodes_from": 2, "bytes_from": 0, "algorithm": "hierarchical", "tag": "estimated", "source": "asked for"}
FLAT = AlgorithmTable(rules=())
HIERARCHICAL = AlgorithmTable.model_validate(
    {"rules": tuple({"operation": operation, **_ALWAYS} for operation in get_args(Operation))}
)


def load_algorithms(name_or_path: str) -> AlgorithmTable:
    """'flat', 'hierarchical', or a table by its shipped name or path (`bench comm --emit` writes one).

    Raises ConfigError with every violation of the file.
    """
    fixed = {"flat": FLAT, "hierarchical": HIERARCHICAL}
    if name_or_path in fixed:
        return fixed[name_or_path]
    path = find_file(name_or_path, "algorithms")
    return build(AlgorithmTable, read_yaml(path), str(path))
