"""The names of a layout's choices are the keys of a run file, in --fix, --what-if, --json and refusals."""

from __future__ import annotations

import pytest

from frontier_llm.blueprint.layout import Layout, run_keys
from frontier_llm.cli.main import main
from frontier_llm.config import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner import report
from frontier_llm.planner.candidates import choices_of, enumerate_layouts
from frontier_llm.planner.search import simulate_layout

FRONTIER = rates(load_machine("frontier"))


@pytest.mark.parametrize(
    ("fixed", "rule"),
    [
        ("expert=3", "parallel.expert: 3, but gpt-22b has no experts"),
        ("zero=2", "parallel.zero: 2 is not supported"),
        ("data_shard=5", "parallel.data_shard: 5 does not divide the 128 replicas"),
        # the message must not mention `searched`, which no run file contains
        ("schedule=searched tensor=5", "tensor 5"),
    ],
)
def test_every_choice_that_can_be_fixed_is_refused_with_its_rule(
    fixed: str,
    rule: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for choice in fixed.split() for word in ("--fix", choice)]
    code = main(["plan", "gpt-22b", "--nodes", "16", "batch.global_batch=512", *words])
    err = capsys.readouterr().err
    told = [line for line in err.splitlines() if line.startswith("  ") and not line.startswith(("    fix", "  plan: "))]
    assert code == 2
    assert told and all(rule in line for line in told)


def test_a_choice_that_is_no_field_of_a_layout_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("moe-tiny", "--nodes", "1", "batch.global_batch=16", "--fix", "expert=1")
    assert main(["plan", *asked, "--what-if", "expert_all_to_all=auto"]) == 0
    assert "what if expert_all_to_all=auto: the chosen layout already has this value" in capsys.readouterr().out


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_a_layout_is_fixed_by_its_own_choices(axis: str) -> None:
    """Then `all other values as in the chosen layout` leaves the search no choice."""
    model = load_model("moe-tiny", {"sequence_length": 8192})
    table = enumerate_layouts(model, 8, 16, 8, {"tp": 2, axis: 2, "recompute": "full"})
    layout = table.row(len(table) // 2)
    alone = enumerate_layouts(model, 8, 16, 8, choices_of(layout))
    assert [alone.row(index) for index in range(len(alone))] == [layout]


def test_json_and_an_emitted_run_say_a_layout_in_the_same_words() -> None:
    plan = simulate_layout(
        load_model("moe-tiny"),
        Layout(tp=2, dp=2, ep=2, microbatches=2, gradient_wire="bf16"),
        FRONTIER,
    )
    words = report.as_dict(plan, FRONTIER)
    said = {
        key: value for keys in run_keys(plan.layout).values() for key, value in keys.items() if key != "stage_layers"
    }
    assert said.items() <= words.items()
    assert words["expert"] == 2 and words["gradient_wire"] == "bf16" and words["expert_all_to_all"] == "flat"


def test_the_reason_against_tp8_names_the_cause_that_the_figure_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TP8's additional time is communication over tp. The time of the busiest stage includes this communication."""
    monkeypatch.setenv("COLUMNS", "300")  # no line is wrapped
    assert main(["plan", "gpt-22b", "--machine", "frontier", "--nodes", "16"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("why not TP8")]
    assert line.endswith("in tp communication")
