"""The documentation's pages and the code fences in them.

A ```bash fence runs on a laptop, from the checkout's root and in the page's order, and a test runs it. A ```console
fence needs a cluster, a device or a user's file, or stands for several commands (`[--option]`, `…`, CAPITALS). The real
argument parser reads it. Other fences are not commands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LANGUAGES = {"bash", "console", "text", "python", "yaml", "json"}


@dataclass(frozen=True)
class Fence:
    page: str
    line: int
    language: str
    text: str


def fences(page: Path) -> list[Fence]:
    found = []
    opened = None
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = (number, line[3:].strip())
        else:
            first, language = opened
            found.append(
                Fence(page.relative_to(ROOT).as_posix(), first, language, "\n".join(lines[first : number - 1]) + "\n")
            )
            opened = None
    assert opened is None, f"{page.name}: the fence of line {opened} is not closed"
    return found


def prose(page: Path) -> str:
    """Return the text of a page without its fenced blocks and code spans."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.sub(r"`[^`]*`", "", text)


def commands(fence: Fence) -> list[str]:
    """Return one string per command. Continued lines are joined, and comments and blank lines are left out."""
    text = re.sub(r"\\\n\s*", " ", fence.text)
    text = re.sub(r"\n\s+(?=[\[-])", " ", text)  # a synopsis continues in an indented line
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]
