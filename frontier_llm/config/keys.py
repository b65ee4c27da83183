"""Names of keys that a user types outside of key=value words."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import BaseModel

from frontier_llm.config.foreign import section_in, unknown_key_fix
from frontier_llm.config.schema import RunConfig
from frontier_llm.errors import ConfigError, Problem


def is_key(name: str) -> bool:
    """Return whether a run can have this key or section. Keys of an optional section count, even if it is absent."""
    section: type[BaseModel] | None = RunConfig
    for part in name.split("."):
        if section is None or part not in section.model_fields:
            return False
        section = section_in(section.model_fields[part].annotation)
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
