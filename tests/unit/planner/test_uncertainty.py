"""The uncertainty of a plan's predictions, and the best published rates next to it."""

from __future__ import annotations

import json
import re

import pytest

from frontier_llm.cli.main import main
from frontier_llm.machine.load import load_machine
from frontier_llm.planner.uncertainty import ESTIMATED, OTHER, basis


def plan_words(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "gpt-22b", "--nodes", "16", "--global-batch", "512", "--top", "1", *words]) == 0
    return " ".join(capsys.readouterr().out.split())  # removes the line wrapping


def test_an_untried_stack_leads_with_the_slow_end_and_a_promise_above_all_that_is_published_is_flagged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = plan_words(capsys, "--fix", "tensor=2")
    found = re.search(r" ([\d.]+) s … ([\d.]+) s \(simulated ([\d.]+) s\) per step", out)
    assert found is not None
    slow, fast, simulated = map(float, found.groups())
    assert slow > simulated > fast
    assert "never run on this machine" in out
    assert "55.3 TFLOP/s for such a model (ornl-22B), 83.0 for any (mosaic-mi250-4)" in out
    assert "are above every rate published on MI250" in out
    report = json.loads(plan_words(capsys, "--fix", "tensor=2", "--json"), parse_constant=pytest.fail)
    uncertainty = report["promise"]
    assert (uncertainty["basis"], uncertainty["above_published"]) == (OTHER, True)
    assert uncertainty["step_s"][0] < report["plans"][0]["step_s"] < uncertainty["step_s"][1]


def test_a_stack_that_ran_leads_with_what_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan_words(capsys, "--machine", "a100", "--stack", "megatron-lm")
    assert re.search(r" ([\d.]+) s \([\d.]+ s … [\d.]+ s\) per step", out)
    assert "same machine and stack" in out
    assert "lie above every rate" not in out


def test_a_stack_is_as_well_known_as_its_machine_file_says() -> None:
    assert basis(load_machine("frontier"), "frontier-llm") == OTHER
    assert basis(load_machine("mi300x"), load_machine("mi300x").default_stack) == ESTIMATED
