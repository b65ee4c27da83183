#!/usr/bin/env python3
"""Writes docs/generated/configuration.md from config/model.py and schema.py: each key with type, default and meaning.

The meaning is the comment after a field, or the comment lines above it.
    python scripts/config_reference.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import types
import typing
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from frontier_llm.config import fields, schema
from frontier_llm.config import model as model_keys
from frontier_llm.config.schema import RunConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "generated" / "configuration.md"
NAMES = {
    "PositiveInt": "whole number ≥ 1",
    "NonNegativeInt": "whole number ≥ 0",
    "StepCount": "whole number ≥ 1, or a duration",
    "WarmupSteps": "whole number ≥ 0, or a duration",
    "PositiveFloat": "number > 0",
    "NonNegativeFloat": "number ≥ 0",
    "BelowOne": "number in [0, 1)",
    "PathText": "path",
    "StepRange": "a step, or FIRST-LAST",
    "Recompute": "`none`, `selective`, `full` or a list of them",
    "str": "text",
    "bool": "true, false",
    "int": "whole number",
    "float": "number",
    "None": "nothing",
}


def source_notes() -> dict[tuple[str, str], tuple[str, str]]:
    """Return (class, field) → (annotation, comment) as written in the source."""
    notes = {}
    for source in map(inspect.getsource, (model_keys, schema)):
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if not isinstance(node, ast.ClassDef):
                continue
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    notes[node.name, field.target.id] = ast.unparse(field.annotation), comment_of(lines, field)
    return notes


def comment_of(lines: list[str], field: ast.AnnAssign) -> str:
    """Return the comment after a field, or else the comment lines directly above it. Returns '' without one."""
    _, _, behind = lines[(field.end_lineno or field.lineno) - 1].partition("  # ")
    if behind:
        return behind.strip()
    above: list[str] = []
    row = field.lineno - 2
    while row >= 0 and lines[row].strip().startswith("# "):
        above.insert(0, lines[row].strip().removeprefix("# "))
        row -= 1
    return " ".join(above)


def sections(
    model: type[BaseModel], prefix: str = ""
) -> typing.Iterator[tuple[str, type[BaseModel], dict[str, FieldInfo]]]:
    """Yield (dotted key, class, its fields that are not sections) of the run file, depth first."""
    plain = {name: field for name, field in model.model_fields.items() if section_of(field) is None}
    yield prefix, model, plain
    for name, field in model.model_fields.items():
        inner = section_of(field)
        if inner is not None:
            yield from sections(inner, f"{prefix}.{name}" if prefix else name)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section class of a field, alone, optional or in a list."""
    pending = [field.annotation]
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and issubclass(kind, BaseModel):
            return kind
        pending += list(typing.get_args(kind))
    return None


def type_text(annotation: str) -> str:
    """Describe an annotation in words: 'Literal['a', 'b'] | None' → 'a, b or nothing'."""
    literal = re.fullmatch(r"Literal\[(.*)\]", annotation)
    if literal:
        return ", ".join(f"`{value.strip().strip(chr(39))}`" for value in literal.group(1).split(","))
    bounded = re.fullmatch(r"Annotated\[(int|float), Field\((.*)\)\]", annotation)
    if bounded:
        limits = bounded.group(2).replace("ge=", "≥ ").replace("gt=", "> ").replace("le=", "≤ ").replace("lt=", "< ")
        return f"{NAMES[bounded.group(1)]} {limits}"
    several = re.fullmatch(r"(?:tuple|Mapping)\[(.*)\]", annotation)
    if several and " | " not in annotation:
        return (
            "list of " + type_text(several.group(1).split(",")[0].strip())
            if annotation.startswith("tuple")
            else "mapping of names"
        )
    parts = re.split(r" \| (?![^\[]*\])", annotation)
    if len(parts) > 1:
        return " or ".join(type_text(part) for part in parts)
    if annotation.startswith("Annotated["):
        raise ValueError(
            f"{annotation} has no description: give the type a name in config/fields.py, and add a description to NAMES"
        )
    return size_text(annotation) or NAMES.get(annotation, annotation)


def size_text(name: str) -> str:
    """Describe a bounded integer type of `config.fields`: 'LayerCount' → 'whole number from 1 to 65,536'. Returns ''
    for others.
    """
    limits = {
        key: limit
        for item in getattr(getattr(fields, name, None), "__metadata__", ())
        for key, limit in limits_of(item)
    }
    return f"whole number from {limits['ge']} to {limits['le']:,}" if {"ge", "le"} <= limits.keys() else ""


def limits_of(item: object) -> list[tuple[str, int]]:
    """Return (name, value) of each bound in one item of an annotation."""
    bounds = item.metadata if isinstance(item, FieldInfo) else ()
    return [(name, getattr(bound, name)) for bound in bounds for name in ("ge", "le") if hasattr(bound, name)]


def default_text(field: FieldInfo) -> str:
    """Return the default as it is written in a run file."""
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value}`"


def page() -> str:
    """Return the text of the page. Raises ValueError for a field without a comment."""
    notes = source_notes()
    text = []
    for prefix, model, keys in sections(RunConfig):
        if not keys:
            continue
        text += [
            f"## {prefix or 'At the root'}",
            "",
            inspect.getdoc(model) or "",
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for name, field in keys.items():
            annotation, comment = notes[model.__name__, name]
            if not comment:
                raise ValueError(f"{model.__name__}.{name} has no comment that explains it")
            key = f"{prefix}.{name}" if prefix else name
            cells = (f"`{key}`", type_text(annotation), default_text(field), comment)
            text.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        text.append("")
    return HEAD + "\n".join(text)


HEAD = """# Configuration

Every key of a run file, made from `frontier_llm/config/model.py` and `schema.py` by `scripts/config_reference.py`. A run file is YAML. `base: NAME`
reads the keys of another run file first, and `key=value` on the command line replaces a key of the file. An unknown key is an error that names the nearest valid one. "nothing" is YAML's `null`.

"""  # noqa: E501


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != page():
            print(
                "docs/generated/configuration.md is not up to date: run python scripts/config_reference.py",
                file=sys.stderr,
            )
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
