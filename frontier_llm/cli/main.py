"""The command line. Each command is in its own module, which is imported only if the user calls that command."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from frontier_llm import __version__
from frontier_llm.cli.arguments import Parser
from frontier_llm.cli.needs import check_installed
from frontier_llm.cli.vocabulary import with_new_names
from frontier_llm.errors import PEER_HEADING, FrontierError, RankFailure, not_installed, suggest, unreadable

CLOSED_PIPE = 141  # exit code of a program that SIGPIPE ends, as a shell reports it.
# Name → one line of help; `frontier_llm.cli.NAME.NAME` is the Command. `--help` reads only this table, because it must
# respond in under 0.3 s.
COMMANDS = {
    "plan": "choose tensor, pipeline and data parallelism for a model on a machine",
    "train": "train a run file; joins a launcher's ranks or starts local ones",
    "check": "check a run before it is queued, and print one certificate",
    "report": "write a run directory's report.html",
    "doctor": "check this node or every node of an allocation",
    "submit": "queue a run on a Slurm site",
    "status": "show which runs are active, their progress and their expected end",
    "scaling": "run weak and strong scaling experiments",
    "tune": "run several layouts to find the fastest, first the planner's choice",
    "data": "train tokenizers, tokenize text, inspect datasets",
    "checkpoint": "list, verify, compare, import and export checkpoints",
    "evaluate": "compute held-out loss and in-context tasks of a checkpoint",
    "generate": "continue a prompt with a checkpoint",
    "ops": "show the back-end of each fused op, and the reason for it",
    "bench": "measure the training step, the ops or the communication",
    "calibrate": "measure this machine and write its machine file",
    "list": "list the named models, machines, runs, schedules, sites and tasks",
    "completion": "print a script for bash or zsh that completes commands and options",
}
_GROUPS = {
    "plan and train": ("list", "plan", "check", "train", "report"),
    "on a cluster": ("doctor", "submit", "status", "scaling", "tune"),
    "data and models": ("data", "checkpoint", "evaluate", "generate"),
    "look at this machine": ("ops", "bench", "calibrate"),
    "in the shell": ("completion",),
}
_FIRST = (
    "frontier-llm plan gpt-175b --machine frontier --nodes 128",
    "frontier-llm train quickstart train.steps=50",
    "frontier-llm status",
)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    blocks = [
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {COMMANDS[name]}" for name in names)])
        for title, names in _GROUPS.items()
    ]
    blocks.append("\n".join(["to begin with:", *(f"  {line}" for line in _FIRST)]))
    head = (
        "usage: frontier-llm <command> [options]\n\nPretrain language models on a laptop, on NVIDIA GPUs and on MI250X "
        "supercomputers."
    )
    tail = f"frontier-llm help <command> explains a command; --version prints {__version__}"
    return "\n\n".join([head, *blocks, tail])


def parser_of(*names: str) -> Parser:
    """Return the program's parser, which knows only the commands `names`."""
    parser = Parser(prog="frontier-llm")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name in names:
        getattr(importlib.import_module(f"frontier_llm.cli.{name}"), name).add_to(subparsers, name)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the words of a command.

    The result's field `typed` has the words as typed, which are also passed to local ranks.

    key=value words can also follow options, although argparse's `*` does not accept them there. Unknown options are
    reported before missing arguments.
    """
    words = with_new_names(arguments)
    parser = parser_of(words[0])
    selected = parser.selected(words)
    if unknown := selected.unknown_options(words):
        selected.refuse(unknown, words)
    check_installed(words)
    parsed, rest = parser.parse_known_args(words)
    loose = [word for word in rest if "=" in word and not word.startswith("-")]
    if loose and hasattr(parsed, "overrides"):
        parsed.overrides = [*parsed.overrides, *loose]
        rest = [word for word in rest if word not in loose]
    if rest:
        selected.refuse(rest, words)
    selected.move_settings(parsed)
    parsed.typed = words
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Errors that the user can repair are printed without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(__version__)
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        from frontier_llm.cli.hints import with_action

        fix = with_action(name) or suggest(name, COMMANDS)
        print(f"frontier-llm: unknown command {name!r}\n    fix: {fix}", file=sys.stderr)
        return 2
    called = f"frontier-llm {name}"
    try:
        parsed = parse(arguments)
        called = parsed.parser.prog  # command with its action, for example `frontier-llm data tokenize`
        _prepare_process()
        return int(parsed.work(parsed))
    except FrontierError as error:
        called = parser_of(name).selected(arguments).prog
        heading = PEER_HEADING if isinstance(error, RankFailure) else "error"
        print(f"{called}: {heading}\n{error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as end:  # argparse has printed its message
        return int(end.code or 0)
    except BrokenPipeError:
        return CLOSED_PIPE
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "frontier_llm"):
            raise
        print(f"{called}: error\n{not_installed(package)}", file=sys.stderr)
        return FrontierError.exit_code
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # the error of a write to a full disk does not name the file
        if (error.filename is None and not full) or name == "train":  # a training rank's log needs the traceback
            raise
        what = str(error.strerror)
        fix = "free space or raise the quota, then run the same command again"
        if error.filename is not None:
            named = unreadable(os.fsdecode(error.filename), error).problems[0]
            what = f"{named.where}: {named.what}"
            fix = fix if full else named.fix
        print(f"{called}: error\n{what}\n    fix: {fix}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _prepare_process() -> None:
    """Apply the environment variables of this process. Must precede the import of torch. `--help` does without."""
    from frontier_llm.files import LIFT_VARIABLE, lift_bounds
    from frontier_llm.machine.processor import limit_instruction_set
    from frontier_llm.run.rank_env import environ

    lift_bounds(environ(LIFT_VARIABLE))
    limit_instruction_set()


def entry() -> NoReturn:
    """Run `main` and exit with its code.

    If torch is loaded, exit with `os._exit`. Otherwise a torch background thread can abort the interpreter's shutdown
    and replace exit code 75 (requeue) by -6. This happened in one of eight exits on a busy machine. All files are
    closed at this point.

    If the output could not be written, exit with `os._exit` too, because the interpreter would write it once more. The
    same applies if a thread still waits for a store that does not respond (`checkpoint.remote.RemoteTransfer`).
    """
    code = main()
    failure = None
    try:
        sys.stdout.flush()
    except OSError as error:
        failure = error
    if failure is not None and code == 0:
        code = _code_of_lost_output(failure)
    with suppress(OSError):  # a full disk under a rank's log must not change the exit code
        sys.stderr.flush()
    if failure is not None or "torch" in sys.modules or threading.active_count() > 1:
        os._exit(code)
    sys.exit(code)


def _code_of_lost_output(failure: OSError) -> int:
    """Return the exit code of a command that has succeeded without its output, and print the reason.

    A closed pipe needs no reason: its reader, for example `head`, has seen enough.
    """
    if isinstance(failure, BrokenPipeError):
        return CLOSED_PIPE
    fix = "free space or raise the quota, then run the same command again"
    print(f"frontier-llm: error\nstandard output: {failure.strerror}\n    fix: {fix}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    entry()
