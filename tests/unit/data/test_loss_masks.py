"""Tests data with prompts that are only read and answers that are learnt, from JSONL to the targets of the loss."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from frontier_llm.cli.main import main
from frontier_llm.config import RunConfig, build, load_model
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.inspect import inspect
from frontier_llm.data.loader import open_batches
from frontier_llm.data.tokenize import TokenizeOptions, tokenize
from frontier_llm.errors import DataError

# no character is in both prompts and answers
PAIRS = [("WHAT IS 2 + 2?", "four."), ("SAY SOMETHING!", "no."), ("", "an-answer-to-nothing")] * 20


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Write sixty pairs, tokenized as bytes in several parts."""
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    options = TokenizeOptions("response", prompt_key="prompt", shard_bytes=1000)
    tokenize([tmp_path / "pairs.jsonl"], tmp_path / "pairs", "bytes", options, workers=1)
    return str(tmp_path / "pairs")


def test_a_prompt_is_a_sequence_that_is_not_learnt(prefix: str) -> None:
    dataset = IndexedDataset(prefix)
    assert dataset.document_count == len(PAIRS)
    expected = np.concatenate(
        [np.repeat([False, True], [len(prompt), len(response) + 1]) for prompt, response in PAIRS]
    )
    assert np.array_equal(dataset.learnt(0, dataset.token_count), expected)
    for start in range(0, 80):  # any start and end
        for count in (1, 3, 17, 50):
            assert np.array_equal(dataset.learnt(start, count), expected[start : start + count]), (start, count)
    report = inspect(prefix, samples=0)
    assert (report["learnt_tokens"], report["tokens"]) == (expected.sum(), expected.size)


def run_on(prefix: str, **data: object) -> RunConfig:
    model = load_model("llama-tiny", {"vocab_size": 300}).model_dump()
    return build(
        RunConfig,
        {"model": model, "batch": {"global_batch": 4, "micro_batch": 2}, "data": {"train": prefix, **data}},
    )


@pytest.mark.parametrize("documents", [False, True])
def test_targets_count_where_they_are_learnt(prefix: str, documents: bool) -> None:
    batches = open_batches(run_on(prefix, reset_at_documents=documents), 0, 1)
    assert batches is not None and batches.masks_targets
    answers = {*b"".join(response.encode() for _, response in PAIRS), 256}  # 256 is the end of a document
    seen = set()
    for step in range(3):
        batch = batches.microbatch(step, 0)
        inputs = batch.tokens_BS1[:, :-1]
        targets = batch.tokens_BS1[:, 1:]
        expected = np.isin(targets, [*answers]) & ~((inputs == 256) & documents)
        assert np.array_equal(batch.loss_mask_BS, expected) and (batch.documents_BS is not None) == documents
        seen |= {*expected.flatten().tolist()}
    assert seen == {True, False}


def test_a_blend_masks_only_what_has_prompts_and_all_else_costs_nothing(prefix: str, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "plain", np.uint16) as writer:
        for _ in range(50):
            writer.add_document([7] * 20)
    plain = IndexedDataset(tmp_path / "plain")
    assert plain.modes is None, "byte for byte as before"
    only = open_batches(run_on(str(tmp_path / "plain")), 0, 1)
    assert only is not None and not only.masks_targets and only.microbatch(0, 0).loss_mask_BS is None
    both = open_batches(
        run_on(prefix).model_copy(update={"data": run_on(prefix, train=[str(tmp_path / "plain"), prefix]).data}),
        0,
        1,
    )
    assert both is not None
    rows = [
        (batch.tokens_BS1[row], batch.loss_mask_BS[row])
        for batch in (both.microbatch(0, 0), both.microbatch(0, 1))
        for row in (0, 1)
    ]  # type: ignore[index]
    assert [bool((tokens == 7).all()) == bool(mask.all()) for tokens, mask in rows] == [True] * 4


def test_the_command_line_and_what_is_no_jsonl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": "why", "a": "because"}))
    words = ["data", "tokenize", str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--output", str(tmp_path / "a")]
    assert main([*words, "--text-key", "a", "--prompt-key", "q"]) == 0
    assert IndexedDataset(tmp_path / "a").learnt(0, 11).tolist() == [False] * 3 + [True] * 8
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError, match="is not JSONL, so it has no field 'q'"):
        tokenize([tmp_path / "b.txt"], tmp_path / "b", "bytes", TokenizeOptions(prompt_key="q"), workers=1)
