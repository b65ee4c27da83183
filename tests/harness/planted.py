"""Plants a fault into the package: replaces one call in the source of one function, while the tests run."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any


@contextmanager
def planted(module_name: str, qualname: str, old: str, new: str) -> Iterator[range]:
    """Replace `old` by `new` in a function's source. Yields the lines of the function.

    The text `old` occurs once in the function. Line numbers and all references to the function stay valid.
    """
    module = importlib.import_module(module_name)
    function = _function(module, qualname)
    source = Path(inspect.getsourcefile(module) or "").read_text(encoding="utf-8")
    lines, first = inspect.getsourcelines(function)
    text = "".join(lines)
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {qualname}"
    changed = text.replace(old, new)
    assert changed.count("\n") == text.count("\n"), "a planted fault keeps the number of lines"
    before = "".join(source.splitlines(keepends=True)[: first - 1])
    after = source[len(before) + len(text) :]
    compiled = compile(before + changed + after, function.__code__.co_filename, "exec", dont_inherit=True)
    honest = function.__code__
    function.__code__ = _code(compiled, qualname)
    try:
        yield range(first, first + len(lines))
    finally:
        function.__code__ = honest


def _function(module: Any, qualname: str) -> FunctionType:
    found = module
    for name in qualname.split("."):
        found = inspect.getattr_static(found, name)
        if isinstance(found, property):
            found = found.fget
        found = getattr(found, "__func__", found)
    assert isinstance(found, FunctionType)
    return found


def _code(compiled: CodeType, qualname: str) -> CodeType:
    for constant in compiled.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == qualname:
                return constant
            try:
                return _code(constant, qualname)
            except LookupError:
                pass
    raise LookupError(qualname)
