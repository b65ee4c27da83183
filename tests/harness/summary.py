"""Adds lines to the end of pytest's output: what was skipped, and which failures passed when they were repeated."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

# If the reason of a skipped test contains one of these words, it also contains the command that installs the missing
# program.
COMMANDS = ("install", "scripts/")
SECOND_LOOK = "FRONTIER_LLM_SECOND_LOOK"  # `.ci/run` sets it when it repeats the failed tests


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the lines. `stats` has the reports of all workers."""
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", [])]
    if skipped:
        reasons = [str(place[2] if isinstance(place, tuple) else place).removeprefix("Skipped: ") for place in skipped]
        for line in skip_lines(reasons):
            terminalreporter.write_line(line)
    if SECOND_LOOK in os.environ:
        for report in terminalreporter.stats.get("passed", []):
            terminalreporter.write_line(f"unsteady: {report.nodeid} failed among other tests and passed alone")


def skip_lines(reasons: Sequence[str]) -> list[str]:
    """Return the number of skipped tests, the commands that install what they need, and all other reasons."""
    counts = Counter(reasons)
    remedies = {reason: count for reason, count in counts.items() if any(word in reason for word in COMMANDS)}
    others = {reason: count for reason, count in counts.items() if reason not in remedies}
    return [
        f"skipped: {len(reasons)} tests, {sum(remedies.values())} of them because something is not installed",
        f"to run these: {_listed(remedies)}",
        f"other reasons: {_listed(others)}",
    ]


def _listed(counts: dict[str, int]) -> str:
    """Return all reasons with their numbers of tests, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(f"{reason} ({count})" for reason, count in ordered) or "none"
