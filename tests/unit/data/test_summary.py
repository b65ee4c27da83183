"""A run's summary of its data before the start, and datasets that are refused as too short."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.cli.main import main
from frontier_llm.config import BatchConfig, DataConfig, DataSource, RunConfig, TrainConfig, build, load_model
from frontier_llm.data.loader import data_problems
from frontier_llm.data.summary import log_datasets
from frontier_llm.data.tokenize import tokenize


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A dataset of 1,200 bytes and one end of document."""
    (tmp_path / "a.txt").write_text("some text of the corpus\n" * 50)
    tokenize([tmp_path / "a.txt"], tmp_path / "tokens", "bytes")
    return str(tmp_path / "tokens")


def run_config(steps: int = 5, global_batch: int = 4, sequence_length: int = 64, **data: Any) -> RunConfig:
    model = load_model("llama-tiny", {"vocab_size": 300, "sequence_length": sequence_length})
    return RunConfig(
        model=model,
        batch=BatchConfig(global_batch=global_batch),
        data=DataConfig(**data),
        train=TrainConfig(steps=steps, eval_samples=9),
    )


def test_each_dataset_is_said_with_its_epochs(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    sources = (DataSource(path=prefix), DataSource(path=prefix, weight=3.0))
    log_datasets(run_config(train=sources, validation=(DataSource(path=prefix),)))
    text = capsys.readouterr().err
    assert f"data.train: {prefix}: 1 document, 1.2K tokens, weight 0.25, 0.266 epochs in this run's steps" in text
    assert f"data.train: {prefix}: 1 document, 1.2K tokens, weight 0.75, 0.799 epochs in this run's steps" in text
    assert f"data.validation: {prefix}: 1 document, 1.2K tokens, weight 1, 0.48 epochs in each evaluation" in text
    assert "warning" not in text


def test_more_than_four_epochs_are_warned_of(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    log_datasets(run_config(steps=20, train=(DataSource(path=prefix),)))
    assert (
        " 4.3 times; according to published measurements, a model learns little from more than 4 epochs"
        in capsys.readouterr().err
    )
    log_datasets(run_config(steps=18, train=(DataSource(path=prefix),)))
    assert "warning" not in capsys.readouterr().err


def test_synthetic_data_is_called_that(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log_datasets(run_config())
    assert "data.train: synthetic: random tokens" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    for suffix in ("bin", "idx"):
        shutil.copy(f"{prefix}.{suffix}", f"synthetic.{suffix}")
    log_datasets(run_config(train=(DataSource(path="synthetic"),)))
    assert "data.train: synthetic: 1 document, 1.2K tokens" in capsys.readouterr().err


def test_data_shorter_than_a_batch_or_a_sequence_is_refused(prefix: str) -> None:
    source = (DataSource(path=prefix),)
    assert data_problems(run_config(train=source, global_batch=18)) == []
    (problem,) = data_problems(run_config(train=source, global_batch=19))
    assert str(problem).startswith("data.train: has 1201 tokens, less than one batch of 19 sequences of 64 (1216)")
    assert problem.fix == "give more data, or set batch.global_batch to at most 18"
    (problem,) = data_problems(run_config(sequence_length=1201, train="synthetic", validation=source))
    assert problem.what == f"{prefix} has 1201 tokens, less than one sequence of 1201 + 1"
    assert data_problems(run_config(sequence_length=1200, train="synthetic", validation=source)) == []


@pytest.mark.thorough
def test_check_says_the_same(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` prints the same summary as a start."""
    words = [
        "check",
        "quickstart",
        f"train.run_dir={tmp_path}/run",
        "data.validation=null",
        "data.tokenizer=bytes",
        "model.sequence_length=64",
    ]
    assert main([*words, f"data.train=[{{path: {prefix}}}]", "train.steps=20"]) == 0
    text = capsys.readouterr().out
    assert f"data.train: {prefix}: 1 document, 1.2K tokens, weight 1" in text and "the run reads" in text
    assert main([*words, f"data.train=[{{path: {prefix}}}]", "model.sequence_length=1300"]) == 1
    assert "less than one" in capsys.readouterr().out


def test_a_dataset_is_not_read_more_often_than_it_may_be_over_all_phases(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("another text\n" * 300)
    tokenize([tmp_path / "b.txt"], tmp_path / "others", "bytes")
    limited = DataSource(path=prefix, max_epochs=1.5)
    free = DataSource(path=str(tmp_path / "others"), weight=3.0)
    run = run_config(steps=20, train=(limited, free))  # 5,120 tokens, a quarter of them from a dataset of 1,201
    assert data_problems(run) == []
    phases = {"phases": [{"steps": 20}, {"steps": 4, "data": {"train": [{"path": prefix}]}}], "eval_samples": 9}
    (problem,) = data_problems(build(RunConfig, {**run.model_dump(), "train": phases}))
    assert str(problem).startswith(f"data.train: the run reads {prefix} 1.92 times, more than its max_epochs of 1.5")
    assert "reduce its weight or the steps to 78.2%" in problem.fix


def test_validation_data_that_is_also_trained_on_is_said(
    prefix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for ending in ("bin", "idx"):
        shutil.copy(f"{prefix}.{ending}", tmp_path / f"copy.{ending}")
    (tmp_path / "b.txt").write_text("some text of the corpse\n" * 50)  # same length, other content
    tokenize([tmp_path / "b.txt"], tmp_path / "others", "bytes")
    train = (DataSource(path=prefix),)
    log_datasets(
        run_config(
            train=train,
            validation={"same": prefix, "copy": str(tmp_path / "copy"), "new": str(tmp_path / "others")},
        )
    )
    text = capsys.readouterr().err
    assert f"data.validation.same: {prefix} is also training data, so its loss does not show" in text
    assert f"data.validation.copy: {tmp_path}/copy is also training data as {prefix}, so " in text
    assert "others is also" not in text
