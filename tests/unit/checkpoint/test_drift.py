"""Tests the messages that a resumed run prints about changes of its configuration and environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from frontier_llm.checkpoint.drift import check_allowed, config_changes, with_defaults
from frontier_llm.checkpoint.inspect import compare
from frontier_llm.checkpoint.ranks import from_rank_0
from frontier_llm.comm import build_mesh
from frontier_llm.config import load_run
from frontier_llm.errors import CheckpointError, ConfigError
from frontier_llm.topology.grid import Grid
from tests.harness.pool import RankPool
from tests.unit.checkpoint.serial import Run


@pytest.mark.parametrize(
    ("settings", "done", "longer", "rises"),
    [
        (["optimizer.decay_steps=60"], 240, 500, True),  # the run had done all its 240 steps
        (["optimizer.decay_steps=60"], 181, 500, True),
        (["optimizer.decay_steps=60"], 180, 500, False),  # the decay begins at step 180, so no step had a lower rate
        (["optimizer.decay_steps=null"], 217, 500, True),  # the decay is the last tenth of the run
        (["optimizer.decay_steps=null"], 216, 500, False),
        (["optimizer.decay_steps=60"], 240, 200, False),
        (["optimizer.schedule=constant"], 240, 500, False),
    ],
)
def test_a_longer_run_whose_learning_rate_rises_again_is_told_so(
    settings: list[str], done: int, longer: int, rises: bool
) -> None:
    saved, current = (
        load_run("quickstart", [*settings, f"train.steps={steps}"]).model_dump(mode="json") for steps in (240, longer)
    )
    (change,) = config_changes(saved, current, step=done)
    assert str(change).startswith(f"train.steps: 240 → {longer}") and not change.mathematics
    assert ("the learning rate has decayed since step" in str(change)) is rises


def test_the_same_command_line_goes_on_after_the_change_that_it_allows() -> None:
    saved, other_layout = (
        load_run("quickstart", words).model_dump(mode="json") for words in ([], ["parallel.pipeline=1"])
    )
    changes = config_changes(saved, other_layout, step=10)
    check_allowed(
        changes, ["optimizer.lr", "model", "model.rope_scaling.factor"], "step_10"
    )  # these changes were made before the last save, so nothing is left to allow
    for mistyped in ("optimizer.rl", "optimiser", "model.rope_scaling.facter", "train.profile.x", "train.steps.x"):
        with pytest.raises(ConfigError, match="is not a key of a run"):
            check_allowed(changes, [mistyped], "step_10")


def test_a_run_with_phases_may_change_its_microbatch() -> None:
    """Regression: a run with phases could not resume with another microbatch. A roomier plan, which needs less memory,
    has one.
    """
    phases = "train.phases=[{steps: 3, batch: {global_batch: %d, micro_batch: %d}}, {steps: 2}]"
    saved, roomier, other_batch = (
        load_run("quickstart", [phases % (batch, own), f"batch.micro_batch={micro}"]).model_dump(mode="json")
        for batch, own, micro in ((8, 4, 4), (8, 2, 2), (16, 4, 4))
    )
    assert not any(change.mathematics for change in config_changes(saved, roomier, step=2))
    assert any(change.mathematics for change in config_changes(saved, other_batch, step=2))


def test_a_run_is_told_why_its_length_is_mathematics() -> None:
    saved, longer = (
        load_run("bench", ["optimizer.schedule=cosine", f"train.steps={steps}"]).model_dump(mode="json")
        for steps in (10, 20)
    )
    with pytest.raises(CheckpointError) as refused:
        check_allowed(config_changes(saved, longer, step=10), [], "step_10")
    said = str(refused.value)
    assert "train.steps: 10 → 20 (the learning rate of every step depends on train.steps while" in said
    assert "at step 10 it would be 0.000144 instead of 3e-05" in said
    assert "add optimizer.decay_steps=10 to keep the rates of all trained steps" in said
    assert "add --allow-change train.steps" in said


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_longer_run_that_keeps_the_end_of_its_decay_has_the_same_mathematics(schedule: str) -> None:
    saved, longer, other = (
        load_run("bench", [f"optimizer.schedule={schedule}", *words]).model_dump(mode="json")
        for words in (
            ["train.steps=10"],
            ["train.steps=20", "optimizer.decay_steps=10"],
            ["train.steps=20", "optimizer.decay_steps=15"],
        )
    )
    changes = config_changes(saved, longer, step=10)
    assert [(change.key, change.mathematics) for change in changes] == [
        ("optimizer.decay_steps", False),
        ("train.steps", False),
    ]
    check_allowed(changes, [], "step_10")
    new_schedule = load_run("bench", ["optimizer.schedule=wsd", "train.steps=20"]).model_dump(mode="json")
    check_allowed(config_changes(saved, new_schedule, step=10), ["optimizer.schedule"], "step_10")
    with pytest.raises(CheckpointError, match=r"optimizer\.decay_steps: None → 15"):
        check_allowed(config_changes(saved, other, step=10), [], "step_10")


@pytest.mark.parametrize(
    ("change", "fits"), [("model.layers=2", False), ("model.norm_eps=1e-3", True), ("model.sequence_length=32", False)]
)
def test_a_flag_is_not_offered_where_it_cannot_work(change: str, fits: bool) -> None:
    saved, other = (load_run("bench", words).model_dump(mode="json") for words in ([], [change]))
    changes = config_changes(saved, other)
    with pytest.raises(CheckpointError) as refused:
        check_allowed(changes, [], "step_10")
    assert ("--allow-change" in str(refused.value)) is fits
    if fits:
        check_allowed(changes, ["model"], "step_10")
    else:
        with pytest.raises(CheckpointError, match="the saved weights have other shapes"):
            check_allowed(changes, ["model"], "step_10")


def test_keys_that_came_or_went_since_are_no_change_of_the_mathematics() -> None:
    current = load_run("quickstart").model_dump(mode="json")
    saved = load_run("quickstart").model_dump(mode="json")
    del saved["model"]["dropout"], saved["data"]["packing"]
    saved["train"]["recompute_every"] = 1
    changes = config_changes(with_defaults(saved), current, step=10)
    assert [(change.key, change.mathematics) for change in changes] == [("train.recompute_every", False)]


def test_a_run_with_phases_is_compared_although_keys_have_gone() -> None:
    """Regression: the removed keys were put back, and the phases were then validated with them."""
    words = ["train.phases=[{steps: 3, batch: {global_batch: 8, micro_batch: 4}}, {steps: 2}]"]
    current = load_run("quickstart", words).model_dump(mode="json")
    saved = load_run("quickstart", words).model_dump(mode="json")
    saved["train"]["recompute_every"] = 1
    for before in (saved, with_defaults(saved)):
        changes = config_changes(before, current, step=2)
        assert [(change.key, change.mathematics) for change in changes] == [("train.recompute_every", False)]


def test_a_key_that_has_gone_from_a_source_of_data_is_a_change() -> None:
    words = ["data.train=[{path: /a, weight: 1}, {path: /b, weight: 2}]"]
    current = load_run("quickstart", words).model_dump(mode="json")
    saved = load_run("quickstart", words).model_dump(mode="json")
    del saved["data"]["packing"]
    saved["data"]["train"][1]["copies"] = 2
    (change,) = config_changes(with_defaults(saved), current, step=2)
    assert change.key == "data.train" and change.allowable and change.saved[1]["copies"] == 2


@pytest.mark.parametrize(
    "bad", [{"train": []}, {"model": []}, {"data": {"train": [{}]}}, {"train": {"steps": "ten", "phases": [1]}}]
)
def test_values_of_other_types_are_named(bad: dict[str, Any], tmp_path: Path) -> None:
    """Regression: a manifest with such a configuration ended a start with a traceback."""
    run = Run(tmp_path)
    run.save(1)
    facts = run.checkpoints.facts
    run.checkpoints.facts = replace(facts, config={**facts.config, **bad})
    run.save(2)
    run.checkpoints.facts = facts
    first, second = (run.checkpoints.directory / f"step_0000000{step}" for step in (1, 2))
    with pytest.raises(CheckpointError, match=r"step_00000002/manifest.json: config: has a value that this version"):
        run.checkpoints.load(second)
    with pytest.raises(CheckpointError, match=r"step_00000002/manifest.json: config: has a value that this version"):
        compare(first, second)


def _fails_on_rank_0(rank: int) -> str:
    def compute() -> None:
        raise KeyError("an error in the program")

    world = build_mesh(Grid(1, 1, 2), rank, timeout_s=30.0).world
    with pytest.raises((KeyError, CheckpointError)) as raised:
        from_rank_0(compute, world, torch.device("cpu"))
    return f"{raised.type.__name__} {raised.value}"


def test_other_ranks_do_not_wait_for_a_rank_0_with_an_unexpected_error(ranks: RankPool) -> None:
    on_rank_0, on_rank_1 = ranks.run(2, _fails_on_rank_0)
    assert on_rank_0 == "KeyError 'an error in the program'"
    assert "CheckpointError" in on_rank_1 and "an error in the program" in on_rank_1
