"""Shared parts of the benchmarks: alternating rounds, short runs, results."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import harness


def test_rounds_are_interleaved_and_warm_up_rounds_are_dropped() -> None:
    order: list[str] = []

    def work(name: str) -> int:
        order.append(name)
        return len(order)

    results = harness.interleave({"a": lambda: work("a"), "b": lambda: work("b")}, rounds=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert results == {"a": [3, 5], "b": [4, 6]}


def test_a_short_run_has_the_programs_arguments_in_a_folder_of_its_own() -> None:
    def options(*words: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        parser.add_argument("--rounds", type=int, default=30)
        parser.add_argument("--out", type=Path)
        return harness.parse_arguments(parser, ["--rounds", "1", "--out", f"{harness.FOLDER}/out"], words)

    assert options() == argparse.Namespace(rounds=30, out=None, smoke=False)
    short = options("--smoke")
    assert (short.rounds, short.out.name, short.smoke) == (1, "out", True)
    assert short.out.parent.is_dir()
    assert options("--smoke", "--rounds", "2").rounds == 2


def test_a_short_run_changes_neither_page_nor_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    program = harness.ROOT / "benchmarks" / "data" / "any.py"
    content = "<!-- measured: written by benchmarks/data/any.py -->\nold\n<!-- /measured -->\n"
    page.write_text(content)
    harness.write_measured(page, str(program), "new\n", smoke=True)
    assert page.read_text() == content and "new" in capsys.readouterr().out
    harness.write_measured(page, str(program), "new\n")
    assert page.read_text() == content.replace("old", "new")
    result = tmp_path / "results" / "any.json"
    harness.write_json(result, {"s": 1}, smoke=True)
    assert harness.read_json(result, {}) == {}
    harness.write_json(result, {"s": 1})
    assert harness.read_json(result, {}) == {"s": 1}
