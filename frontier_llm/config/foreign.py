"""Explains unknown keys, also those of other frameworks, which the tables of docs/coming_from.md translate."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from frontier_llm.config.places import configs_dir
from frontier_llm.errors import closest, suggest

PAGE = "docs/coming_from.md"
# Smallest share of equal letters at which two names count as one name with a typing mistake. Names with one wrong,
# missing, doubled or swapped letter have a larger share. Different words, such as --tensor and --tokens, have a smaller
# share.
SIMILAR = 0.8


def _plain_name(text: str) -> str:
    """'--num-layers 24' -> 'num_layers', 'model.n_layers' -> 'n_layers'."""
    word = re.split(r"[ =:,]", text.strip().strip('"'))[0]
    return word.strip('"').lstrip("-").rpartition(".")[2].replace("-", "_").lower()


@cache
def _names() -> dict[str, str]:
    """Return name in another framework → name in this project. Empty if docs/coming_from.md is not installed."""
    page = configs_dir().parent / PAGE
    if not page.is_file():
        return {}
    names: dict[str, str] = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("| `") or len(cells) != 2:
            continue
        there = re.findall(r"`([^`]+)`", cells[0])
        here = re.findall(r"`([^`]+)`", cells[1])
        whole = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cells[1]).replace("`", "")
        first = here[: len(there)]
        is_list = len(first) == len(there) and all(re.match(r"[a-z_]+\.[a-z_]+", key) for key in first)
        for place, name in enumerate(there):
            names.setdefault(_plain_name(name), first[place] if is_list else whole)
    return names


def name_here(name: str) -> str:
    """Return this project's name of another framework's option or key. '' if docs/coming_from.md does not list it."""
    return _names().get(_plain_name(name), "")


def meaning_of_near_name(name: str) -> str:
    """Return this project's name of the most similarly spelled option or key of another framework, or ''."""
    matches = get_close_matches(_plain_name(name), _names(), n=1, cutoff=SIMILAR)
    return _names()[matches[0]] if matches else ""


def unknown_key_fix(model_type: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Suggest the closest valid key of that section, or the same key in another section."""
    section = model_type
    for part in location[:-1]:
        field = section.model_fields.get(str(part))
        if field is not None:
            section = section_in(field.annotation) or section
    names = list(section.model_fields)
    key = str(location[-1])
    elsewhere = [
        f"{name}.{key}"
        for name, field in model_type.model_fields.items()
        if key in getattr(field.annotation, "model_fields", {})
    ]
    meaning = name_here(key)
    if meaning and not elsewhere:
        return f"here: {meaning} ({PAGE})"
    if closest(key, names):
        return suggest(key, names)
    if not elsewhere and (near := meaning_of_near_name(key)):
        return f"here: {near} ({PAGE})"
    is_in_list = any(isinstance(part, int) for part in location)  # for example a key of data.train.0
    return f"did you mean {elsewhere[0]!r}?" if elsewhere and not is_in_list else suggest(key, names)


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in an annotation, also inside a tuple or union. None if it has only values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(section_in, get_args(annotation))), None)
