"""Phases of a run, and durations in tokens and epochs, as parsed from the run file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from frontier_llm.checkpoint.drift import check_allowed, config_changes
from frontier_llm.config import (
    RunConfig,
    build,
    dump,
    load_run,
    phase_at,
    phase_note,
    phases_of,
    planned_tokens,
    resolved,
)
from frontier_llm.data.tokenize import tokenize
from frontier_llm.errors import CheckpointError, ConfigError
from frontier_llm.planner.predict import predict
from frontier_llm.topology.plan import plan_problems

THREE = (
    "[{steps: 3}, {steps: 1K tokens, batch: {global_batch: 8}}, {steps: 2, model: {sequence_length: 128}, batch: "
    "{global_batch: 2}}]"
)
RUN = {
    "model": {"base": "llama-tiny", "sequence_length": 64},
    "batch": {"global_batch": 4},
    "optimizer": {"warmup_steps": 1},
}


def run(tmp_path: Path, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return load_run(str(path), overrides)


def test_a_phase_is_the_run_with_a_few_keys_changed(tmp_path: Path) -> None:
    config = run(tmp_path, f"train.phases={THREE}")
    phases = phases_of(config)
    assert config.train.steps == 7
    assert [(phase.first, phase.end, phase.tokens_per_step) for phase in phases] == [
        (0, 3, 256),
        (3, 5, 512),
        (5, 7, 256),
    ]
    assert [phase.config.model.sequence_length for phase in phases] == [64, 64, 128]
    assert phases[1].config.model == config.model and phases[2].config.optimizer == config.optimizer
    assert [phase_at(phases, step).number for step in (0, 2, 3, 5, 7)] == [1, 1, 2, 3, 3]
    assert planned_tokens(phases) == 2304
    # a run directory stores the configuration in this form
    assert RunConfig.model_validate(yaml.safe_load(dump(config))) == config


def test_the_last_phase_goes_on_to_the_runs_end_and_a_run_that_ends_before_it_is_told(tmp_path: Path) -> None:
    longer, shorter = (run(tmp_path, f"train.phases={THREE}", f"train.steps={steps}") for steps in (10, 4))
    assert phases_of(longer)[-1].end == 10 and phase_note(longer) == ""
    assert [phase.end for phase in phases_of(shorter)] == [3, 4]
    assert (
        phase_note(shorter)
        == "train.steps=4 ends the run in phase 2 of 3; remove train.steps, or set it to 7, the sum of all phases"
    )


@pytest.mark.parametrize(
    ("word", "key", "steps"),
    [
        ("train.steps=1_000 tokens", "train.steps", 4),
        ("train.steps=1.5M tokens", "train.steps", 5860),
        ("train.steps=20 steps", "train.steps", 20),
        ("optimizer.warmup_steps=257 tokens", "optimizer.warmup_steps", 2),
        ("train.save_interval=2K tokens", "train.save_interval", 8),
        ("train.eval_interval=1T tokens", "train.eval_interval", 3_906_250_000),
    ],
)
def test_durations_in_tokens_become_steps(tmp_path: Path, word: str, key: str, steps: int) -> None:
    section, name = key.split(".")
    assert getattr(getattr(run(tmp_path, word), section), name) == steps


def test_numbers_with_exponents_count_like_whole_numbers(tmp_path: Path) -> None:
    phases = "train.phases=[{steps: 2e4}, {steps: 1.0e4, batch: {global_batch: 1.5e3}}, {steps: 30.0}]"
    config = run(
        tmp_path, "batch.global_batch=1e3", phases, "optimizer.warmup_steps=640M tokens", "train.log_interval=1e1"
    )
    assert (config.train.steps, config.optimizer.warmup_steps) == (30_030, 10_000)
    assert [phase.steps for phase in config.train.phases] == [20_000, 10_000, 30]
    assert phase_note(config) == ""


def test_a_wrong_batch_is_reported_without_the_durations_that_it_prevents(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run(tmp_path, "batch.global_batch=many", "train.steps=1B tokens", "model.layers=2 epochs")
    assert [problem.where for problem in error.value.problems] == [
        "command line: model.layers",
        "command line: batch.global_batch",
    ]


def test_tokens_are_counted_over_phases_from_the_start_and_a_decay_from_the_end(tmp_path: Path) -> None:
    words = (
        f"train.phases={THREE}",
        "optimizer.warmup_steps=1_300 tokens",
        "optimizer.decay_steps=900 tokens",
        "optimizer.schedule=wsd",
    )
    config = run(tmp_path, *words)
    # The warm-up is 3 x 256 + 2 x 512 tokens, and the decay 2 x 256 + 1 x 512 tokens.
    assert (config.optimizer.warmup_steps, config.optimizer.decay_steps) == (5, 3)
    with pytest.raises(
        ConfigError,
        match=r"train.save_interval: is given as '2K tokens', but the phases have steps of different sizes",
    ):
        run(tmp_path, f"train.phases={THREE}", "train.save_interval=2K tokens")


def test_durations_count_what_was_done_as_it_was_done(tmp_path: Path) -> None:
    """20 steps of 256 tokens are done, and then the batch size doubles. If the steps done were counted with 512 tokens,
    the run would already be over.
    """
    words = (
        "train.steps=10_240 tokens",
        "optimizer.warmup_steps=2_560 tokens",
        "optimizer.decay_steps=1_024 tokens",
        "optimizer.schedule=wsd",
    )
    small = run(tmp_path, *words)
    large = run(tmp_path, *words, "batch.global_batch=8")
    counts = [
        (one.train.steps, one.optimizer.warmup_steps, one.optimizer.decay_steps)
        for one in (small, large, resolved(large, [(20, 256)]))
    ]
    assert counts == [(40, 10, 4), (20, 5, 2), (30, 10, 2)]
    assert resolved(small, [(20, 256)]) == small and resolved(resolved(large, [(20, 256)]), []).train.steps == 30
    in_decay = resolved(large, [(38, 256)])
    # the decay began at step 36: 2 steps of 256 tokens and 1 of 512
    assert (in_decay.train.steps, in_decay.optimizer.decay_steps) == (39, 3)
    # a run directory stores the tokens
    loaded = RunConfig.model_validate(yaml.safe_load(dump(large)), context=[(20, 256)])
    assert "steps: 10240 tokens" in dump(large) and loaded.train.steps == 30
    assert not hasattr(run(tmp_path, "train.steps=30").train.steps, "tokens")


def test_a_phase_in_tokens_ends_after_its_tokens(tmp_path: Path) -> None:
    phases = "train.phases=[{steps: 2_560 tokens}, {steps: 1_280 tokens}]"
    doubled = resolved(run(tmp_path, phases, "batch.global_batch=8"), [(6, 256)])
    assert [(phase.first, phase.end) for phase in phases_of(doubled)] == [(0, 8), (8, 11)]
    assert doubled.train.steps == 11
    phases = "train.phases=[{steps: 4}, {steps: 6, batch: {global_batch: 8}}]"
    halved = resolved(run(tmp_path, phases, "optimizer.warmup_steps=2_560 tokens"), [(2, 128)])
    # 2 steps of 128 tokens done, then 2 of 256 to the end of the first phase, and 4 of 512
    assert halved.optimizer.warmup_steps == 8


def test_the_same_tokens_are_no_change_whatever_the_steps(tmp_path: Path) -> None:
    words = ("train.steps=10_240 tokens", "optimizer.warmup_steps=2_560 tokens")
    saved, current = (
        run(tmp_path, *words, word).model_dump(mode="json") for word in ("batch.global_batch=4", "batch.global_batch=8")
    )
    changes = config_changes(saved, current, step=20, done=[(20, 256)])
    assert [change.key for change in changes] == ["batch.global_batch"]
    before = {
        **saved,
        "train": {**saved["train"], "steps": 40},
        "optimizer": {**saved["optimizer"], "warmup_steps": 10},
    }
    # this checkpoint stores steps instead of tokens
    assert config_changes(before, saved, step=20, done=[(20, 256)]) == []


def test_epochs_are_of_the_data_that_lie_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("some text of the corpus\n" * 50)
    tokenize([tmp_path / "a.txt"], tmp_path / "tokens", "bytes")  # 1,201 tokens
    config = run(tmp_path, f"data.train={tmp_path}/tokens", "train.steps=2 epochs", "optimizer.warmup_steps=0.1 epochs")
    assert (config.train.steps, config.optimizer.warmup_steps) == (10, 1)
    assert run(tmp_path, "data.train=~/tokens", "train.steps=2 epochs").train.steps == 10
    for data, what in (
        ("synthetic", "synthetic data has no epochs"),
        (f"{tmp_path}/none", "none cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=what):
            run(tmp_path, f"data.train={data}", "train.steps=2 epochs")


def test_what_is_wrong_with_a_phase_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.phases.0.steps: must be a whole number"):
        run(tmp_path, "train.phases=[{steps: 3 tokns}]")
    with pytest.raises(ConfigError, match="did you mean 'sequence_length'"):
        run(tmp_path, "train.phases=[{steps: 3, model: {sequence_lenth: 3}}]")
    phases = "train.phases=[{steps: 1}, {steps: 1, batch: {global_batch: 3}}, {steps: 1, model: {sequence_length: 99}}]"
    problems = plan_problems(run(tmp_path, phases, "parallel.context=2"), 4)
    assert [problem.where for problem in problems] == [
        "train.phases.1.batch.global_batch",
        "train.phases.2.model.sequence_length",
    ]
    learned = run(
        tmp_path,
        f"train.phases={THREE}",
        "model.position=learned",
        "parallel.data_mode=fsdp",
        "train.seed=1",
    )
    assert [problem.where for problem in plan_problems(learned, 1)] == [
        "train.phases.2.model.sequence_length",
        "train.phases",
    ]


def test_what_has_been_trained_may_not_change_and_what_is_to_come_may(tmp_path: Path) -> None:
    fixed = ("optimizer.schedule=constant",)
    saved = run(tmp_path, *fixed, f"train.phases={THREE}").model_dump(mode="json")
    other_end = run(tmp_path, *fixed, "train.phases=" + THREE.replace("128", "256").replace("1K", "2K")).model_dump(
        mode="json"
    )
    check_allowed(config_changes(saved, other_end, step=4), [], "step_4")
    for step, allowed in (
        (5, []),
        (7, ["optimizer"]),
    ):  # the second phase should have been longer; the third has begun
        with pytest.raises(CheckpointError, match=r"--allow-change train\.phases"):
            check_allowed(config_changes(saved, other_end, step=step), allowed, "step")
    check_allowed(config_changes(saved, other_end, step=7), ["train.phases"], "step_7")


def test_hours_are_the_sum_of_the_phases_and_memory_is_the_longest_ones() -> None:
    words = [
        "train.phases=[{steps: 10}, {steps: 30, model: {sequence_length: 4096}, batch: {global_batch: 16}}]",
        "train.steps=40",
    ]
    both, short, long = (
        load_run("train_small", extra) for extra in (words, [], ["model.sequence_length=4096", "batch.global_batch=16"])
    )
    predicted = [predict(config, 4, "lumi") for config in (both, short, long)]
    assert predicted[0].peak_bytes == predicted[2].peak_bytes > predicted[1].peak_bytes
    assert 40 * predicted[0].step_time_s == pytest.approx(10 * predicted[1].step_time_s + 30 * predicted[2].step_time_s)
    assert build(RunConfig, both.model_dump()) == both
