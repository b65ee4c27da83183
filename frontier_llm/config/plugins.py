"""A user's own Python beside a run: modules that register schedules, optimizers, losses and so on (docs/extending.md)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from frontier_llm.errors import ConfigError


def import_plugins(names: Iterable[str]) -> None:
    """Import each once: an importable module's dotted name, or the path of a .py file. Raises ConfigError naming what cannot be imported.

    Only a run file that its user starts is read this way, never what a checkpoint recorded: a plugin is code.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(Path(name).expanduser().resolve())
            else:
                importlib.import_module(name)
        except (ImportError, OSError, SyntaxError) as error:
            fix = "give the path of a .py file, or a module that this Python can import"
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
