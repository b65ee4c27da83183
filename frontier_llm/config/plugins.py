"""Imports plugins: a user's Python modules that register schedules, optimizers, losses and so on (docs/extending.md).

A plugin is code that can change the result of a run. A checkpoint therefore records each plugin's name, path and
digest, but not the code. Code is imported only from files that the user named. The user can name a file in the run file
that is started, in the run file of the user's own run directory, or with `--plugin`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from frontier_llm import log
from frontier_llm.errors import ConfigError, Problem

GROUP = "frontier_llm.plugins"  # Group of entry points. An entry point is loaded only if a run file names it.
SHOWN_DIGITS = 12  # Digits of a digest in messages.
MAX_TEXT = 4096  # Characters of a name or path.
Text = Annotated[str, Field(max_length=MAX_TEXT)]


class PluginRecord(BaseModel):
    """Identity of a plugin. Checkpoints record it and read it back as data only."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Text  # As in the run file: a file, a module, or an entry point.
    path: Text = ""  # Path of its file on the computer that imported it; '' if it was not recorded.
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""  # Digest of its file's bytes; '' if not recorded.

    @property
    def short_name(self) -> str:
        """File name without folders, or the module's name."""
        return Path(self.name).name if self.name.endswith(".py") else self.name

    def __str__(self) -> str:
        return f"{self.short_name} (sha256 {self.sha256[:SHOWN_DIGITS] or 'not recorded'})"


_executed: dict[str, str] = {}  # path of a .py file → digest of the bytes that this process has executed


def import_plugins(names: Iterable[str]) -> None:
    """Import each plugin once. A name is the path of a .py file, an installed package's entry point, or a dotted module
    name.

    Raises ConfigError naming the plugin that cannot be imported.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(_file_path(name))
            elif points := entry_points(group=GROUP, name=name):
                next(iter(points)).load()
            else:
                importlib.import_module(name)
        except (ImportError, AttributeError, OSError, SyntaxError, ValueError) as error:
            raise _not_importable(name, error) from error


def record_of(name: str) -> PluginRecord:
    """Return name, path and digest of a plugin, without importing it. Raises ConfigError if there is no such file or
    module.
    """
    try:
        path = _file_path(name) if name.endswith(".py") else _module_path(name)
        digest = _executed.get(str(path)) or _digest(path)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise _not_importable(name, error) from error
    return PluginRecord(name=name, path=str(path), sha256=digest)


def records_of(names: Iterable[str]) -> tuple[PluginRecord, ...]:
    """Return the record of each plugin, without importing any."""
    return tuple(map(record_of, names))


def recorded_names(config: Mapping[str, Any]) -> tuple[PluginRecord, ...]:
    """Return the plugins that a saved configuration names. Used for records written before digests were recorded."""
    names = config.get("plugins", ())
    texts = [name for name in names if isinstance(name, str)] if isinstance(names, list | tuple) else []
    return tuple(PluginRecord(name=name[:MAX_TEXT]) for name in texts)


def import_recorded(recorded: Sequence[PluginRecord], *, given: Sequence[str], own: Sequence[str], where: str) -> None:
    """Import the plugins that a saved run was trained with, from files that the user named.

    `given` are the plugins named with --plugin. A file that differs from the recorded file is used, with a warning.
    `own` are the plugins in the run file of the user's own run directory. Their digests must equal the recorded
    digests.

    Raises ConfigError if a recorded plugin is in neither `given` nor `own`, or if a plugin of `own` has changed. After
    such an error no plugin of `own` has been imported.
    """
    import_plugins(given)
    supplied = records_of(given)
    available = tuple(_records_that_exist(own))
    problems: list[Problem] = []
    wanted: list[str] = []
    for plugin in recorded:
        if (match := _match(plugin, supplied)) is not None:
            if _differs(plugin, match):
                log.warn(
                    f"{where} was trained with {plugin}; {match.path} is used instead, which has sha256 "
                    f"{match.sha256[:SHOWN_DIGITS]}"
                )
            continue
        match = _match(plugin, available)
        if match is None:
            what = f"needs the plugin {plugin}, which neither --plugin nor your run file names"
            problems.append(
                Problem(where=where, what=what, fix=f"read that file, then add --plugin {_likely_path(plugin)}")
            )
        elif _differs(plugin, match):
            what = f"was trained with the plugin {plugin}, and {match.path} has sha256 {match.sha256[:SHOWN_DIGITS]}"
            problems.append(
                Problem(
                    where=where,
                    what=what,
                    fix=f"restore that file, or add --plugin {match.path} to use it as it is now",
                )
            )
        else:
            wanted.append(match.name)
    if problems:
        raise ConfigError(problems)
    import_plugins(wanted)


def plugin_paths(content: Mapping[str, Any], directory: Path, where: str) -> dict[str, Any]:
    """Return a run file's content with the paths of its .py plugins made absolute.

    Relative paths count from `directory`, the folder of the run file.

    A path that exists only relative to the working directory, as in earlier versions, is accepted with a notice.
    """
    names = content.get("plugins")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return dict(content)  # other types stay unchanged, and the schema refuses them
    return {**content, "plugins": [_placed(name, directory, where) if name.endswith(".py") else name for name in names]}


def below(names: Iterable[str], directory: Path) -> tuple[str, ...]:
    """Return the plugins as a run file in `directory` would name them. Files below `directory` get relative paths."""
    folder = directory.resolve()
    inside = {name: Path(name) for name in names if name.endswith(".py") and Path(name).is_relative_to(folder)}
    return tuple(str(inside[name].relative_to(folder)) if name in inside else name for name in names)


def _placed(name: str, directory: Path, where: str) -> str:
    path = (directory / Path(name).expanduser()).resolve()
    elsewhere = Path(name).expanduser().resolve()
    if path.is_file() or not elsewhere.is_file():
        return str(path)
    relative = os.path.relpath(elsewhere, directory.resolve())
    log.info(
        f"{where}: plugins: {name} is not in the folder of that file; the copy in the working directory is used. "
        f"To keep it, write {relative}"
    )
    return str(elsewhere)


def _records_that_exist(names: Sequence[str]) -> Iterator[PluginRecord]:
    for name in names:
        try:
            yield record_of(name)
        except ConfigError:
            continue  # The file no longer exists. If the plugin is needed, the caller reports it as missing.


def _match(plugin: PluginRecord, candidates: Sequence[PluginRecord]) -> PluginRecord | None:
    """Return the candidate with the same bytes, else one with the same name."""
    same = [one for one in candidates if one.sha256 == plugin.sha256]
    return next(iter([*same, *(one for one in candidates if one.short_name == plugin.short_name)]), None)


def _differs(plugin: PluginRecord, candidate: PluginRecord) -> bool:
    return bool(plugin.sha256) and plugin.sha256 != candidate.sha256


def _likely_path(plugin: PluginRecord) -> str:
    """Return an argument for --plugin: the recorded path if it is a file of this user, else a placeholder with the
    file's name.
    """
    if not plugin.name.endswith(".py"):
        return plugin.name
    path = plugin.path or plugin.name
    with suppress(OSError, ValueError):
        if os.path.isabs(path) and os.stat(path).st_uid == os.geteuid():
            return path
    return f"PATH/{plugin.short_name}"


def _not_importable(name: str, error: Exception) -> ConfigError:
    installed = ", ".join(sorted(entry_points(group=GROUP).names))
    fix = "give the path of a .py file, or a module that this Python can import" + (
        f", or one of {installed}" if installed else ""
    )
    if isinstance(error, FileNotFoundError) and name.endswith(".py"):
        return ConfigError(f"no plugin file {_file_path(name)}", "check the path", "plugins")
    return ConfigError(f"{name} cannot be imported: {error}", fix, "plugins")


def _file_path(name: str) -> Path:
    return Path(name).expanduser().resolve()


def _module_path(name: str) -> Path:
    """Return the file of a module or entry point. For a package this is its __init__.py."""
    points = entry_points(group=GROUP, name=name)
    module = next(iter(points)).module if points else name
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"there is no module {module!r} with a source file")
    return Path(spec.origin).resolve()


def _digest(path: Path) -> str:
    """Return the sha256 of a file. For a package's __init__.py, it covers names and bytes of all Python files in the
    package.
    """
    if path.name != "__init__.py":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    state = hashlib.sha256()
    for file in sorted(path.parent.rglob("*.py")):
        content = file.read_bytes()
        state.update(f"{file.relative_to(path.parent)}\0{len(content)}\0".encode() + content)
    return state.hexdigest()


class _LoaderOfBytes(importlib.abc.SourceLoader):
    """Executes the bytes that it has read once, never a cached .pyc. The digest therefore describes the executed
    code.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.source = path.read_bytes()

    def get_filename(self, fullname: str) -> str:
        """Name of the file, for tracebacks."""
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        """Return the source. Raises OSError for any other file, such as a .pyc beside it."""
        if str(path) != str(self._path):
            raise FileNotFoundError(path)
        return self.source


def _import_file(path: Path) -> None:
    if str(path) in sys.modules:
        return
    loader = _LoaderOfBytes(path)
    spec = importlib.util.spec_from_file_location(str(path), path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[str(path)] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[str(path)]
        raise
    _executed[str(path)] = hashlib.sha256(loader.source).hexdigest()
