"""Formats tables for a terminal and for Markdown. A column is aligned to the right if its heading begins with '>', as
for numbers.
"""

from collections.abc import Iterable, Sequence


def aligned(head: Sequence[str], rows: Iterable[Iterable[object]], indent: str = "") -> str:
    """Return the table as plain text. Each column is as wide as its widest cell."""
    lines = [[title.removeprefix(">") for title in head], *([str(cell) for cell in row] for row in rows)]
    sides = [
        f"{'>' if title.startswith('>') else '<'}{max(map(len, column))}"
        for title, column in zip(head, zip(*lines, strict=True), strict=True)
    ]
    return "\n".join((indent + "  ".join(map(format, line, sides))).rstrip() for line in lines)


def markdown(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return the table in Markdown."""
    rule = ["--:" if title.startswith(">") else "---" for title in head]
    return "\n".join(
        f"| {' | '.join(map(str, line))} |" for line in ([title.removeprefix(">") for title in head], rule, *rows)
    )
