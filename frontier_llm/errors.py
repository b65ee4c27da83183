"""Exceptions with messages for users. A message states the fault, its place and the repair. One exception can hold
several problems.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.units import printable

# causes in failure records; every class of errors names its own
REFUSED_CAUSE = "refused"  # the user has to change something
CRASH = "crash"
OUT_OF_MEMORY = "out of memory"  # device memory is exhausted
NOT_FINITE = "not finite"  # too many steps in a row were skipped
WRONG_RESULTS = "wrong results"
UNREACHABLE = "unreachable"  # a service outside the job does not respond; a later start may succeed
PEER_HEADING = "error on another rank"  # the command line prints it above a RankFailure, instead of "error"

MOST_SHOWN = 8  # problems of one kind that an error lists


@dataclass(frozen=True)
class Problem:
    """One fault that a user can repair.

    `where` names the key, path or rank. `what` states the rule and the offending value.
    `fix` is the command or change that repairs it, with the nearest valid values if there are any.
    """

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return printable(f"{text}\n    fix: {self.fix}" if self.fix else text)


def not_installed(package: str, where: str = "") -> Problem:
    """Return the problem of a missing package.

    torch and packages that only some commands need (plots, models of other libraries) are not requirements of
    `frontier_llm`.
    """
    which = "  (docs/first_day.md has the index of the build for ROCm)" if package == "torch" else ""
    return Problem(where, f"{package} is not installed", f"pip install {package}{which}")


def first_of(problems: Sequence[Problem]) -> list[Problem]:
    """Return the first MOST_SHOWN problems, and one more that states how many were left out.

    The list can be as long as a model's list of tensors.
    """
    rest = len(problems) - MOST_SHOWN
    shown = list(problems[:MOST_SHOWN])
    if rest > 0:
        shown.append(Problem(where="", what=f"… and {rest} more like these"))
    return shown


def in_one_line(error: Exception) -> str:
    """Return the type and the first line of an exception of any package. The message can be empty."""
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


class FrontierError(Exception):
    """An error that the user can repair. The command line prints it without a traceback and exits with `exit_code`.

    If it ends a rank, `cause` becomes the cause in the failure record (run/failure.py).
    """

    exit_code = 2
    cause = REFUSED_CAUSE

    def __init__(self, problems: Problem | str | Iterable[Problem], fix: str = "", where: str = "") -> None:
        if isinstance(problems, str):
            problems = Problem(where, problems, fix)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(f"  {problem}" if len(self.problems) > 1 else str(problem) for problem in self.problems)

    @property
    def what(self) -> str:
        """What is wrong: the rule and the offending value of the first problem."""
        return self.problems[0].what if self.problems else ""

    @property
    def why(self) -> str:
        """The key, path or rank that caused the first problem. '' if there is none."""
        return self.problems[0].where if self.problems else ""

    @property
    def fix(self) -> str:
        """The command or change that repairs the first problem. '' if none is known."""
        return self.problems[0].fix if self.problems else ""

    def reword(self, names: Mapping[str, str]) -> None:
        """Replace names in all problems, for example configuration keys by a command's flags."""

        def said(text: str) -> str:
            for name, other in names.items():
                text = text.replace(name, other)
            return text

        self.problems = tuple(
            Problem(*map(said, (problem.where, problem.what, problem.fix))) for problem in self.problems
        )


class ConfigError(FrontierError):
    """A key, a value or a combination of values that is not allowed in a run."""


def unreadable(path: Path | str, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be read. It names the absolute path."""
    fix = "check the path" if isinstance(error, FileNotFoundError) else "check the path and its permissions"
    return ConfigError(error.strerror or str(error), fix, os.path.abspath(path))


class LayoutError(FrontierError):
    """A (tp, pp, dp, chunks, batch) combination that is not legal for the model or the world size."""


class DataError(FrontierError):
    """A dataset, tokenizer or index that is missing, damaged or does not match the model."""


class CheckpointError(FrontierError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class BackendError(FrontierError):
    """A kernel, provider or communication back-end that was requested and is not available."""


class RankFailure(FrontierError):
    """A rank ended or stopped responding. The message names the rank."""

    exit_code = 1
    cause = CRASH


class SkippedSteps(FrontierError):
    """Too many steps in a row were skipped, because their gradients were not finite or spiked."""

    cause = NOT_FINITE


# names of other libraries for our precisions, other names of torch's device "cuda", which is also the AMD device, and
# abbreviations of keys
SYNONYMS = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
}
SYNONYMS |= {"gpu": "cuda", "rocm": "cuda", "hip": "cuda"}
SYNONYMS |= {"checkpoint_interval": "save_interval", "checkpoint_every": "save_interval", "max_steps": "steps"}
SYNONYMS |= {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert", "mbs": "micro_batch"}
SYNONYMS |= {"gbs": "global_batch"}


def closest(name: str, valid: Iterable[str]) -> str:
    """Return the valid name that is a synonym of `name` or is spelled most similarly. '' if there is none."""
    valid = list(valid)
    if (synonym := SYNONYMS.get(name.removeprefix("torch."), "")) in valid:
        return synonym
    matches = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return matches[0] if matches else ""


def suggest(name: str, valid: Iterable[str]) -> str:
    """Return the `fix` text for an unknown name: the closest valid name first, then all valid names."""
    names = sorted(valid)
    listing = ", ".join(names)
    near = closest(name, names)
    return f"did you mean {near!r}? valid: {listing}" if near else f"valid: {listing}"


def nearest(value: int, valid: Iterable[int], count: int = 2) -> list[int]:
    """Return the `count` members of `valid` that are closest to `value`, sorted."""
    if isinstance(valid, range):  # the range can be very long, for example because of a mistyped batch size
        place = min(max((value - valid.start) // valid.step, 0), len(valid))
        valid = valid[max(0, place - count) : place + count + 1]
    return sorted(sorted(set(valid), key=lambda candidate: (abs(candidate - value), candidate))[:count])


def divisors(number: int) -> list[int]:
    """All positive divisors of `number`, sorted."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return small + [number // candidate for candidate in reversed(small) if candidate * candidate != number]
