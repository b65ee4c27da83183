#!/usr/bin/env python3
"""Writes docs/generated/library.md: signature and docstring of each public name of `frontier_llm`.

python scripts/library_reference.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import frontier_llm

PAGE = Path(__file__).resolve().parent.parent / "docs" / "generated" / "library.md"
HEAD = """# Python interface

<!-- Written by scripts/library_reference.py from the docstrings. -->

How to use these names, and what stays stable: [Use from Python](../library.md).
"""


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for name in sorted(frontier_llm.__all__, key=str.lower):
        parts += entry(name, getattr(frontier_llm, name))
    return "\n".join(parts)


def entry(name: str, value: Any) -> Iterator[str]:
    """Yield the paragraphs of a function, or of a class with its public members."""
    yield f"## {name}\n"
    if not inspect.isclass(value):
        yield f"```python\n{name}{signature(value)}\n```\n"
        yield documentation(value)
        return
    if name == "Trainer":  # users construct only this class
        yield f"```python\n{name}{signature(value)}\n```\n"
    yield documentation(value)
    if name == "Trainer":
        yield documentation(value.__init__)
    for member, described in members(value):
        yield f"### {name}.{member}\n"
        yield described


def members(value: type) -> Iterator[tuple[str, str]]:
    """Yield (signature, documentation) of the public methods and properties that the class itself defines."""
    for name, member in vars(value).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield name, documentation(member)
        elif inspect.isfunction(member) and not issubclass(value, Exception):
            yield f"{name}{signature(member)}", documentation(member)


def signature(function: Any) -> str:
    """Return the signature as in the source, without `self`."""
    if inspect.isclass(function):
        function = function.__init__
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    arguments = ast.unparse(definition.args).removeprefix("self").removeprefix(", ")
    returns = ast.unparse(definition.returns) if definition.returns is not None else "None"
    return f"({arguments}) -> {returns}"


def documentation(value: Any) -> str:
    """Return the docstring as Markdown."""
    return (inspect.getdoc(value) or "") + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is not current")
    arguments = parser.parse_args()
    text = page()
    if arguments.check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE} is not current: run python scripts/library_reference.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
