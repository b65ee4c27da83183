"""Which attention back-end is tried first, by architecture and shape: a table in configs/attention, or what `ops tune` has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from frontier_llm.config.load import find_file, read_yaml
from frontier_llm.errors import ConfigError, Problem, suggest

BACKENDS = ("cudnn", "flash_attn", "triton", "sdpa", "cpu", "reference")


@dataclass(frozen=True)
class AttentionShape:
    """What a back-end's speed depends on."""

    head_dim: int
    extras: bool  # ALiBi or documents


@dataclass(frozen=True)
class AttentionRule:
    """On this architecture ("cpu" is one), with head dims up to this one and above the next smaller rule's, these back-ends first."""

    architecture: str
    head_dim: int
    extras: bool
    order: tuple[str, ...]
    tag: Literal["measured", "estimated"]
    source: str


def load_attention(name_or_path: str) -> tuple[AttentionRule, ...]:
    """A table by its shipped name or path. Raises ConfigError with every violation of the file."""
    path = find_file(name_or_path, "attention")
    rows = read_yaml(path).get("rules")
    if not isinstance(rows, list):
        raise ConfigError("has no list `rules:`", "see configs/attention/shipped.yaml", str(path))
    problems = [problem for number, row in enumerate(rows) for problem in _problems(path, number, row)]
    if problems:
        raise ConfigError(problems)
    return tuple(AttentionRule(**{**row, "order": tuple(row["order"])}) for row in rows)


def rule_for(rules: Sequence[AttentionRule], architecture: str, shape: AttentionShape) -> AttentionRule | None:
    """The rule that applies, or None."""
    fitting = [
        rule for rule in rules if (rule.architecture, rule.extras) == (architecture, shape.extras) and rule.head_dim >= shape.head_dim
    ]
    return min(fitting, key=lambda rule: rule.head_dim, default=None)


def _problems(path: Path, number: int, row: Any) -> list[Problem]:
    where, keys = f"{path}: rules[{number}]", {field.name for field in fields(AttentionRule)}
    if not isinstance(row, dict) or set(row) != keys:
        return [Problem(where, f"must have exactly the keys {', '.join(sorted(keys))}")]
    problems = []
    order = row["order"] if isinstance(row["order"], list) else [row["order"]]
    problems += [Problem(f"{where}.order", f"{name!r} is unknown", suggest(str(name), BACKENDS)) for name in order if name not in BACKENDS]
    if row["tag"] not in ("measured", "estimated"):
        problems.append(Problem(f"{where}.tag", f"{row['tag']!r} is unknown", "measured or estimated"))
    if not isinstance(row["head_dim"], int) or isinstance(row["head_dim"], bool) or row["head_dim"] < 1:
        problems.append(Problem(f"{where}.head_dim", f"{row['head_dim']!r} is not a head dim"))
    if not isinstance(row["extras"], bool):
        problems.append(Problem(f"{where}.extras", f"{row['extras']!r} is not true or false"))
    return problems
