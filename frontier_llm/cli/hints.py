"""Suggests a replacement for an option that a command does not have."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING

from frontier_llm.config.foreign import SIMILAR
from frontier_llm.errors import SYNONYMS

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frontier_llm.cli.arguments import Parser


# Words that users type for things with another name here → the possible meanings, in the order in which they are tried.
# A meaning is an option, an argument without an option, a setting of a run ({} stands for the typed value), a usage of
# the command, or a sentence. The first meaning that the command has is suggested.
OTHER_WORDS = {
    "--batch": ("--batch-size", "--batch-per-replica", "batch.global_batch={}"),
    "--bf16": ("precision.dtype=bf16",),
    "--checkpoint": ("CHECKPOINT",),
    "--ckpt": ("CHECKPOINT",),
    "--config": ("RUN", "--run"),
    "--epochs": ("train.steps={}epochs",),
    "--figures": ("--html",),
    "--file": ("INPUT", "RUN"),
    "--fp16": ("precision.dtype=fp16",),
    "--gpus": ("--nodes",),
    "--hours": ("--max-node-hours", "--time"),
    "--html": ("--figures",),
    "--input": ("INPUT",),
    "--model": ("MODEL", "CHECKPOINT", "model={}"),
    "--num-nodes": ("--nodes",),
    "--output": ("--emit", "--emit-machine", "--html", "frontier-llm checkpoint export-hf CHECKPOINT DIR"),
    "--output-prefix": ("--output",),
    "--ranks": ("the number of ranks is parallel.tensor x parallel.pipeline x parallel.data",),
    "--run": ("RUN",),
    "--text": ("--prompt",),
    "--walltime": ("--time",),
}


def other_word(word: str, following: str, parser: Parser) -> str:
    """Return what this command has instead of a word of OTHER_WORDS, or ''."""
    flag, _, value = word.partition("=")
    value = value or (following if following and not following.startswith("-") else "VALUE")
    arguments = {action.metavar for action in parser._actions if not action.option_strings}
    for meaning in OTHER_WORDS.get(flag, ()):
        if meaning in parser._option_string_actions:
            return f"{meaning} instead of {flag}"
        if meaning in arguments:
            return f"give {meaning} without an option: {parser.prog} {value}"
        if meaning.startswith(f"{parser.prog} "):
            return meaning
        if " x " in meaning and takes_settings(parser):
            return meaning
        if "=" in meaning and takes_settings(parser):
            return f"{meaning.format(value)} instead of {flag}"
    return ""


def takes_settings(parser: Parser) -> bool:
    """Whether the command takes all settings of a run. Commands of a checkpoint only take `parallel` settings."""
    actions = parser._actions
    is_of_checkpoint = any(action.dest == "model" and action.metavar == "CHECKPOINT" for action in actions)
    return any(action.dest == "overrides" for action in actions) and not is_of_checkpoint


def near_option(word: str, parser: Parser) -> str:
    """Return the most similarly spelled option. '' if no option is spelled similarly."""
    shown = [flag for action in parser._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
    typed = word.partition("=")[0]
    swapped = [flag for flag in shown if sorted(flag) == sorted(typed)]
    if swapped:
        return swapped[0]
    matches = get_close_matches(typed, shown, n=1, cutoff=SIMILAR)
    return matches[0] if matches else ""


def setting_for(word: str, following: str, parser: Parser, is_mistyped: bool = False) -> str:
    """Return the words that set the key of a run with the name of the option `word`. '' if there is no such key.

    If `is_mistyped` is true, take the key that is spelled most similarly.
    """
    if not any(action.dest == "overrides" for action in parser._actions):
        return ""
    flag, _, value = word.partition("=")
    leaf = flag.strip("-").replace("-", "_")
    leaf = SYNONYMS.get(leaf, leaf)
    value = value or (following if following and not following.startswith("-") else "VALUE")
    if "." in leaf:
        return f"{leaf}={value}"
    if is_mistyped:
        leaf = next(iter(get_close_matches(leaf, {key.rpartition(".")[2] for key in _keys()}, n=1, cutoff=SIMILAR)), "")
    keys = [key for key in _keys() if key.rpartition(".")[2] == leaf]
    if "--fix" in parser._option_string_actions and any(key.startswith("parallel.") for key in keys):
        return f"--fix {leaf}={value}"
    if not takes_settings(parser):
        keys = [key for key in keys if key.startswith("parallel.")]
    return " or ".join(f"{key}={value}" for key in keys)


@cache
def _keys() -> tuple[str, ...]:
    """Return the keys of a run, such as `machine` and `train.steps`."""
    from frontier_llm.config import RunConfig

    return ("machine", *_keys_in(RunConfig, ""))


def _keys_in(section: type[BaseModel], prefix: str) -> Iterator[str]:
    from pydantic import BaseModel

    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys_in(kind, f"{prefix}{name}.")
        elif prefix:
            yield f"{prefix}{name}"


def other_commands(word: str) -> str:
    """Return the commands that have an option of this name, or ''."""
    from frontier_llm.cli.vocabulary import OPTIONS

    flag = word.partition("=")[0]
    return ", ".join(_having(_all_commands(), flag)) if flag in OPTIONS else ""


@cache
def _all_commands() -> argparse.ArgumentParser:
    from frontier_llm.cli.main import COMMANDS, parser_of

    return parser_of(*COMMANDS)


def with_action(word: str) -> str:
    """Return the commands that have an action of this name, such as `frontier-llm checkpoint export-hf`. '' if none."""
    return " or ".join(
        inner.choices[word].prog
        for parser in _inner(_all_commands())
        for inner in parser._actions
        if isinstance(inner, argparse._SubParsersAction) and word in inner.choices
    )


def _having(parser: argparse.ArgumentParser, flag: str) -> Iterator[str]:
    if flag in parser._option_string_actions:
        yield parser.prog
    for inner in _inner(parser):
        yield from _having(inner, flag)


def _inner(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of a parser's commands or actions."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def fix_for(word: str, typed: Sequence[str], parser: Parser) -> str:
    """Return the `fix` text for one word that `parser` does not accept. '' if the parser's help is all that can be
    suggested.
    """
    from frontier_llm.config.foreign import PAGE, name_here

    place = list(typed).index(word) if word in typed else len(typed)
    following = typed[place + 1] if place + 1 < len(typed) else ""
    if not word.startswith("-"):
        is_key = re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word)
        return f"settings of a run are words of the form key=value, e.g. {word}=VALUE" if is_key else ""
    if other := other_word(word, following, parser):
        return other
    if setting := setting_for(word, following, parser):
        return f"{setting} instead of {word.partition('=')[0]}"
    if flag := near_option(word, parser):
        return f"{flag} instead of {word.partition('=')[0]}"
    if takes_settings(parser) and (meaning := name_here(word)):
        return f"here: {meaning} ({PAGE})"
    if setting := setting_for(word, following, parser, is_mistyped=True):
        return f"{setting} instead of {word.partition('=')[0]}"
    if commands := other_commands(word):
        return f"{word.partition('=')[0]} is an option of {commands}"
    return ""
