"""Reads another program's configuration. Collects all problems instead of raising an error at the first problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from frontier_llm.config import ModelConfig, build, model_problems
from frontier_llm.errors import CheckpointError, Problem

# Upper limits that no real model exceeds. A larger number in an untrusted file is refused before memory is allocated.
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
    """Configuration of another program. Collects keys that are missing or have no counterpart in ModelConfig."""

    def __init__(self, content: dict[str, Any], where: str) -> None:
        self.content = content
        self.where = where
        self.problems: list[Problem] = []

    def need(self, key: str) -> Any:
        """Return a required value. If it is missing, record a problem and return 1, so that reading can continue."""
        if self.content.get(key) is None:
            self.problems.append(
                Problem(f"{self.where}: {key}", "is missing", "restore the configuration that came with the weights")
            )
            return 1
        return self.content[key]

    def get(self, key: str, default: Any) -> Any:
        """Return a value, or `default` if the key is missing or null."""
        value = self.content.get(key)
        return default if value is None else value

    def values(self, keys: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Return our field → value.

        `keys` maps our field to (their key, default), or to (their key,) if the key is required.
        """
        return {ours: self.get(*key) if len(key) > 1 else self.need(*key) for ours, key in keys.items()}

    def only(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """Return a value. Record a problem if it is not one of the `allowed` values."""
        value = self.get(key, default)
        if value not in allowed:
            self.refuse(key, value, " or ".join(map(repr, allowed)))
        return value

    def fixed(self, **values: Any) -> None:
        """Record a problem for each key that has another value. A missing key counts as having the given value."""
        for key, value in values.items():
            self.only(key, value, default=value)

    def section(self, key: str, content: dict[str, Any] | None = None) -> Self:
        """Return a section of the configuration, by default the value of `key`. Problems of the section are recorded in
        this object.
        """
        part = type(self)(self.get(key, {}) if content is None else content, f"{self.where}: {key}")
        part.problems = self.problems
        return part

    def refuse(self, key: str, value: Any, supported: str) -> None:
        """Record a problem for a value that has no counterpart in ModelConfig."""
        self.problems.append(Problem(f"{self.where}: {key}", f"{value!r} is not supported", f"supported: {supported}"))

    def model(self, **values: Any) -> ModelConfig:
        """Return the model's configuration. Raises CheckpointError with all recorded problems."""
        for field, value in values.items():
            most = _LARGEST.get(field, _LARGEST_OTHERS)
            if isinstance(value, (int, float)) and abs(value) > most:
                self.problems.append(Problem(f"{self.where}: {field}", f"is more than the limit of {most}"))
        if self.problems:
            raise CheckpointError(self.problems)
        model = build(ModelConfig, values, where=self.where)
        problems = list(model_problems(model))
        if problems:
            raise CheckpointError(problems)
        return model
