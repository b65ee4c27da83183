"""The script that measures the tables of docs/benchmarks/ops.md can refresh them."""

from __future__ import annotations

import pytest

from benchmarks.ops import in_step as script


def test_the_tables_are_refreshed_and_nothing_else():
    document = script.DOCUMENT.read_text(encoding="utf-8")
    best = {"all on": 1.0, "rope off": 1.5}
    fresh = script.updated(document, script.table("bf16", best))
    assert (
        "| all on | 1.00 | 4,096 | +0.0% |\n| rope off (not used by this model: the noise) | 1.50 | 2,731 | +50.0% "
        "|\n\n" in fresh
    )
    removed, added = (set(a.splitlines()) - set(b.splitlines()) for a, b in ((document, fresh), (fresh, document)))
    assert removed and all(line.startswith("| ") for line in removed) and len(added) == 2
    with pytest.raises(ValueError, match="has 0 tables"):
        script.updated(document, script.table("fp8", best))
