"""Several workers begin with the longest tests and keep tests with common fixtures together."""

from __future__ import annotations

from pathlib import Path

from tests.harness.workers import INDEPENDENT, LONGEST, begin_order, scope

ROOT = Path(__file__).resolve().parents[2]


def test_the_longest_tests_exist_and_begin_first() -> None:
    assert [start for start in (*LONGEST, INDEPENDENT) if not (ROOT / start).exists()] == []
    collected = ["tests/unit/a.py::test_a", *(f"{start}x.py::test_b" for start in reversed(LONGEST))]
    assert sorted(collected, key=begin_order) == [*reversed(collected[1:]), collected[0]]


def test_a_file_stays_on_one_worker_unless_its_tests_are_independent() -> None:
    assert scope("tests/unit/a.py::test_a[b::c]") == "tests/unit/a.py"
    assert scope("tests/slurm/test_a.py::test_a") == scope("tests/slurm/test_b.py::test_b") == "tests/slurm"
    assert scope(f"{INDEPENDENT}::test_a[comm/store]") != scope(f"{INDEPENDENT}::test_a[comm/overlap]")
