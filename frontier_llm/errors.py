"""Errors for people: what is wrong, why, and how to fix it; several at once where several are known."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from frontier_llm.units import printable


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    `where` names the key, path or rank; `what` states the rule with the offending value;
    `fix` is what to type or change, with the nearest valid values where they exist.
    """

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return printable(f"{text}\n    fix: {self.fix}" if self.fix else text)


def not_installed(package: str, where: str = "") -> Problem:
    """A package that is needed and not there; torch and what only some commands need (plots, models of others) are
    not requirements of ours.
    """
    which = "  (docs/first_day.md has the index of the build for ROCm)" if package == "torch" else ""
    return Problem(where, f"{package} is not installed", f"pip install {package}{which}")


def first_of(problems: Sequence[Problem], count: int = 8) -> list[Problem]:
    """The first of a list that may be as long as a model's tensors, and how many more there are."""
    rest = len(problems) - count
    shown = list(problems[:count])
    if rest > 0:
        shown.append(Problem(where="", what=f"… and {rest} more like these"))
    return shown


class FrontierError(Exception):
    """Anything the user can mend. The command line prints it without a traceback and exits with `exit_code`."""

    exit_code = 2

    def __init__(self, problems: Problem | str | Iterable[Problem], fix: str = "", where: str = "") -> None:
        if isinstance(problems, str):
            problems = Problem(where, problems, fix)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(f"  {problem}" if len(self.problems) > 1 else str(problem) for problem in self.problems)

    def reword(self, names: Mapping[str, str]) -> None:
        """Say other names for what the problems speak of: a command's flags for the configuration's keys."""

        def said(text: str) -> str:
            for name, other in names.items():
                text = text.replace(name, other)
            return text

        self.problems = tuple(
            Problem(*map(said, (problem.where, problem.what, problem.fix))) for problem in self.problems
        )


class ConfigError(FrontierError):
    """A key, a value or a combination of values that the run cannot have."""


class LayoutError(FrontierError):
    """A (tp, pp, dp, chunks, batch) combination that is not legal for the model or the world size."""


class DataError(FrontierError):
    """A dataset, tokenizer or index that is missing, damaged or does not match the model."""


class CheckpointError(FrontierError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class BackendError(FrontierError):
    """A kernel, provider or communication back-end that was asked for and is not there."""


class RankFailure(FrontierError):
    """A rank died or stopped answering; the message names it."""

    exit_code = 1


# what others call our precisions, and torch's device of either vendor
_SYNONYMS = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
}
_SYNONYMS |= {"gpu": "cuda", "rocm": "cuda", "hip": "cuda"}


def closest(name: str, valid: Iterable[str]) -> str:
    """The valid name that means the same or is most like `name`, or '' when none is near; for 'did you mean'."""
    valid = list(valid)
    if (synonym := _SYNONYMS.get(name.removeprefix("torch."), "")) in valid:
        return synonym
    matches = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return matches[0] if matches else ""


def suggest(name: str, valid: Iterable[str]) -> str:
    """A `fix` sentence for an unknown name: the closest valid one first, then the whole list."""
    names = sorted(valid)
    listing = ", ".join(names)
    near = closest(name, names)
    return f"did you mean {near!r}? valid: {listing}" if near else f"valid: {listing}"


def nearest(value: int, valid: Iterable[int], count: int = 2) -> list[int]:
    """The `count` members of `valid` closest to `value`, sorted; for 'nearest valid values'."""
    if isinstance(valid, range):  # may be as long as a batch size that somebody mistyped
        place = min(max((value - valid.start) // valid.step, 0), len(valid))
        valid = valid[max(0, place - count) : place + count + 1]
    return sorted(sorted(set(valid), key=lambda candidate: (abs(candidate - value), candidate))[:count])


def divisors(number: int) -> list[int]:
    """All positive divisors of `number`, sorted."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return small + [number // candidate for candidate in reversed(small) if candidate * candidate != number]
