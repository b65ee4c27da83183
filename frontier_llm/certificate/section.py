"""The record of one section of a certificate.

Each file of this package that checks a section returns one record. `certificate.py` collects the records, and `page.py`
prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from frontier_llm.errors import Problem


class SectionVerdict(StrEnum):
    """Result of a section."""

    PASSED = "passed"
    REFUSED = "refused"
    NOT_CHECKABLE = "not checkable here"


@dataclass(frozen=True)
class CertificateSection:
    """One section of a certificate.

    A passed section has evidence. A refused section has at least one problem. A section that is not checkable here has
    the reason in `why`. `seconds` is the time that the check took; the run over all sections sets it. `by_line` has
    counts of the section "types" for programs, by file and line.
    """

    name: str
    verdict: SectionVerdict
    evidence: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    why: str = ""
    seconds: float = 0.0
    by_line: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the section for --json."""
        return {
            "verdict": str(self.verdict),
            "why": self.why,
            "problems": [asdict(problem) for problem in self.problems],
            "evidence": list(self.evidence),
            "seconds": self.seconds,
            **({"by_line": dict(self.by_line)} if self.by_line else {}),
        }


def judged(name: str, evidence: Iterable[str], problems: Iterable[Problem]) -> CertificateSection:
    """Return a section that is refused if it has problems, and passed otherwise."""
    found = tuple(problems)
    verdict = SectionVerdict.REFUSED if found else SectionVerdict.PASSED
    return CertificateSection(name=name, verdict=verdict, evidence=tuple(evidence), problems=found)


def not_checkable(name: str, why: str, evidence: Iterable[str] = ()) -> CertificateSection:
    """Return a section that cannot be checked on this computer, for the reason `why`."""
    return CertificateSection(name=name, verdict=SectionVerdict.NOT_CHECKABLE, evidence=tuple(evidence), why=why)
