"""Forbids compilation at run time. After `forbid_jit()`, each known function that compiles raises an error.

The error names the caller. If a thousand ranks compile the same op at start-up, this takes minutes and overloads the
file system. This project builds its kernels ahead of time. Modules that are not imported yet are guarded when they are
imported, so this module imports only torch.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from frontier_llm.errors import BackendError

# module → attributes that compile when they are called
_COMPILERS: dict[str, tuple[str, ...]] = {
    "torch.utils.cpp_extension": ("load", "load_inline", "_jit_compile"),
    "triton": ("compile",),
    "triton.compiler": ("compile",),
    "triton.compiler.compiler": ("compile",),
    "triton.runtime.jit": ("JITFunction._do_compile",),
    "deepspeed.ops.op_builder.builder": ("OpBuilder.jit_load",),
}
_MACHINERY = (
    "torch/utils/cpp_extension",
    "/triton/",
    "/deepspeed/",
    "/torch/_",
    "frontier_llm/ops/no_jit",
    "importlib",
)

_undo: list[Callable[[], None]] = []


def forbid_jit() -> None:
    """Make compiling raise BackendError: torch's cpp_extension, Triton, DeepSpeed's op builders, and torch.compile.

    A function that was passed to torch.compile raises the error when it is called, not when it is decorated. Modules
    with such decorators can therefore still be imported.
    """
    if _undo:
        return
    import torch

    _replace(torch, "compile", _deferred_compile)
    pending = set()
    for name in _COMPILERS:
        if name in sys.modules:
            _guard(sys.modules[name])
        else:
            pending.add(name)
    finder = _GuardOnImport(pending)
    sys.meta_path.insert(0, finder)
    _undo.append(lambda: sys.meta_path.remove(finder))


def allow_jit() -> None:
    """Undo `forbid_jit`, for tests."""
    while _undo:
        _undo.pop()()


def _replace(owner: Any, attribute: str, replacement: Any) -> None:
    original = getattr(owner, attribute)
    setattr(owner, attribute, replacement)
    _undo.append(lambda: setattr(owner, attribute, original))


def _guard(module: ModuleType) -> None:
    for path in _COMPILERS[module.__name__]:
        owner: Any = module
        *classes, attribute = path.split(".")
        for name in classes:
            owner = getattr(owner, name, None)
        if hasattr(owner, attribute):
            _replace(owner, attribute, _refusal(f"{module.__name__}.{path}", getattr(owner, attribute)))


def _refusal(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(*arguments: Any, **_kwargs: Any) -> Any:
        # for OpBuilder.jit_load, the first argument is the op that would be compiled
        name = getattr(arguments[0], "name", "") if arguments else ""
        op = f" {name}" if isinstance(name, str) and name else ""
        raise BackendError(
            f"{_who_asked()} would compile{op} at run time ({what}), which ops.no_jit forbids",
            "build it ahead of time (scripts/build_*.sh, python setup.py build_ops), or omit --no-jit",
        )

    return refuse


def _deferred_compile(model: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """Replacement for torch.compile, which can be used as a decorator with or without arguments."""
    if model is None:
        return _deferred_compile
    return _refusal(f"torch.compile of {getattr(model, '__qualname__', type(model).__name__)}", model)


def _who_asked() -> str:
    """Return the innermost caller that is not in one of the files of `_MACHINERY`."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in _MACHINERY):
            return f"{frame.name} ({frame.filename}:{frame.lineno})"
    return "something"


class _GuardOnImport(importlib.abc.MetaPathFinder):
    """Import hook that guards a module directly after it has been imported. The other import hooks load the module."""

    def __init__(self, pending: set[str]) -> None:
        self.pending = pending

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.pending:
            return None
        self.pending.discard(fullname)  # prevents recursion: find_spec below calls this method again
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_guard(module: ModuleType) -> None:
                execute(module)
                _guard(module)

            spec.loader.exec_module = execute_and_guard  # type: ignore[method-assign]
        return spec
