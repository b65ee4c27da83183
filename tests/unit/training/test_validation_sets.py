"""Several named held-out sets. The checkpoint with the best result is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint.inspect import find, summary
from frontier_llm.cli.checks import check
from frontier_llm.config import RunConfig, load_run
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.tokenize import tokenize
from frontier_llm.errors import ConfigError
from frontier_llm.experiments.measure.report import write_report
from frontier_llm.run import run_dir
from frontier_llm.run.signals import SignalWatcher
from frontier_llm.training import loop


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, str]:
    """Two datasets with little in common."""
    for name, text in (("prose", "the quick brown fox jumps\n" * 60), ("digits", "0123456789 9876543210\n" * 60)):
        (tmp_path / f"{name}.txt").write_text(text)
        tokenize([tmp_path / f"{name}.txt"], tmp_path / name, "bytes")
    return {name: str(tmp_path / name) for name in ("prose", "digits")}


def run_of(tmp_path: Path, data: dict[str, Any], **train: Any) -> RunConfig:
    settings = {"run_dir": str(tmp_path / "run"), "device": "cpu", "tensorboard": False, "eval_samples": 4, **train}
    content = {
        "model": {"base": "llama-tiny", "vocab_size": 300},
        "batch": {"global_batch": 4},
        "precision": {"dtype": "fp32"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(
        json.dumps({**content, "optimizer": {"lr": 0.02, "schedule": "constant"}, "data": data, "train": settings})
    )
    return load_run(str(path))


def train(config: RunConfig) -> None:
    with SignalWatcher() as signals:
        assert loop.train(config, None, signals) == 0


def test_each_set_is_reported_by_its_name_and_the_best_checkpoint_stays(
    tmp_path: Path, sets: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    # Training uses `prose`, so that the loss of digits is lowest early. Newer checkpoints must not replace that
    # checkpoint.
    data = {"train": sets["prose"], "validation": sets}
    config = run_of(tmp_path, data, steps=10, eval_interval=2, save_interval=2, keep_best="validation/digits")
    check(config, 1)
    train(config)
    rows = run_dir.evaluations(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 2, 4, 6, 8, 10]
    assert all(row["loss"] == row["validation/prose"] != row["validation/digits"] for row in rows)
    assert (
        "held-out prose after step 4: loss" in (text := capsys.readouterr().err)
        and "held-out digits after step 4: loss" in text
    )
    best = min(rows[1:], key=lambda row: row["validation/digits"])["step"]
    assert best < 8, "the best one must be older than the two that stay anyway"
    checkpoints = tmp_path / "run" / "checkpoints"
    assert folder.read_latest(checkpoints, folder.BEST) == folder.step_name(best)
    assert folder.named_steps(checkpoints) == [10, 8, best]
    assert [(row["step"], row["best"], row["latest"]) for row in map(summary, find(tmp_path / "run"))] == [
        (best, True, False),
        (8, False, False),
        (10, False, True),
    ]
    saves = [row["step"] for row in run_dir.read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "save"]
    assert saves == [2, 4, 6, 8, 10], "a step that is saved as the best one is not saved again by its interval"
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "validation/digits" in page and "validation/prose" in page


def test_a_batch_without_targets_does_not_count(tmp_path: Path, sets: dict[str, str]) -> None:
    """Regression: the loss of such a batch is 0 / 0, and made the loss of the complete set NaN."""
    with IndexedWriter(tmp_path / "prompts", "u2") as writer:
        for document in range(100):
            writer.add_sequence([document] * 16, learnt=document % 10 == 0)
            writer.end_document()
    losses = []
    for batch in (4, 100):  # of the batches of 4 samples, at least five have no target
        data = {"train": sets["prose"], "validation": {"prompts": str(tmp_path / "prompts")}}
        config = run_of(tmp_path, data, steps=1, eval_interval=1, eval_samples=100)
        model = config.model.model_copy(update={"sequence_length": 16})
        sizes = config.batch.model_copy(update={"global_batch": batch})
        settings = config.train.model_copy(update={"run_dir": str(tmp_path / f"run{batch}")})
        train(config.model_copy(update={"model": model, "batch": sizes, "train": settings}))
        losses.append(run_dir.evaluations(tmp_path / f"run{batch}")[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_was_best_is_known_after_a_resume_and_saved_without_being_asked(
    tmp_path: Path, sets: dict[str, str]
) -> None:
    data = {"train": sets["digits"], "validation": {"only": sets["digits"]}}
    best = "validation/only"
    for steps in (2, 4):
        train(run_of(tmp_path, data, steps=steps, eval_interval=1, keep_best=best, save_final=False))
    progress = folder.read_manifest(tmp_path / "run" / "checkpoints" / folder.step_name(4))[0].progress
    losses = {row["step"]: row["validation/only"] for row in run_dir.evaluations(tmp_path / "run")}
    assert progress.policy["best"] == {"step": 4, "loss": losses[4]} and losses[4] < losses[2]
    train(run_of(tmp_path, data, steps=5, eval_interval=1, keep_best=best, save_final=True))
    assert folder.read_latest(tmp_path / "run" / "checkpoints", folder.BEST)


def test_a_best_of_nothing_is_refused(tmp_path: Path, sets: dict[str, str]) -> None:
    data = {"validation": sets}
    for train_keys, what in (
        ({"keep_best": "digits", "eval_interval": 1}, "validation/digits"),
        ({"keep_best": "validation/digits"}, "set train.eval_interval"),
    ):
        with pytest.raises(ConfigError, match=what):
            check(run_of(tmp_path, data, **train_keys), 1)
    missing = {"validation": {"web": str(tmp_path / "none")}}
    with pytest.raises(ConfigError, match=r"data\.validation\.web: .*none\.bin: no such file"):
        check(run_of(tmp_path, missing), 1)
    with pytest.raises(ConfigError, match=r"data.validation"):
        run_of(tmp_path, {"validation": {"a/b": "synthetic"}})
