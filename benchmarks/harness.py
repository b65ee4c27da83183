"""The part of a documentation page that a script writes: between `<!-- measured: written by scripts/NAME.py -->` and
`<!-- /measured -->`.
"""

from __future__ import annotations

import sys
from pathlib import Path

END = "<!-- /measured -->"


def write_measured(page: Path, script: str, text: str) -> None:
    """Replace what stands there."""
    mark = f"<!-- measured: written by scripts/{Path(script).name} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(mark + "\n")
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{page} has no place for the results: {mark} … {END}")
    page.write_text(f"{before}{mark}\n{text}{end}{after}", encoding="utf-8")
