"""Machine files that earlier versions wrote from the measurements of these tests. Later versions must write equal
files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parent


def assert_recorded(name: str, content: dict[str, Any]) -> None:
    """Assert the same keys and texts (except dates), and the same numbers up to one unit in the last of four digits."""
    recorded = dict(leaves(yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))))
    found = dict(leaves(content))
    assert list(found) == list(recorded)
    for place, value in recorded.items():
        expected = pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
        assert found[place] == expected, place


def leaves(content: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every text and number in nested mappings and lists, with its path."""
    if isinstance(content, dict | list | tuple):
        parts = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in parts:
            yield from leaves(value, f"{place}/{key}")
    else:
        yield place, re.sub(r"\d{4}-\d\d-\d\d", "DATE", content) if isinstance(content, str) else content
