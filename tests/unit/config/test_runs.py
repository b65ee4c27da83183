"""The shipped run files: each is legal on its machine, fits its memory, and trains for the stated number of tokens."""

from __future__ import annotations

import re

import pytest

from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.config import available, find_file, load_run
from frontier_llm.machine.load import load_machine
from frontier_llm.planner.predict import predict
from frontier_llm.topology.plan import make_plan

BILLION = 1e9
# run → (nodes, tokens in billions)
BUDGETS = {
    "mpt-1b": (16, 26.0),
    "mpt-3b": (16, 53.0),
    "pretrain_22b": (16, 300),
    "pretrain_175b": (128, 300),
    "pretrain_1t": (384, 300),
}


@pytest.mark.parametrize("name", available("runs"))
def test_every_run_loads(name: str) -> None:
    assert load_run(name).train.run_dir.startswith("runs/")


@pytest.mark.parametrize("name", BUDGETS)
def test_it_is_legal_and_fits(name: str) -> None:
    nodes, _ = BUDGETS[name]
    config = load_run(name)
    devices = nodes * load_machine(config.machine).devices_per_node
    assert make_plan(config, devices).microbatches >= 1
    assert predict(config, devices).memory_problems() == []


@pytest.mark.parametrize("name", BUDGETS)
def test_steps_make_the_token_budget(name: str) -> None:
    config, (_, billions) = load_run(name), BUDGETS[name]
    said = re.search(r"steps(?:: |=)(\d+)(?:  #| are) ([\d.]+) G", find_file(name, "runs").read_text(encoding="utf-8"))
    assert said is not None and float(said[2]) == pytest.approx(billions)
    tokens = int(said[1]) * config.batch.global_batch * config.model.sequence_length
    assert tokens == pytest.approx(billions * BILLION, rel=2e-3)
    assert config.train.steps == int(said[1])
    assert config.optimizer.warmup_steps < 0.05 * int(said[1])
    assert config.optimizer.min_lr == pytest.approx(config.optimizer.lr / 10)


@pytest.mark.parametrize("name", ["mpt-1b", "mpt-3b"])
def test_mpt_budgets_are_chinchillas(name: str) -> None:
    config = load_run(name)
    tokens = config.train.steps * config.batch.global_batch * config.model.sequence_length
    assert tokens / total_parameters(config.model) == pytest.approx(20, rel=0.02)


@pytest.mark.parametrize(
    ("name", "steps"),
    [("pretrain_22b", 420570), ("pretrain_175b", 166530), ("pretrain_1t", 1025430)],
)
def test_the_chinchilla_steps_in_the_comments(name: str, steps: int) -> None:
    config = load_run(name)
    assert f"train.steps={steps}" in find_file(name, "runs").read_text(encoding="utf-8")
    tokens = steps * config.batch.global_batch * config.model.sequence_length
    assert tokens / total_parameters(config.model) == pytest.approx(20, rel=0.01)
