"""`data plan`, `data show`, `status` and the report: the data that a run will read and has read, and how often."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster.status import read_status
from frontier_llm.cluster.status_text import render
from frontier_llm.config import load_run
from frontier_llm.data.identity import datasets_of, wanted
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.loader import open_run
from frontier_llm.data.position import START
from frontier_llm.data.tokenize import TokenizeOptions, tokenize
from frontier_llm.experiments.measure.report import write_report

RUN = (
    "bench",
    "model=llama-tiny",
    "model.layers=1",
    "model.vocab_size=300",
    "model.sequence_length=16",
    "batch.global_batch=2",
    "batch.micro_batch=1",
)
SAVED = ("train.save_final=true", "precision.dtype=fp32", "optimizer.schedule=constant")


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, lines in (("a", 40), ("b", 40)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} line {number:03}\n" for number in range(lines)))
        tokenize([tmp_path / f"{name}.txt"], tmp_path / name, "bytes", TokenizeOptions(documents="line"))


def json_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_what_a_step_read_is_shown(packing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        *RUN,
        *SAVED,
        f"data.packing={packing}",
        "data.train=[a, b]",
        "train.run_dir=run",
        "train.phases=[{steps: 3}, {steps: 3, data: {train: a}}]",
    )
    assert main(["train", *words, "train.steps=5"]) == 0
    assert main(["train", *words, "train.steps=6"]) == 0
    config = load_run(words[0], words[1:])
    position = START.enter(wanted(config, datasets_of([config]))).advance(2, 3)
    for step in (2, 5, 6):
        shown = json_of(capsys, "data", "show", "run", "--step", str(step))
        assert (shown["step"], shown["samples_of_step"], len(shown["samples"])) == (step, 2, 2)
        assert [sample["number"] for sample in shown["samples"]] == [2 * step - 2, 2 * step - 1]
        if step == 2:
            assert sorted(sample["source"] for sample in shown["samples"]) == ["a", "b"]
            samples = open_run(config, START.enter(wanted(config, datasets_of([config]))))
            for sample in shown["samples"]:
                row = np.empty(17, np.int64)
                samples.fill(sample["number"], row, np.empty(17, np.bool_))
                known = bytes(row[row < 256].tolist()).decode()
                assert known.startswith(sample["text"].rstrip("\n�")[:8])
                dataset = IndexedDataset(sample["source"])
                first = dataset.document(sample["documents"][0]).tolist()
                assert row[0] in first and sample["index"] == 1
        else:
            assert [(sample["source"], sample["index"]) for sample in shown["samples"]] == [
                ("a", 3 + 2 * (step - 4)),
                ("a", 4 + 2 * (step - 4)),
            ]
    assert position.samples == 6
    assert main(["data", "show", "run", "--step", "2"]) == 0 and "step 2 read 2 samples" in capsys.readouterr().out
    assert main(["data", "show", "run", "--step", "7"]) == 2
    assert "step 7 was not trained: the run has trained 6 steps" in capsys.readouterr().err


def test_the_plan_says_what_is_read_twice_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        *RUN,
        *SAVED,
        "data.train=[{path: a, weight: 3}, b]",
        "train.run_dir=run",
        "train.phases=[{steps: 20}, {steps: 4, model: {sequence_length: 32}}]",
    )
    sizes = [IndexedDataset(name).token_count for name in "ab"]
    plan = json_of(capsys, "data", "plan", *words)
    rows = [
        (row["phase"], row["first_step"], row["last_step"], row["path"], row["tokens"], row["tokenizer"])
        for row in plan["sources"]
    ]
    assert rows == [
        (1, 1, 20, "a", 480, "bytes"),
        (1, 1, 20, "b", 160, "bytes"),
        (2, 21, 24, "a", 192, "bytes"),
        (2, 21, 24, "b", 64, "bytes"),
    ]
    assert [row["dataset_tokens"] for row in plan["sources"][:2]] == sizes
    assert plan["sources"][2]["epochs_by_then"] == pytest.approx(672 / sizes[0])
    assert any(note.startswith("a is read 1.") for note in plan["notes"]) and any(
        "of b is never read" in note for note in plan["notes"]
    )
    assert any(
        "a is read in 2 orders, so a token can be read twice: 480 at length 16, 192 at length 32" in note
        for note in plan["notes"]
    )
    assert main(["train", *words, "train.steps=4"]) == 0
    assert main(["train", *words, "train.steps=8", "--leave-out", "8", "--allow-change", "train.steps"]) == 0
    plan = json_of(capsys, "data", "plan", *words)
    assert (
        plan["after_step"] == 8
        and plan["sources"][0]["first_step"] == 9
        and plan["sources"][0]["tokens"] == 12 * 2 * 16 * 3 // 4
    )
    assert any(note.startswith("a: 6 samples (96 tokens) were left out: 6 to 11") for note in plan["notes"])
    assert main(["data", "plan", *words]) == 0 and "from the checkpoint after step 8 on" in capsys.readouterr().out
    epochs = read_status(tmp_path / "run").epochs
    assert epochs == {"a": pytest.approx(8 * 2 * 16 * 3 / 4 / sizes[0]), "b": pytest.approx(8 * 2 * 16 / 4 / sizes[1])}
    assert f"a {epochs['a']:.3g} epochs, b {epochs['b']:.3g} epochs" in render([read_status(tmp_path / "run")])
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "<h2>Data</h2>" in page and f"{epochs['a']:.3g}" in page
