"""Every page is in the site's navigation; every relative link, heading and figure exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, prose

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


def anchors(page: Path) -> set[str]:
    """As Markdown renderers make them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if page.parent.name == "docs" and name:
            inside = (ROOT / "docs") in file.parents
            assert inside, f"{page.name}: {target} leaves docs/, which a site does not carry"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


def test_the_site_has_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [
        page for section in site["nav"] for pages in section.values() for entry in pages for page in entry.values()
    ]
    assert sorted(listed) == sorted(page.name for page in PAGES if page.parent.name == "docs")


def test_every_figure_is_shown() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    unused = [figure.name for figure in (ROOT / "docs" / "figures").iterdir() if figure.name not in text]
    assert unused == []
