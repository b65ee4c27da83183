"""Translates options and keys of other frameworks to names of this project, by the tables of docs/coming_from.md."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache

from frontier_llm.config.places import configs_dir

PAGE = "docs/coming_from.md"
# Share of equal letters from which a name counts as mistyped. One wrong, missing, doubled or swapped letter reaches
# it. Other words, such as --tensor and --tokens, stay below.
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
