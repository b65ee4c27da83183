"""Names of keys that a user types outside of key=value words."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from frontier_llm.config.foreign import unknown_key_fix
from frontier_llm.config.schema import RunConfig
from frontier_llm.errors import ConfigError, Problem


def is_key(name: str) -> bool:
    """Return whether a run has this key or section. Names in an optional section count as keys."""
    section: Any = RunConfig
    for part in name.split("."):
        fields = getattr(section, "model_fields", None)
        if fields is None:  # the key is in a section that may be absent, such as model.rope_scaling.factor
            return True
        if part not in fields:
            return False
        section = fields[part].annotation
    return True


def check_allowable(names: Collection[str]) -> None:
    """Raise a ConfigError that lists each name of `--allow-change` that is not a key of a run."""
    mistyped = [name for name in names if not is_key(name)]
    if mistyped:
        raise ConfigError(
            [
                Problem(
                    "--allow-change",
                    f"{name!r} is not a key of a run",
                    unknown_key_fix(RunConfig, tuple(name.split("."))),
                )
                for name in mistyped
            ]
        )
