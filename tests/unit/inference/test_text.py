"""Tests streamed text: characters are complete, no part of a stop string appears, and the final text is the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from frontier_llm.config import load_model
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.errors import ConfigError
from frontier_llm.inference import text as room
from frontier_llm.inference.sampling import Sampling
from frontier_llm.inference.text import complete

BYTES = load_tokenizer("bytes")
MODEL = SimpleNamespace(config=load_model("llama-tiny"))


def answer_with(monkeypatch: pytest.MonkeyPatch, rows: Sequence[Sequence[int]]) -> None:
    """Let the model generate these tokens."""

    def stream(
        model: Any,
        prompts: Any,
        sampling: Sampling,
        use_cache: bool,
        first_row: int,
    ) -> Iterator[list[int | None]]:
        batch = rows[first_row : first_row + len(prompts)]
        ended = [False] * len(batch)
        for place in range(max(map(len, batch))):
            tokens = [None if ended[row] or place >= len(said) else said[place] for row, said in enumerate(batch)]
            ended = [done or token in sampling.stop_tokens for done, token in zip(ended, tokens, strict=True)]
            yield tokens

    monkeypatch.setattr(room, "stream", stream)


def run(
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    stops: Sequence[str] = (),
    eod: bool = False,
) -> tuple[Any, list[str]]:
    tokens = list(said.encode())
    if eod:
        tokens.append(BYTES.eod)
    answer_with(monkeypatch, [tokens])
    pieces: list[str] = []
    completion = complete(MODEL, BYTES, ["p"], Sampling(), stops, lambda row, piece: pieces.append(piece))[0]  # type: ignore[arg-type]
    return completion, pieces


def test_pieces_are_whole_characters_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    completion, pieces = run(monkeypatch, "aé漢\U0001f600b")
    assert pieces == ["a", "é", "漢", "\U0001f600", "b"]
    assert completion.text == "aé漢\U0001f600b" and completion.finish_reason == "length"


def test_the_end_of_a_document_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    completion, pieces = run(monkeypatch, "ab", eod=True)
    assert (completion.text, completion.finish_reason, completion.num_tokens) == ("ab", "stop", 2)
    assert "".join(pieces) == "ab"


def test_nothing_of_a_stop_string_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    completion, pieces = run(monkeypatch, "one\n\ntwo\n\nthree", stops=["\n\nt", "zzz"])
    assert (completion.text, completion.finish_reason) == ("one", "stop")
    assert "".join(pieces) == "one"


def test_the_beginning_of_a_stop_string_is_shown_once_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    completion, pieces = run(monkeypatch, "a<en>b<e", stops=["<end>"])
    assert completion.text == "".join(pieces) == "a<en>b<e"


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_rows_end_on_their_own(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, [[*b"abc"], [*b"xSTOPyyy"], [BYTES.eod]])
    texts = complete(MODEL, BYTES, ["p", "q", "r"], Sampling(), ["STOP"], batch_size=batch_size)  # type: ignore[arg-type]
    assert [(entry.text, entry.finish_reason) for entry in texts] == [("abc", "length"), ("x", "stop"), ("", "stop")]


def test_a_prompt_that_does_not_fit_is_refused_before_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, [[*b"abc"], [*b"abc"]])
    with pytest.raises(ConfigError, match="prompt 1: has 32 tokens, which leaves no space"):
        complete(
            MODEL,
            BYTES,
            ["p", "q" * 32],
            Sampling(),
            on_text=lambda row, piece: pytest.fail("began"),
            batch_size=1,
        )  # type: ignore[arg-type]
