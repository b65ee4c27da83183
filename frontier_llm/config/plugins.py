"""A user's own Python beside a run: modules that register schedules, optimizers, losses and so on (docs/extending.md)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from frontier_llm.errors import ConfigError

GROUP = "frontier_llm.plugins"  # of entry points; none is loaded unless a run file names it


def import_plugins(names: Iterable[str]) -> None:
    """Import each once: the path of a .py file, the name of an installed package's entry point, or a module's dotted name.

    Raises ConfigError naming what cannot be imported.
    Only a run file that its user starts is read this way, never what a checkpoint recorded: a plugin is code.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(Path(name).expanduser().resolve())
            elif points := entry_points(group=GROUP, name=name):
                next(iter(points)).load()
            else:
                importlib.import_module(name)
        except (ImportError, AttributeError, OSError, SyntaxError) as error:
            installed = ", ".join(sorted(entry_points(group=GROUP).names))
            fix = "give the path of a .py file, or a module that this Python can import" + (f", or one of {installed}" if installed else "")
            raise ConfigError(f"{name} cannot be imported: {error}", fix, "plugins") from error


def _import_file(path: Path) -> None:
    if str(path) in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(str(path), path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[str(path)] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(path)]
        raise
