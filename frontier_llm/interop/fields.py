"""Reader of another program's configuration. It collects each key that is missing or has no counterpart here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from frontier_llm.config import ModelConfig, build, model_problems
from frontier_llm.errors import CheckpointError, Problem

# no model is larger in any of these; so nothing is laid out or listed from a number that only a stranger's file states
_LARGEST = {
    "layers": 1 << 16,
    "hidden": 1 << 20,
    "heads": 1 << 20,
    "kv_heads": 1 << 20,
    "head_dim": 1 << 20,
    "rope_theta": 1 << 60,
}
_LARGEST_OTHERS = 1 << 31


class Fields:
    """A configuration of another program. Collects the keys that are missing or that our model does not compute."""

    def __init__(self, content: dict[str, Any], where: str) -> None:
        self.content = content
        self.where = where
        self.problems: list[Problem] = []

    def need(self, key: str) -> Any:
        """A value that must be there; 1 in its place when it is not, so that reading goes on and finds the rest."""
        if self.content.get(key) is None:
            self.problems.append(
                Problem(f"{self.where}: {key}", "is missing", "restore the configuration that came with the weights")
            )
            return 1
        return self.content[key]

    def get(self, key: str, default: Any) -> Any:
        """A value, or its default there."""
        value = self.content.get(key)
        return default if value is None else value

    def values(self, keys: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Our field → the value of their key, where that has no default one that must be there."""
        return {ours: self.get(*key) if len(key) > 1 else self.need(*key) for ours, key in keys.items()}

    def only(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """A value of which only some are computed here."""
        value = self.get(key, default)
        if value not in allowed:
            self.refuse(key, value, " or ".join(map(repr, allowed)))
        return value

    def fixed(self, **values: Any) -> None:
        """Keys that may only have their default there."""
        for key, value in values.items():
            self.only(key, value, default=value)

    def section(self, key: str, content: dict[str, Any] | None = None) -> Self:
        """A part of the configuration, whose problems are this one's; by default what stands under `key`."""
        part = type(self)(self.get(key, {}) if content is None else content, f"{self.where}: {key}")
        part.problems = self.problems
        return part

    def refuse(self, key: str, value: Any, supported: str) -> None:
        """Note a value that has no counterpart."""
        self.problems.append(
            Problem(f"{self.where}: {key}", f"{value!r} has no counterpart here", f"supported: {supported}")
        )

    def model(self, **values: Any) -> ModelConfig:
        """The shape that was read. Raises CheckpointError with everything that was wrong."""
        for field, value in values.items():
            most = _LARGEST.get(field, _LARGEST_OTHERS)
            if isinstance(value, (int, float)) and abs(value) > most:
                self.problems.append(Problem(f"{self.where}: {field}", f"is more than {most}, the most of any model"))
        if self.problems:
            raise CheckpointError(self.problems)
        model = build(ModelConfig, values, where=self.where)
        if problems := model_problems(model):
            raise CheckpointError(problems)
        return model
