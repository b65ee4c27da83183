"""Lists the sections of a certificate, and checks them for a run."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from frontier_llm.certificate import communication, configuration, installation, memory, restart
from frontier_llm.certificate.section import CertificateSection, SectionVerdict, judged, not_checkable
from frontier_llm.certificate.subject import Subject
from frontier_llm.errors import FrontierError, Problem
from frontier_llm.planner.search import without_garbage_collection
from frontier_llm.units import plural


@dataclass(frozen=True)
class Entry:
    """A section of the certificate, and the function that checks it."""

    name: str
    check: Callable[[Subject], CertificateSection]
    needs_layout: bool = True  # True: the section can only be checked if the layout is legal


@cache
def _why_no_torch() -> str:
    """Return why this interpreter cannot import torch; '' if it can."""
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a library that torch needs is absent
        return f"torch cannot be imported: {error}"
    return ""


def _check_types(subject: Subject) -> CertificateSection:
    if _why_no_torch():
        return not_checkable(TYPES, _why_no_torch())
    from frontier_llm.certificate.axis_types.check import check_axis_types

    return check_axis_types(subject.config, subject.world_size)


TYPES = "types"
ENTRIES = (
    Entry(installation.NAME, installation.check_installation, needs_layout=False),
    Entry(configuration.NAME, configuration.check_configuration, needs_layout=False),
    Entry(communication.NAME, communication.check_communication),
    Entry(TYPES, _check_types),
    Entry(restart.NAME, restart.check_restart),
    Entry(memory.NAME, memory.check_memory),
    Entry(memory.COST, memory.check_cost),
)
NAMES = tuple(entry.name for entry in ENTRIES)


def of_submit() -> tuple[str, ...]:
    """Return the sections that `submit` checks. Types need torch, which a login node may not have."""
    return tuple(name for name in NAMES if name != TYPES or not _why_no_torch())


@dataclass(frozen=True)
class Certificate:
    """The checked sections of one run."""

    title: str
    sections: tuple[CertificateSection, ...]

    @property
    def refused(self) -> tuple[CertificateSection, ...]:
        """The sections with problems."""
        return tuple(section for section in self.sections if section.verdict is SectionVerdict.REFUSED)

    @property
    def not_checkable(self) -> tuple[CertificateSection, ...]:
        """The sections that cannot be checked on this computer."""
        return tuple(section for section in self.sections if section.verdict is SectionVerdict.NOT_CHECKABLE)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems of all sections."""
        return tuple(problem for section in self.refused for problem in section.problems)

    def as_dict(self) -> dict[str, Any]:
        """Return the certificate for --json."""
        return {
            "title": self.title,
            "passed": not self.refused,
            "sections": {section.name: section.as_dict() for section in self.sections},
        }


def certify(subject: Subject, names: Sequence[str] = NAMES) -> Certificate:
    """Check the named sections of a run, in the order of the certificate."""
    with without_garbage_collection():
        sections = tuple(_checked(entry, subject) for entry in ENTRIES if entry.name in names)
    config = subject.config
    ranks = plural(subject.world_size, "rank")
    title = f"{config.model.name} on {ranks}, {plural(subject.nodes_of_ranks, 'node')} of {config.machine}"
    return Certificate(title, sections)


def _checked(entry: Entry, subject: Subject) -> CertificateSection:
    started_s = time.perf_counter()
    try:
        if entry.needs_layout and subject.layout_problems:
            section = not_checkable(entry.name, f"the layout is refused (section {configuration.NAME})")
        else:
            section = entry.check(subject)
    except FrontierError as error:
        section = judged(entry.name, (), error.problems)
    return replace(section, seconds=time.perf_counter() - started_s)
