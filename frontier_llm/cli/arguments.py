"""Declares commands: arguments, function and examples. Also has shared options, parsers of values, and usage errors.

argparse is used directly: typer or click would need as much code for the errors, help and `key=value` words below, and
would start more slowly.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from frontier_llm.errors import FrontierError, closest
from frontier_llm.units import printable, strict_json

_BYTES = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


class _Formatter(argparse.HelpFormatter):
    """Aligns the help of options at a fixed column. An epilog of examples keeps its lines."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"max_help_position": 32, **settings})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """argparse with this project's help layout.

    The error for a mistyped option or choice suggests the most similar one.
    """

    def __init__(self, **settings: Any) -> None:
        # If options could be abbreviated, a new option could change the meaning of old commands.
        super().__init__(**{"formatter_class": _Formatter, "allow_abbrev": False, **settings})

    def error(self, message: str, fix: str = "") -> NoReturn:
        """Print the fault and its repair, and exit with 2."""
        # argparse also reports optional `*` arguments, such as key=value, as missing. Remove them from the message.
        message = message.replace(", key=value", "")
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            near = closest(choice[1], [name.strip("'") for name in choice[2].split(", ")])
            fix = f"write {near} instead of {choice[1]}" if near else ""
        if missing := re.search(r"arguments are required: (.*)", message):
            fix = fix or self._add(missing[1].split(", "), "; ")
        if missing := re.search(r"one of the arguments (.*) is required", message):
            fix = self._add(missing[1].split(" "), ", or ")
        if wrong := re.match(r"argument ([^:]+): ", message):
            fix = fix or self._add([wrong[1]], "").removeprefix("add ")
        self.exit(2, f"{self.prog}: error\n{message}\n    fix: {fix or f'{self.prog} --help'}\n")

    def _add(self, missing: list[str], separator: str) -> str:
        """Return the `fix` text for missing arguments. It lists each argument with its help text. '' if an argument has
        no help text.
        """
        formatter = self._get_formatter()
        words = []
        for action in self._actions:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            if name in missing and action.help:
                has_value = action.option_strings and action.nargs != 0
                value = f" {action.metavar or action.dest.upper()}" if has_value else ""
                about = formatter._expand_help(action)
                if action.choices:
                    about += f": {', '.join(action.choices)}"
                words.append(f"add {name}{value} ({about})")
        return separator.join(words) if len(words) == len(missing) else ""

    def refuse(self, words: list[str], typed: list[str]) -> NoReturn:
        """Exit with 2 because of words of `typed` that no argument accepts.

        Examples are a mistyped option, an option of another framework, and too many values.
        """
        from frontier_llm.cli.hints import fix_for

        fixes = list(dict.fromkeys(filter(None, (fix_for(word, typed, self) for word in words))))
        fix = "; ".join(fixes)
        if not fixes and (flag := self._repeatable_before(words[0], typed)):
            fix = f"{flag} takes one value; repeat it: {flag} {typed[typed.index(flag) + 1]} {flag} {words[0]}"
        elif not fixes and any(action.dest == "overrides" for action in self._actions):
            fix = f"settings of a run are words of the form key=value, e.g. train.steps=100; {self.prog} --help"
        self.error(f"unrecognized arguments: {' '.join(words)}", fix)

    def selected(self, words: Sequence[str]) -> Parser:
        """Return the parser of the command, or of its action, that the first words name.

        Return this parser if the first words name no command.
        """
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and words and words[0] in action.choices:
                inner: Parser = action.choices[words[0]]
                return inner.selected(words[1:])
        return self

    def unknown_options(self, words: Sequence[str]) -> list[str]:
        """Return the words before a `--` that look like long options but are no options of this command."""
        before = words[: words.index("--")] if "--" in words else words
        flags = [word for word in before if re.match(r"--[\w.-]+(=|$)", word)]
        return [word for word in flags if word.partition("=")[0] not in self._option_string_actions]

    def move_settings(self, parsed: argparse.Namespace) -> None:
        """If the user left out a positional argument such as RUN, argparse takes a key=value word for it. Move this
        word to the settings.
        """
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            is_setting = isinstance(value, str) and re.match(r"[\w.]+=", value) and not Path(value).exists()
            if action.option_strings or not is_setting or not hasattr(parsed, "overrides"):
                continue
            if action.nargs != "?":
                self.error(
                    f"{action.metavar} is missing: {value} is a setting", f"{self.prog} {action.metavar} {value}"
                )
            parsed.overrides = [value, *parsed.overrides]
            setattr(parsed, action.dest, action.default)

    def _repeatable_before(self, word: str, typed: list[str]) -> str:
        """Return the option to the left of the word if that option is repeatable. '' otherwise."""
        left = [option for option in typed[: typed.index(word)] if option.startswith("-")] if word in typed else []
        action = self._option_string_actions.get(left[-1]) if left else None
        return left[-1] if isinstance(action, argparse._AppendAction) else ""


@contextmanager
def as_typed(names: Mapping[str, str]) -> Iterator[None]:
    """Replace configuration keys in error messages of the body by the flags that the user typed.

    `names` maps keys to flags.
    """
    try:
        yield
    except FrontierError as error:
        error.reword(names)
        raise


Option = Callable[[argparse._ActionsContainer], object]  # adds itself to a parser


def option(*names: str, **settings: Any) -> Option:
    """Return an option or a positional argument with the arguments of argparse's `add_argument`."""
    return lambda parser: parser.add_argument(*names, **settings)


def one_of(*options: Option) -> Option:
    """Return a group of options of which exactly one must be given."""

    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_mutually_exclusive_group(required=True)
        for each in options:
            each(group)

    return add


@dataclass(frozen=True)
class Command:
    """Declaration of a command, or of one action of a command: its arguments and its function. A command with `actions`
    has no function of its own.

    `line` is the command's line in the list of commands. If `about` is empty, it is also the description, written as a
    sentence. Users must be able to run the examples unchanged.
    """

    work: Callable[[argparse.Namespace], int] | None = None
    options: Sequence[Option] = ()
    line: str = ""
    about: str = ""
    examples: Sequence[str] = ()
    actions: Mapping[str, Command] = field(default_factory=dict)
    metavar: str = "ACTION"

    def add_to(self, subparsers: argparse._SubParsersAction, name: str) -> None:
        """Register the command under this name."""
        about = self.about or f"{self.line[0].upper()}{self.line[1:]}."
        epilog = "\n  ".join(["examples:", *self.examples]) if self.examples else None
        parser = subparsers.add_parser(
            name,
            help=self.line,
            description=about,
            epilog=epilog,
        )
        for each in self.options:
            each(parser)
        if self.actions:
            inner = parser.add_subparsers(dest="action", required=True, metavar=self.metavar)
            for action, command in self.actions.items():
                command.add_to(inner, action)
        else:
            parser.set_defaults(work=self.work, parser=parser)


def command(
    *options: Option, line: str = "", about: str = "", examples: Sequence[str] = ()
) -> Callable[[Callable[..., int]], Command]:
    """Return a decorator that makes a `Command` of a function.

    The function takes the parsed arguments and returns the exit code.
    """
    return lambda work: Command(work, options, line, about, examples)


def run_options(about: str = "", default: str | None = None) -> tuple[Option, Option]:
    """Return the arguments RUN and [key=value …]."""
    text = "run file, or the name of one in configs/runs" + (f"; {about}" if about else "")
    optional: dict[str, Any] = {} if default is None else {"nargs": "?", "default": default}
    return (
        option(
            "run",
            metavar="RUN",
            help=text + (f" (default: {default})" if default else ""),
            **optional,
        ),
        option(
            "overrides",
            metavar="key=value",
            nargs="*",
            help="changes to it, e.g. train.steps=100 parallel.tensor=2",
        ),
    )


# options that have the same meaning in all commands
JSON = option("--json", action="store_true", help="machine-readable result on stdout")
# Only this option can import code for a checkpoint that is not in the user's own run directory.
PLUGIN = option(
    "--plugin",
    action="append",
    default=[],
    metavar="FILE",
    help="import this plugin: a .py file, module or entry point (docs/extending.md); repeatable",
)
NO_VERIFY = option("--no-verify", action="store_true", help="do not compare the checkpoint with its digests first")
# account and partition for Slurm
JOB = (
    option("-A", "--account", metavar="PROJECT", help="project to charge (default: SBATCH_ACCOUNT)"),
    option("--partition", metavar="NAME", help="default: the site's"),
)
ALLOW_CHANGE = option(
    "--allow-change",
    action="append",
    default=[],
    metavar="KEY",
    help="let this key (e.g. train.steps) differ from the checkpoint's although it changes the mathematics; repeatable",
)
# options for the case that the newest checkpoint is damaged or was made with other settings
RESUME = (
    option(
        "--strict",
        action="store_true",
        help="stop when the newest checkpoint is damaged (default: use the one before it)",
    ),
    ALLOW_CHANGE,
)


def show(args: argparse.Namespace, content: Any, text: Callable[[], str]) -> None:
    """Print a command's result: `content` as JSON with --json, otherwise `text()`.

    Control characters in names from files are escaped, so that they cannot control the terminal.
    """
    print(strict_json(content) if args.json else printable(text()))


def dataset_prefix(text: str) -> str:
    """Return a dataset's path without .bin/.idx. Shell completion can leave such an ending."""
    path = re.sub(r"\.(?:bin|idx)?$", "", text)
    if not path or path.endswith("/"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the name of a file; give a path without .bin/.idx, e.g. {path}data"
        )
    return path


def _number(text: str, pattern: str, what: str) -> re.Match[str]:
    """Return the match of the pattern. Raises ArgumentTypeError with `what` as the expected kind of number.

    If the pattern has a group, 0 is also refused.
    """
    match = re.fullmatch(pattern, text.strip().lower())
    if match is None or (match.re.groups and not float(match[1])):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return match


def yaml_file(text: str) -> Path:
    """Return the path of a YAML file that a command writes. Other endings are refused before the command starts."""
    path = Path(text)
    if path.suffix not in (".yaml", ".yml"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .yaml: write {path.with_suffix('.yaml')}")
    return path


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    return int(_number(text, r"(\d{1,18})", "a whole number above 0")[1])


def natural(text: str) -> int:
    """Parse a whole number, 0 or more."""
    return int(_number(text, r"\d{1,18}", "a whole number, 0 or more")[0])


def amount(text: str) -> float:
    """Parse a finite number, 0 or more: '1.5', '2e3'. nan is refused, because no comparison would detect it."""
    return float(_number(text, r"\d{1,18}(?:\.\d*)?(?:e\+?\d{1,2})?|\.\d+", "a number, 0 or more")[0])


def positive_amount(text: str) -> float:
    """Parse a finite number above 0."""
    if not (number := amount(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def size_of(text: str) -> int:
    """'64KiB' -> 65536."""
    match = _number(text, r"(\d+)\s*([kmg]ib)?", "a size such as 1KiB, 64MiB or 4GiB")
    return int(match[1]) * _BYTES[match[2] or ""]


def count_of(text: str) -> float:
    """'300B' -> 3e11, '1.5T' -> 1.5e12, '2e9' -> 2e9."""
    match = _number(
        text.replace("_", ""),
        r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmbgt]?)",
        "a count such as 300B, 1.5T or 3e11",
    )
    return float(match[1]) * _COUNTS[match[2]]


class ProgressBar:
    """Shows progress on one line of a terminal. `on` returns a callback, and `close` ends the line."""

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._any = False

    def on(self, what: str, unit: str) -> Callable[..., None]:
        """Return a callback (done[, total]) that shows the progress of `what`."""

        def report(done: int, of: int | None = None) -> None:
            if self._shown:
                self._any = True
                sys.stderr.write(f"\r\033[K{what}: {done:,}" + (f" of {of:,}" if of is not None else "") + f" {unit}")
                sys.stderr.flush()

        return report

    def close(self) -> None:
        """End the line if one was shown."""
        if self._any:
            sys.stderr.write("\n")
