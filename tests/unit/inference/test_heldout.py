"""Compares the held-out loss of real dataset files with its definition."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.meta import DatasetMeta, write_meta
from frontier_llm.errors import DataError
from frontier_llm.inference.heldout import draw_by_position, held_out
from tests.unit.inference.models import prompts, tiny


def dataset(
    directory: Path,
    lengths: tuple[int, ...],
    text_bytes: int | None = None,
    vocab: int = 250,
) -> tuple[str, list[int]]:
    prefix = str(directory / "data")
    documents = prompts(lengths, vocab)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for document in documents:
            writer.add_document(np.array(document))
    tokens = [token for document in documents for token in document]
    if text_bytes is not None:
        write_meta(prefix, DatasetMeta("t", "0" * 64, vocab, 0, len(lengths), len(tokens), text_bytes))
    return prefix, tokens


def test_loss_is_the_mean_over_all_windows(tmp_path: Path) -> None:
    model = tiny("llama-tiny")  # S = 32
    prefix, tokens = dataset(tmp_path, (50, 61, 30), text_bytes=600)
    found = held_out(model, prefix, batch_size=2)
    losses = []
    with torch.inference_mode():
        for start in range(0, 128, 32):
            window = torch.tensor(tokens[start : start + 33])
            x = model.hidden(window[:-1, None])
            assert x is not None
            losses.append(torch.nn.functional.cross_entropy(model.whole_logits(x)[:, 0], window[1:], reduction="sum"))
    expected = float(sum(losses)) / 128
    assert found.tokens == 128
    assert math.isclose(found.loss, expected, rel_tol=1e-12)
    assert math.isclose(found.perplexity, math.exp(expected), rel_tol=1e-12)
    assert found.bits_per_byte is not None
    assert math.isclose(found.bits_per_byte, expected / math.log(2) / (600 / 141), rel_tol=1e-12)
    some = held_out(model, prefix, windows=2)
    assert some.tokens == 64 and math.isclose(some.loss, float(losses[0] + losses[2]) / 64, rel_tol=1e-12)


def test_no_record_of_the_text_no_bits_per_byte(tmp_path: Path) -> None:
    assert held_out(tiny("llama-tiny"), dataset(tmp_path, (40,))[0]).bits_per_byte is None


def test_unfit_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 20 tokens, less than one window of 32"):
        held_out(tiny("llama-tiny"), dataset(tmp_path, (20,))[0])
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="vocabulary has 250"):
        held_out(tiny("llama-tiny"), dataset(tmp_path / "b", (2000,), vocab=400)[0])
    with IndexedWriter(tmp_path / "negative", "i4") as writer:
        writer.add_document([*range(60), -3, *range(60)])
    with pytest.raises(DataError, match="contains the token id -3, but the model's vocabulary has 250"):
        held_out(tiny("llama-tiny"), str(tmp_path / "negative"))


def test_loss_by_position_is_that_of_each_stretch_of_the_windows(tmp_path: Path) -> None:
    model = tiny("llama-tiny")
    prefix, tokens = dataset(tmp_path, (50, 61, 30))
    found = held_out(model, prefix, batch_size=2, positions=5)
    losses = []
    with torch.inference_mode():
        for start in range(0, 128, 32):
            window = torch.tensor(tokens[start : start + 33])
            x = model.hidden(window[:-1, None])
            assert x is not None
            losses.append(torch.nn.functional.cross_entropy(model.whole_logits(x)[:, 0], window[1:], reduction="none"))
    expected = [float(part.mean()) for part in torch.stack(losses).tensor_split(5, dim=1)]
    assert found.by_position == pytest.approx(expected, rel=1e-12)
    assert len(held_out(model, prefix).by_position) == 1
    draw_by_position([found], 32, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000
