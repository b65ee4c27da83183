"""Reads a run directory part by part, so that a damaged file hides nothing but itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from frontier_llm.errors import FrontierError, Problem
from frontier_llm.units import printable

T = TypeVar("T")


class RunParts:
    """Reads the parts of one run directory. A part that cannot be read is named, and the others are still shown."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damage: list[str] = []

    def read(self, part: Callable[[Path], T], default: T) -> T:
        """`part` of the directory, or `default` if its file is damaged."""
        try:
            return part(self.directory)
        except FrontierError as error:
            self.damage += [self._relative(problem) for problem in error.problems]
        except OSError as error:
            self.damage.append(
                self._relative(Problem(str(error.filename or self.directory), f"cannot be read: {error.strerror}"))
            )
        return default

    def note(self, problem: Problem) -> None:
        """Something is wrong that does not keep the part from being read."""
        self.damage.append(self._relative(problem))

    def value(self, content: Mapping[str, Any], name: str, key: str, is_sound: Callable[[Any], bool]) -> Any:
        """A value of a section that was read; None, and named, if it has another type."""
        section = content.get(name, {})
        if not isinstance(section, dict):
            self.damage.append(f"config.yaml: {name} is {section!r}, not a section of keys")
            return None
        value = section.get(key)
        if value is None or is_sound(value):
            return value
        self.damage.append(f"config.yaml: {name}.{key} is {value!r}")
        return None

    def _relative(self, problem: Problem) -> str:
        """The problem on one line, its path below the run directory."""
        where = problem.where.removeprefix(f"{self.directory}/").removeprefix(str(self.directory))
        text = f"{where}: {problem.what}" if where else problem.what
        return printable(f"{text}; {problem.fix}" if problem.fix else text)
