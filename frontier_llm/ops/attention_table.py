"""Which attention back-end is tried first, by architecture and shape: a table in configs/attention, or what `ops
tune` has measured.
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
    """What a back-end's speed depends on."""

    head_dim: int
    extras: bool  # ALiBi or documents


class AttentionRule(Section):
    """On this architecture ("cpu" is one), with head dims up to this one and above the next smaller rule's, these
    back-ends first.
    """

    model_config = ConfigDict(strict=True)

    architecture: str
    head_dim: PositiveInt
    extras: bool
    order: Annotated[tuple[Backend, ...], Field(strict=False)]  # a list in the file
    tag: Literal["measured", "estimated"]
    source: str


class _Table(Section):
    title: str = ""
    rules: tuple[AttentionRule, ...]


def load_attention(name_or_path: str) -> tuple[AttentionRule, ...]:
    """A table by its shipped name or path. Raises ConfigError with every violation of the file."""
    path = find_file(name_or_path, "attention")
    return build(_Table, read_yaml(path), str(path)).rules


def rule_for(rules: Sequence[AttentionRule], architecture: str, shape: AttentionShape) -> AttentionRule | None:
    """The rule that applies, or None."""
    fitting = [
        rule
        for rule in rules
        if (rule.architecture, rule.extras) == (architecture, shape.extras) and rule.head_dim >= shape.head_dim
    ]
    return min(fitting, key=lambda rule: rule.head_dim, default=None)
