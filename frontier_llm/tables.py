"""How a table looks in a terminal and in Markdown. A heading that begins with '>' puts its column's cells to the
right, as numbers stand.
"""

from collections.abc import Iterable, Sequence


def aligned(head: Sequence[str], rows: Iterable[Iterable[object]], indent: str = "") -> str:
    """Columns as wide as their widest cell."""
    lines = [[title.removeprefix(">") for title in head], *([str(cell) for cell in row] for row in rows)]
    sides = [
        f"{'>' if title.startswith('>') else '<'}{max(map(len, column))}"
        for title, column in zip(head, zip(*lines, strict=True), strict=True)
    ]
    return "\n".join((indent + "  ".join(map(format, line, sides))).rstrip() for line in lines)


def markdown(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table as Markdown has it."""
    rule = ["--:" if title.startswith(">") else "---" for title in head]
    return "\n".join(
        f"| {' | '.join(map(str, line))} |" for line in ([title.removeprefix(">") for title in head], rule, *rows)
    )
