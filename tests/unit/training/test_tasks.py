"""In-context tasks during training: scores of the options in any layout, the records, and refusals before the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.cli.checks import check
from frontier_llm.config import load_run
from frontier_llm.data.tokenize import tokenize
from frontier_llm.errors import ConfigError
from frontier_llm.experiments.measure.report import write_report
from frontier_llm.run import run_dir
from frontier_llm.run.signals import SignalWatcher
from frontier_llm.training import loop
from frontier_llm.training.tasks import PackedTexts, log_likelihoods
from tests.harness.marks import thorough
from tests.harness.pool import RankPool
from tests.oracle import gpt
from tests.parity.cases import Case
from tests.parity.compare import assemble
from tests.parity.three_steps import Piece, build, weights

# The window has 16 + 1 tokens: short pairs, one that fills it, and one that is cut on the left.
PAIRS = [([1, 2, 3], [4]), ([7], [8, 9, 10]), ([5] * 12, [6, 7, 8, 9, 1]), (list(range(20)), [3, 2]), ([30, 31], [32])]


def scores(rank: int, case: Case) -> tuple[list[float], list[Piece]]:
    state = build(rank, case)
    values = log_likelihoods(state, PAIRS, lambda: False)
    assert values is not None and log_likelihoods(state, PAIRS, lambda: True) is None
    return values, weights(state.optimizer.buckets)


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", tp=2, pp=2, dp=2, sequence_parallel=True, micro_batch=2),
        Case("gpt", cp=2, pp=2, schedule="interleaved", documents=True),
        thorough(Case("gpt", cp=2, dp=2)),
        thorough(Case("mixtral", tp=2, dp=2, settings=("parallel.expert=2",))),
    ],
    ids=str,
)
def test_every_layout_scores_as_the_oracle_does(ranks: RankPool, case: Case) -> None:
    case = Case(**{**vars(case), "settings": (*case.settings, "model.sequence_length=16", "model.dropout=0.5")})
    results = ranks.run(case.world_size, scores, case)
    params = {
        name: torch.from_numpy(value)
        for name, value in assemble([pieces for _, pieces in results], "weights")[0].items()
    }
    for number, (context, continuation) in enumerate(PAIRS):
        text = torch.tensor([*context, *continuation][-17:])
        logits = gpt.logits(case.config().model.model_dump(), params, text[:-1]).log_softmax(-1)
        expected = logits.gather(1, text[1:, None])[-len(continuation) :].sum()
        assert all(values[number] == pytest.approx(float(expected), rel=1e-10) for values, _ in results)


def test_options_are_packed_in_order_and_none_is_lost() -> None:
    texts = PackedTexts(PAIRS, 16)
    assert len(texts) == 4 and len(PackedTexts(PAIRS, 16, most=1)) == len(PAIRS)
    tokens = np.empty(17, np.int64)
    learnt = np.empty(17, np.bool_)
    assert texts.fill(0, tokens, learnt).tolist() == [4, 4, 9] and tokens[:8].tolist() == [1, 2, 3, 4, 7, 8, 9, 10]
    assert np.flatnonzero(learnt).tolist() == [3, 5, 6, 7]
    assert texts.texts_of_targets(0)[:7].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert texts.fill(4, tokens, learnt).tolist() == [17] and not learnt.any()
    short = PackedTexts([([1] * 90, [2] * 10)] * 400, 2048)  # texts as long as HellaSwag's
    assert len(short) == 20


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    """A run on text that contains the answers of its task."""
    (tmp_path / "prose.txt").write_text("the sky is blue\nthe grass is green\n" * 60)
    tokenize([tmp_path / "prose.txt"], tmp_path / "prose", "bytes")
    questions = [
        {"query": f"the {thing} is", "choices": ["blue", "green"], "gold": gold}
        for gold, thing in enumerate(("sky", "grass"))
    ]
    (tmp_path / "colours.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    return {
        "model": {"base": "llama-tiny", "vocab_size": 300, "sequence_length": 64},
        "batch": {"global_batch": 4},
        "precision": {"dtype": "fp32"},
        "optimizer": {"lr": 0.02, "schedule": "constant"},
        "data": {"train": str(tmp_path / "prose"), "tokenizer": "bytes"},
        "train": {
            "run_dir": str(tmp_path / "run"), "device": "cpu", "tensorboard": False, "steps": 4, "eval_interval": 2,
            "save_final": False, "eval_tasks": {"colours": str(tmp_path / "colours.jsonl")},
        },
    }  # fmt: skip


def test_accuracies_are_written_down_at_each_evaluation_and_drawn(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(content))
    config = load_run(str(path))
    check(config, 1)
    with SignalWatcher() as signals:
        assert loop.train(config, None, signals) == 0
    rows = run_dir.tasks(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert all(row["accuracy"]["colours"] in (0, 0.5, 1) for row in rows) and set(rows[0]) > {
        "accuracy_per_token",
        "accuracy_per_character",
    }
    write_report([tmp_path / "run"], tmp_path / "report.html")
    assert "Accuracy of in-context tasks" in (tmp_path / "report.html").read_text()


def test_what_cannot_be_asked_is_refused_before_any_rank_starts(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "odd.jsonl").write_text('{"question": "?"}\n')
    content["train"]["eval_tasks"] = {
        "gone": "gone.jsonl",
        "odd": str(tmp_path / "odd.jsonl"),
        "few": {"path": str(tmp_path / "colours.jsonl"), "shots": 2},
    }
    del content["data"]["tokenizer"]
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        check(load_run(str(path)), 1)
    for words in (
        "set data.tokenizer",
        "no such task file for 'gone'",
        "'odd' is not a known task",
        "too few for 2 examples",
    ):
        assert words in str(refused.value), words
