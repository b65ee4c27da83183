"""The uncertainty of a plan's predictions, and the best published rates next to it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from frontier_llm.blueprint.layout import Layout
from frontier_llm.cli.main import main
from frontier_llm.config import load_model, load_run
from frontier_llm.machine.load import load_machine, own_stack, rates
from frontier_llm.planner.predict import predict
from frontier_llm.planner.search import search, simulate_layout
from frontier_llm.planner.steps import steps_of
from frontier_llm.planner.uncertainty import ESTIMATED, PUBLISHED, SAME, Uncertainty, uncertainty_of
from frontier_llm.topology.plan import make_plan


def plan_words(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "gpt-22b", "--nodes", "16", "batch.global_batch=512", "--top", "1", *words]) == 0
    return " ".join(capsys.readouterr().out.split())  # removes the line wrapping


def test_an_untried_stack_leads_with_the_interval_and_a_promise_above_all_that_is_published_is_flagged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = plan_words(capsys, "--fix", "tensor=2")
    found = re.search(r" ([\d.]+) s … ([\d.]+) s \(simulated ([\d.]+) s\) per step", out)
    assert found is not None
    fast, slow, simulated = map(float, found.groups())
    assert slow > simulated > fast
    assert "no step of this stack on this machine was measured" in out
    assert "55.3 TFLOP/s for such a model (ornl-22B), 83.0 for any (mosaic-mi250-4)" in out
    assert "are above every rate that was published for MI250" in out
    report = json.loads(plan_words(capsys, "--fix", "tensor=2", "--json"), parse_constant=pytest.fail)
    uncertainty = report["promise"]
    assert (uncertainty["basis"], uncertainty["above_published"]) == (ESTIMATED, True)
    assert uncertainty["step_s"][0] < report["plans"][0]["step_s"] < uncertainty["step_s"][1]


@pytest.mark.parametrize(("option", "times"), [((), 1), (("--explain",), 2)])
def test_memory_is_printed_with_what_torch_reserved_beside_it(
    option: tuple[str, ...], times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = plan_words(capsys, *option)
    assert out.count("safe up to 54 GiB: 64 GiB less the 9.3 to 9.5 GiB that torch 1.13 reserved") == times


def test_a_stack_that_ran_leads_with_what_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan_words(capsys, "--machine", "a100", "--stack", "megatron-lm")
    assert re.search(r" ([\d.]+) s \([\d.]+ s … [\d.]+ s\) per step", out)
    assert "same machine and stack" in out
    assert "lie above every rate" not in out


def uncertainty(machine: str, stack: str | None, recompute: str = "none", layers: int = 48) -> Uncertainty:
    """Return the uncertainty of a layout of a model of 22B that needs more than 54 GiB unless it recomputes."""
    file = load_machine(machine)
    stack = stack or own_stack(file)
    numbers = rates(file, stack)
    layout = Layout(tp=4, pp=2, dp=1, micro_batch=2, microbatches=8, recompute=recompute, sequence_parallel=True)
    model = load_model("gpt-22b", {"layers": layers})
    return uncertainty_of(simulate_layout(model, layout, numbers), file, stack, numbers)


def test_constants_of_another_stack_are_no_evidence() -> None:
    assert uncertainty("frontier", "frontier-llm").basis == ESTIMATED
    assert uncertainty("mi300x", None).basis == ESTIMATED
    assert uncertainty("frontier", "megatron-deepspeed").basis == PUBLISHED
    assert uncertainty("a100", "megatron-lm").basis == SAME


def test_above_54_gib_the_slow_end_assumes_recomputation() -> None:
    large = uncertainty("frontier", None)
    small = uncertainty("frontier", None, layers=24)
    assert small.recompute_factor == 1.0
    assert 1.2 < large.recompute_factor < 1.4, "a third of the forward and backward"
    fast, slow = large.ends(100.0, slow=1)
    assert (fast, slow) == pytest.approx((100 / 1.56, 156 * large.recompute_factor))
    assert large.ends(100.0, slow=0) == pytest.approx((100 / 1.56 / large.recompute_factor, 156))
    assert any("assumes full recomputation" in line for line in large.words())


@pytest.mark.parametrize(
    ("model", "nodes", "batch", "run"),
    [("gpt-22b", 16, 1024, "ornl-22B"), ("gpt-175b", 128, 10240, "ornl-175B"), ("gpt-1t", 384, 9600, "ornl-1T")],
)
def test_steps_lead_from_the_best_measured_run_to_the_prediction(model: str, nodes: int, batch: int, run: str) -> None:
    frontier = load_machine("frontier")
    numbers = rates(frontier)
    outcome = search(load_model(model), numbers, nodes, batch)
    steps = steps_of(outcome, frontier, numbers)
    assert steps is not None and steps.run.run == run
    assert steps.predicted_s == outcome.best.step_s
    assert steps.measured_s + sum(step.change_s for step in steps.steps) == pytest.approx(steps.predicted_s)
    assert sum(step.name.startswith("rate of matrix products") for step in steps.steps) == 1
    if model == "gpt-1t":
        assert steps.measured_s == pytest.approx(853, abs=1)
        assert steps.steps[0].seconds == pytest.approx(779, abs=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "nodes", "batch", "microbatches"),
    [("gpt-22b", 16, 512, 8), ("gpt-175b", 128, 10240, 8), ("gpt-1t", 384, 9600, 8)],
)
def test_the_command_of_a_step_is_a_legal_run_that_fits_on_one_node(
    model: str,
    nodes: int,
    batch: int,
    microbatches: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run.yaml"
    words = ["plan", model, "--nodes", str(nodes), f"batch.global_batch={batch}", "--top", "1", "--explain"]
    assert main([*words, "--emit", str(run)]) == 0
    out = " ".join(capsys.readouterr().out.split())  # removes the line wrapping
    commands = re.findall(r"bench step RUN.yaml ((?:[\w.]+=\S+ ?)+)", out)
    assert len(commands) >= 2
    for overrides in commands:
        config = load_run(str(run), overrides.split())
        plan = make_plan(config, 8)  # refuses a layout that is not legal
        assert plan.microbatches == microbatches
        prediction = predict(config, 8)
        assert prediction.memory_problems() == []
        assert prediction.step_time_s < 120
