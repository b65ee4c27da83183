"""Tests the long-context task with needles of random tokens: its questions, and that only a correct recall scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.errors import DataError
from frontier_llm.inference import needle
from frontier_llm.inference.needle import DEPTHS, HALF, lengths_up_to, needles
from frontier_llm.inference.score import Likelihood
from tests.unit.inference.models import tiny
from tests.unit.inference.test_heldout import dataset


def test_lengths_halve_from_the_window() -> None:
    assert lengths_up_to(8192) == [1024, 2048, 4096, 8192]
    assert lengths_up_to(1500) == [1500] and lengths_up_to(32) == [32]


def test_a_reader_that_looks_back_finds_every_needle_and_one_with_a_short_memory_the_near_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers replace the model. A reader finds an answer after the question's first occurrence, if that is within its
    reach.
    """
    model, (prefix, _) = tiny("llama-tiny"), dataset(tmp_path, (200, 300))  # a window of 32

    def reader(reach: int) -> Any:
        def score(model: Any, requests: Sequence[tuple[Sequence[int], Sequence[int]]], *_: Any) -> list[Likelihood]:
            answers = []
            for context, continuation in requests:
                assert len(context) + len(continuation) == 32 and len(continuation) == HALF
                question = list(context[-HALF:])
                text = list(context[:-HALF])
                places = [at for at in range(len(text) - 2 * HALF + 1) if text[at : at + HALF] == question]
                assert places, "the question stands in the text"
                known = len(text) - places[0] <= reach and text[places[0] + HALF : places[0] + 2 * HALF] == list(
                    continuation
                )
                answers.append(Likelihood(0.0 if known else -HALF * math.log(250), known, HALF, ()))
            return answers

        return score

    for reach, expected in ((32, [1.0] * 5), (14, [0.0, 0.0, 0.0, 1.0, 1.0])):
        monkeypatch.setattr(needle, "score", reader(reach))
        found = needles(model, prefix, samples=3)
        assert [(one.length, one.depth) for one in found] == [(32, depth) for depth in DEPTHS]
        assert [one.found for one in found] == expected
        assert [one.loss for one in found] == pytest.approx([0.0 if share else math.log(250) for share in expected])


def test_a_model_is_asked(tmp_path: Path) -> None:
    """An untrained model recalls nothing, and its loss is about as high as for random guesses."""
    found = needles(tiny("llama-tiny"), dataset(tmp_path, (200,))[0], samples=2, batch_size=4)
    assert len(found) == 5 and all(
        one.found == 0 and one.needles == 2 and one.loss > 0.8 * math.log(250) for one in found
    )


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 20 tokens"):
        needles(tiny("llama-tiny"), dataset(tmp_path, (20,))[0], samples=1)
