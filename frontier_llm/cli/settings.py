"""Refuses key=value words that have no effect in a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from frontier_llm.errors import ConfigError, Problem


def key_of(word: str) -> str:
    """'train.steps=5' -> 'train.steps'."""
    return word.partition("=")[0]


def refuse_settings(words: Sequence[str], is_unused: Callable[[str], bool], fix: str) -> None:
    """Raise ConfigError if a word sets a key that the command ignores."""
    unused = [word for word in words if is_unused(key_of(word))]
    if unused:
        raise ConfigError([Problem(word, "would have no effect here", fix) for word in unused])


def machine_of(option: str | None, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the machine that `--machine` or `machine=` names, '' if none does, and the other words.

    Raises ConfigError if both are given.
    """
    named = [word.partition("=")[2] for word in words if key_of(word) == "machine"]
    if named and option:
        raise ConfigError("the machine is given twice", f"write --machine {option} or machine={named[-1]}", "--machine")
    others = [word for word in words if key_of(word) != "machine"]
    return option or (named[-1] if named else ""), others


def refuse_layout(words: Sequence[str], kept: Sequence[str] = ()) -> None:
    """Raise ConfigError if a word sets a key of the layout that a search chooses. The search keeps the keys `kept`."""
    from frontier_llm.blueprint.layout import RUN_KEYS
    from frontier_llm.planner.candidates import FIXABLE

    chosen = {f"{section}.{name}" for section, names in RUN_KEYS.items() for name in names} - set(kept)
    problems = []
    for word in words:
        choice = word.rpartition(".")[2] if "." in key_of(word) else word
        if key_of(word) in chosen or key_of(word) in FIXABLE:
            fix = f"keep this choice with --fix {choice}" if key_of(choice) in FIXABLE else "leave it out"
            problems.append(Problem(word, "would have no effect here: the search chooses the layout", fix))
    if problems:
        raise ConfigError(problems)
