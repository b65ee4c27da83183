"""Formats a certificate as text, as Markdown and as a self-contained HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from frontier_llm import __version__, pages, tables
from frontier_llm.certificate.certificate import Certificate
from frontier_llm.certificate.section import CertificateSection, SectionVerdict

HEAD = ("section", "verdict", "evidence", ">seconds")
MEANING = (
    "A passed section has its evidence in the table. A refused section names the problem and its repair. Step times, "
    "memory and costs are predicted."
)


def summary(certificate: Certificate) -> str:
    """Return a sentence about the verdicts."""
    count = len(certificate.sections)
    refused = ", ".join(section.name for section in certificate.refused)
    unknown = ", ".join(section.name for section in certificate.not_checkable)
    parts = [f"{count - len(certificate.refused) - len(certificate.not_checkable)} of {count} sections passed"]
    if refused:
        parts.append(f"refused: {refused}")
    if unknown:
        parts.append(f"not checkable here: {unknown}")
    return "; ".join(parts)


def as_text(certificate: Certificate) -> str:
    """Return the certificate for a terminal."""
    rows = [row for section in certificate.sections for row in _text_rows(section)]
    head = ("section", "verdict", ">seconds", "evidence")
    return "\n".join([certificate.title, "", tables.aligned(head, rows), "", summary(certificate)])


def _text_rows(section: CertificateSection) -> Iterator[tuple[str, str, str, str]]:
    """Yield one row per line of evidence. Only the first row names the section."""
    lines = list(_lines(section)) or [""]
    yield section.name, section.verdict, f"{section.seconds:.1f}", lines[0]
    for line in lines[1:]:
        yield "", "", "", line


def _lines(section: CertificateSection) -> Iterator[str]:
    """Yield the reasons of a verdict, then the evidence."""
    if section.why:
        yield section.why
    for problem in section.problems:
        yield from str(problem).splitlines()
    yield from section.evidence


def as_markdown(certificate: Certificate) -> str:
    """Return the certificate as Markdown, without the seconds and line numbers, which often change."""
    rows = [
        (section.name, str(section.verdict), "<br>".join(_escaped(line) for line in _lines(section)))
        for section in certificate.sections
    ]
    return "\n".join([tables.markdown(HEAD[:-1], rows), "", f"{summary(certificate)}."])


def _escaped(line: str) -> str:
    return re.sub(r"(\.py):\d+", r"\1", line).replace("|", "\\|").replace("<", "&lt;").strip()


def write_html(certificate: Certificate, path: Path) -> Path:
    """Write the certificate as one HTML page and return its path."""
    counts = {
        verdict: sum(section.verdict is verdict for section in certificate.sections) for verdict in SectionVerdict
    }
    parts = [pages.tiles((count, verdict) for verdict, count in counts.items())]
    parts.append(
        pages.table(
            ("section", "verdict", "time", "evidence"),
            [
                (section.name, section.verdict, f"{section.seconds:.1f} s", (section.evidence or (section.why,))[0])
                for section in certificate.sections
            ],
            ["bad" if section.verdict is SectionVerdict.REFUSED else "" for section in certificate.sections],
        )
    )
    for section in certificate.sections:
        lines = "\n".join(_lines(section))
        parts.append(
            f"<h2>{pages.text(section.name)}: {section.verdict}</h2><pre class=lines>{pages.text(lines)}</pre>"
        )
    subtitle = f"Certificate of frontier_llm {__version__}. {MEANING}"
    return pages.write_page(path, certificate.title, subtitle, parts, has_figures=False)
