"""Text form of quantities with units."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from frontier_llm.units import (
    format_age,
    format_bytes,
    format_count,
    format_days,
    format_hours,
    format_seconds,
    plural,
    strict_json,
)


def test_each_quantity_reads_in_its_usual_unit() -> None:
    assert [format_bytes(size) for size in (512, 1536, 3 * 1024**4)] == ["512 B", "1.5 KiB", "3.0 TiB"]
    assert [format_count(number) for number in (999, 1_234_000, 1.008e12)] == ["999", "1.23M", "1.01T"]
    assert [format_seconds(s) for s in (2.5e-4, 0.1, 59.9, 3723, 93784)] == [
        "250 us",
        "100 ms",
        "59.9 s",
        "1:02:03",
        "1d 02:03:04",
    ]
    assert [format_days(days) for days in (0.01, 64.46, 10176.8)] == ["0:14:24", "64.5 days", "10,176.8 days"]
    assert [format_hours(hours) for hours in (0.01472, 1661.66)] == ["0.015", "1,661.7"]
    assert [format_age(s) for s in (1, 120, 7200, 90_000)] == ["just now", "2 min ago", "2 h ago", "1 d ago"]


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(1, "rank", "1 rank"), (0, "rank", "0 ranks"), (2, "microbatch", "2 microbatches")],
)
def test_one_of_a_thing_is_not_plural(number: int, noun: str, text: str) -> None:
    assert plural(number, noun) == text


def test_strict_json_has_no_word_for_what_is_no_number() -> None:
    content = {"loss": math.nan, "rows": [(1, math.inf), -math.inf], "path": Path("a/b"), "words": "NaN"}
    expected = {"loss": None, "rows": [[1, None], None], "path": "a/b", "words": "NaN"}
    assert json.loads(strict_json(content), parse_constant=pytest.fail) == expected
    with pytest.raises(TypeError):
        strict_json({"x": object()})
