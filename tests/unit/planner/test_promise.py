"""The band about a plan's figures holds on published runs that no constant has seen, and the best published rates
are those of the tables.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import cache

import pytest

from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.blueprint.work import model_flops_per_token
from frontier_llm.cli.main import main
from frontier_llm.machine.load import load_machine
from frontier_llm.planner.promise import BANDS, BEST, ESTIMATED, OTHER, SAME, basis, family, size_class
from frontier_llm.planner.published.datasets import FITTED, PublishedRun, shipped
from frontier_llm.planner.published.predict import predict
from frontier_llm.planner.published.validate import is_fitted
from frontier_llm.units import TERA

ROWS = shipped()
machine = cache(load_machine)  # a thousand rows name a dozen machines


def best_published() -> dict[str, dict[int, tuple[float, str]]]:
    best: dict[str, dict[int, tuple[float, str]]] = defaultdict(dict)
    for row in ROWS:
        # rates of long sequences depend on whether masked scores count
        if row.stack.endswith("fp8") or row.layout.cp > 1:
            continue
        tokens = row.layout.global_batch * row.model.sequence_length
        tflops = model_flops_per_token(row.model) * tokens / row.seconds / row.layout.devices / TERA
        place = best[family(machine(row.machine).device.name)]
        size = size_class(total_parameters(row.model))
        place[size] = max(place.get(size, (0.0, "")), (round(tflops, 1), row.key if len(row.key) < 40 else row.dataset))
    return best


def basis_of(row: PublishedRun) -> str:
    """As `plan` would say; a row that borrows the file of a like cluster has not run on that machine."""
    known = basis(machine(row.machine), row.stack)
    return OTHER if known == SAME and not row.known else known


@pytest.mark.thorough
@pytest.mark.parametrize("wanted", [SAME, OTHER])
def test_nine_of_ten_unseen_runs_lie_inside_the_band(wanted: str) -> None:
    unseen = [row for row in ROWS if not (is_fitted(row) or row.unstated or row.approximate)]
    many = [row for row in unseen if row.dataset == "vTrain single-node"][::6]
    rows = [row for row in unseen if row.dataset != "vTrain single-node"] + many
    predictions = predict([row for row in rows if basis_of(row) == wanted])
    assert len(predictions) >= 25
    inside = [1 / (1 + BANDS[wanted]) <= 1 + one.error <= 1 + BANDS[wanted] for one in predictions]
    assert sum(inside) >= 0.9 * len(inside)


def test_the_best_published_rates_are_those_of_the_tables() -> None:
    assert best_published() == BEST


def plan_words(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "gpt-22b", "--nodes", "16", "--global-batch", "512", "--top", "1", *words]) == 0
    return " ".join(capsys.readouterr().out.split())  # as if lines were not wrapped


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
    assert "lie above every rate published on MI250" in out
    report = json.loads(plan_words(capsys, "--fix", "tensor=2", "--json"), parse_constant=pytest.fail)
    promise = report["promise"]
    assert (promise["basis"], promise["above_published"]) == (OTHER, True)
    assert promise["step_s"][0] < report["plans"][0]["step_s"] < promise["step_s"][1]


def test_a_stack_that_ran_leads_with_what_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan_words(capsys, "--machine", "selene", "--stack", "megatron-lm")
    assert re.search(r" ([\d.]+) s \([\d.]+ s … [\d.]+ s\) per step", out)
    assert "same machine and stack" in out
    assert "lie above every rate" not in out


def test_a_stack_is_as_well_known_as_its_machine_file_says() -> None:
    assert all(basis(load_machine(machine), stack) == SAME for machine, stack in FITTED)
    assert basis(load_machine("frontier"), "frontier-llm") == OTHER
    assert basis(load_machine("mi300x"), load_machine("mi300x").default_stack) == ESTIMATED
