"""The record of one section of a certificate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from frontier_llm.errors import Problem


class Verdict(StrEnum):
    """Result of a section."""

    PASSED = "passed"
    REFUSED = "refused"
    NOT_CHECKABLE = "not checkable here"


@dataclass(frozen=True)
class Section:
    """One section of a certificate.

    A passed section has evidence. A refused section has at least one problem. A section that is not checkable here has
    the reason in `why`. `seconds` is the time that the check took; the run over all sections sets it.
    """

    name: str
    verdict: Verdict
    evidence: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    why: str = ""
    seconds: float = 0.0


def judged(name: str, evidence: tuple[str, ...], problems: tuple[Problem, ...]) -> Section:
    """Return a section that is refused if it has problems, and passed otherwise."""
    verdict = Verdict.REFUSED if problems else Verdict.PASSED
    return Section(name=name, verdict=verdict, evidence=evidence, problems=problems)


def not_checkable(name: str, why: str, evidence: tuple[str, ...] = ()) -> Section:
    """Return a section that cannot be checked on this computer, for the reason `why`."""
    return Section(name=name, verdict=Verdict.NOT_CHECKABLE, evidence=evidence, why=why)
