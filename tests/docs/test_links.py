"""Every page is in the site's navigation. Every relative link, heading and figure exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import DOCS, PAGES, ROOT, prose

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors that Markdown renderers make from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if DOCS in page.parents and name:
            assert DOCS in file.parents, f"{page.name}: {target} leaves docs/, which a site does not carry"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


def pages_of(entry: str | list[Any] | dict[str, Any]) -> list[str]:
    """Return the pages of a navigation entry and of the entries below it."""
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in pages_of(child)]


def test_the_site_has_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    moved = [line.removeprefix("/") for line in site["not_in_nav"].split()]
    expected = [page.relative_to(DOCS).as_posix() for page in PAGES if DOCS in page.parents]
    expected += [notebook.relative_to(DOCS).as_posix() for notebook in DOCS.rglob("*.ipynb")]
    assert sorted(pages_of(site["nav"]) + moved) == sorted(expected)


def test_moved_pages_name_their_new_places() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    for name in site["not_in_nav"].split():
        page = DOCS / name.removeprefix("/")
        text = page.read_text(encoding="utf-8")
        (target,) = LINK.findall(text)
        assert len(text.splitlines()) == 3 and Path(target).name == page.name, name


def test_every_figure_is_shown() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    unused = [figure.name for figure in (DOCS / "benchmarks" / "figures").iterdir() if figure.name not in text]
    assert unused == []
