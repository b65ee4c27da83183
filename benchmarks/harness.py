"""What the benchmarks share: the folders that they write to, and the measured part of a documentation page."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MEASURED = DOCS / "benchmarks"
RESULTS = MEASURED / "results"


def write_measured(page: Path, program: str, text: str) -> None:
    """Replace the part of `page` between `<!-- measured: written by PROGRAM -->` and `<!-- /measured -->`.

    `program` is the file that measured; PROGRAM is its path in the checkout. Raises SystemExit if the page has no such
    part.
    """
    mark = f"<!-- measured: written by {Path(program).resolve().relative_to(ROOT)} -->"
    before, begin, rest = page.read_text(encoding="utf-8").partition(mark)
    _, end, after = rest.partition("<!-- /measured -->")
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the results: write {mark} and <!-- /measured --> around it")
    page.write_text(f"{before}{mark}\n{text}{end}{after}", encoding="utf-8")
