"""What the commands' parsers share: one name, one metavar and one sentence for what several commands take; errors with a way out."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from frontier_llm.errors import FrontierError, closest

_BYTES = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


class _Formatter(argparse.HelpFormatter):
    """Options at a fixed column; an epilog of examples keeps its lines."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"max_help_position": 32, **settings})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """argparse with our help layout; a mistyped option or choice is answered with the nearest one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **settings})

    def error(self, message: str, fix: str = "") -> NoReturn:
        """Exit with 2 after what, and what to type instead."""
        message = message.replace("required: RUN, key=value", "required: RUN")  # argparse takes a `*` that follows for required, too
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            near = closest(choice[1], [name.strip("'") for name in choice[2].split(", ")])
            fix = f"{near} instead of {choice[1]}" if near else ""
        self.exit(2, f"{self.prog}: error\n{message}\n    fix: {fix or f'{self.prog} --help'}\n")

    def refuse(self, words: list[str], typed: list[str]) -> NoReturn:
        """Exit with 2 over the words of `typed` that nothing takes: a mistyped option, an option of another framework, a value too many."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        near = [f"{closest(word, flags)} instead of {word}" for word in words if word.startswith("-") and closest(word, flags)]
        fix = ", ".join(near)
        if not near and any(action.dest == "overrides" for action in self._actions):
            setting = re.sub(r"^-+", "", words[0])
            example = f"{setting}=VALUE" if "." in setting and "=" not in setting else setting if "." in setting else "train.steps=100"
            fix = f"settings of a run are words of the form key=value, e.g. {example}"
            fix += "; docs/coming_from.md has other frameworks' options" if words[0].startswith("-") and "." not in setting else ""
        elif not near and (flag := self._repeatable_before(words[0], typed)):
            fix = f"{flag} takes one value; repeat it: {flag} {typed[typed.index(flag) + 1]} {flag} {words[0]}"
        self.error(f"unrecognized arguments: {' '.join(words)}", fix)

    def _repeatable_before(self, word: str, typed: list[str]) -> str:
        """The option left of the word, where it is one that may be given several times."""
        left = [option for option in typed[: typed.index(word)] if option.startswith("-")] if word in typed else []
        action = self._option_string_actions.get(left[-1]) if left else None
        return left[-1] if isinstance(action, argparse._AppendAction) else ""

    def chosen(self, parsed: argparse.Namespace) -> Parser:
        """The parser of the command, and of its action, that was typed."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and (command := getattr(parsed, action.dest, None)) in action.choices:
                return action.choices[command].chosen(parsed)
        return self


@contextmanager
def as_typed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the body speak of what the user has typed: `names` has the flag for each name that it goes by elsewhere."""
    try:
        yield
    except FrontierError as error:
        error.reword(names)
        raise


def examples(*lines: str) -> str:
    """An epilog of commands that can be typed as they stand."""
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def add_action(actions: argparse._SubParsersAction, name: str, line: str) -> argparse.ArgumentParser:
    """A command's action; its one line of help, as a sentence, is also its description."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}.")
    return parser


def add_run(parser: argparse.ArgumentParser, about: str = "", default: str | None = None) -> None:
    """RUN [key=value …]."""
    text = "run file, or the name of one in configs/runs" + (f"; {about}" if about else "")
    if default is None:
        parser.add_argument("run", metavar="RUN", help=text)
    else:
        parser.add_argument("run", metavar="RUN", nargs="?", default=default, help=f"{text} (default: {default})")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="changes to it, e.g. train.steps=100 parallel.tensor=2")


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json: the same flag and the same promise everywhere."""
    parser.add_argument("--json", action="store_true", help="machine-readable result on stdout")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Whom Slurm charges and where it queues."""
    parser.add_argument("-A", "--account", metavar="PROJECT", help="project to charge (default: SBATCH_ACCOUNT)")
    parser.add_argument("--partition", metavar="NAME", help="default: the site's")


def add_resume(parser: argparse.ArgumentParser) -> None:
    """How to go on from a checkpoint that is damaged, or was made with other settings."""
    parser.add_argument("--strict", action="store_true", help="stop when the newest checkpoint is damaged (default: use the one before it)")
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="let this key (e.g. train.steps) differ from the checkpoint's although it changes the mathematics; repeatable",
    )


def resume_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """The words that give `add_resume`'s arguments again."""
    return (*(["--strict"] if args.strict else []), *(word for key in args.allow_change for word in ("--allow-change", key)))


def dataset_prefix(text: str) -> str:
    """A dataset's path without .bin/.idx; with one of them, as a shell's completion leaves it, it is the same."""
    path = re.sub(r"\.(?:bin|idx)?$", "", text)
    if not path or path.endswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} names no file; give a path without .bin/.idx, e.g. {path}data")
    return path


def positive(text: str) -> int:
    """A whole number above 0."""
    if not re.fullmatch(r"0*[1-9]\d{0,17}", text.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def natural(text: str) -> int:
    """A whole number, 0 included."""
    if not re.fullmatch(r"\d{1,18}", text.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def size_of(text: str) -> int:
    """'64KiB' -> 65536."""
    match = re.fullmatch(r"(\d+)\s*([kmg]ib)?", text.strip().lower())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 1KiB, 64MiB or 4GiB")
    return int(match[1]) * _BYTES[match[2] or ""]


def count_of(text: str) -> float:
    """'300B' -> 3e11, '1.5T' -> 1.5e12, '2e9' -> 2e9."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmbgt]?)", text.strip().lower().replace("_", ""))
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count such as 300B, 1.5T or 3e11")
    return float(match[1]) * _COUNTS[match[2]]
