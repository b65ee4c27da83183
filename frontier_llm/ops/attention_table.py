"""Table of the preferred attention back-ends by GPU architecture and shape.

The table is a file in configs/attention, or a file that `ops tune` has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from frontier_llm.config import build
from frontier_llm.config.fields import PositiveInt, Section
from frontier_llm.config.load import find_file, read_yaml

Backend = Literal["cudnn", "flash_attn", "triton", "sdpa", "cpu", "reference"]


@dataclass(frozen=True)
class AttentionShape:
    """Properties of attention on which a back-end's speed depends."""

    head_dim: int
    extras: bool  # True: attention with ALiBi or with document boundaries


class AttentionRule(Section):
    """Order in which `auto` tries attention back-ends, for one architecture (or "cpu"), head dims, and attention with
    or without extras.

    A rule applies to head dims up to `head_dim` for which no rule with a smaller `head_dim` exists.
    """

    model_config = ConfigDict(strict=True)

    architecture: str
    head_dim: PositiveInt
    extras: bool
    order: Annotated[tuple[Backend, ...], Field(strict=False)]  # the file has a list, not a tuple
    tag: Literal["measured", "estimated"]
    source: str


class _Table(Section):
    title: str = ""
    rules: tuple[AttentionRule, ...]


def load_attention(name_or_path: str) -> tuple[AttentionRule, ...]:
    """Load a table by its shipped name or its path. Raises ConfigError with every violation in the file."""
    path = find_file(name_or_path, "attention")
    return build(_Table, read_yaml(path), str(path)).rules


def rule_for(rules: Sequence[AttentionRule], architecture: str, shape: AttentionShape) -> AttentionRule | None:
    """Return the rule with the smallest head dim that covers `shape`, or None."""
    fitting = [
        rule
        for rule in rules
        if (rule.architecture, rule.extras) == (architecture, shape.extras) and rule.head_dim >= shape.head_dim
    ]
    return min(fitting, key=lambda rule: rule.head_dim, default=None)
