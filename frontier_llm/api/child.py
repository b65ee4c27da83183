"""The child process of `frontier_llm.train`: runs one command, and ends when the process that started it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from frontier_llm.cli.main import parse
from frontier_llm.errors import FrontierError
from frontier_llm.files import LIFT_VARIABLE, lift_bounds, write_atomically
from frontier_llm.machine.processor import limit_instruction_set
from frontier_llm.run.rank_env import environ
from frontier_llm.units import strict_json

_PR_SET_PDEATHSIG = 1  # option of prctl(2), from linux/prctl.h


def end_with(parent: int) -> None:
    """Receive SIGTERM when the process `parent` dies. A training run then saves and ends within a step."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # True if the parent died before the call of prctl, which then has no effect
        sys.exit(128 + signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Run `arguments[2:]` as a command. `arguments` begins with the parent's process id and the file for a refusal."""
    parent, report, *words = arguments
    end_with(int(parent))
    try:
        lift_bounds(environ(LIFT_VARIABLE))
        limit_instruction_set()
        parsed = parse(words)
        return int(parsed.work(parsed))
    except FrontierError as error:
        problems = [asdict(problem) for problem in error.problems]
        write_atomically(Path(report), strict_json({"kind": type(error).__name__, "problems": problems}))
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's threads can abort an orderly exit (cli.main.entry)
