"""Tables that choose the algorithm of a collective by operation, number of nodes and tensor size.

The tables in configs/algorithms come from measurements or from estimates.
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
    """Selects the algorithm of an operation for at least `nodes_from` nodes and `bytes_from` bytes.

    The bytes are the size of the complete tensor, as `Ledger` counts them.
    """

    model_config = ConfigDict(strict=True)

    operation: Operation
    nodes_from: NonNegativeInt
    bytes_from: NonNegativeInt
    algorithm: Algorithm
    tag: Literal["measured", "estimated"]
    source: str


class AlgorithmTable(Section):
    """Rules in increasing order of priority. The last rule that applies is used. If no rule applies, the algorithm is
    'flat'.
    """

    title: str = ""
    rules: tuple[Rule, ...]

    def choose(self, operation: str, nodes: int, size_bytes: int) -> str:
        """Return 'flat' or 'hierarchical' for a tensor of `size_bytes` on an axis that spans `nodes` nodes."""
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
    """Return the table with this name or path.

    The tables named 'flat' and 'hierarchical' choose the algorithm of their name in every case. Other names are files
    in configs/algorithms, which `bench comm --emit` writes. Raises ConfigError with all errors of the file.
    """
    fixed = {"flat": FLAT, "hierarchical": HIERARCHICAL}
    if name_or_path in fixed:
        return fixed[name_or_path]
    path = find_file(name_or_path, "algorithms")
    return build(AlgorithmTable, read_yaml(path), str(path))
