"""Every tokenizer restores a text exactly, never reads text as a special id, and is identified by its digest."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.data.tokenizer import (
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    take_bytes,
    train_huggingface,
    train_sentencepiece,
)
from frontier_llm.errors import DataError

SOURCES = [path.read_bytes().decode() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]]
HARD = [
    "", " ", "\n", "\t\r\n", "  leading", "trailing  ", "\n\n\n    x\n", "a\0b", "\ufeffbom", "▁", " ▁ x ▁▁",
    "<s></s><unk><0x0A><|endoftext|>", "\u2028é𝔘😀", "\x7f\x1b[0m", "a" * 5000, " " * 300,
]  # fmt: skip


def write_pair(tokenizer_json: Path, directory: Path) -> None:
    """Write the files that GPT2BPETokenizer reads, from a byte-level tokenizer.json."""
    model = json.loads(tokenizer_json.read_text(encoding="utf-8"))["model"]
    (directory / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "gpt2-merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])) + "\n",
        encoding="utf-8",
    )


@pytest.fixture(scope="module", params=["model", "json", "pair", "bytes"])
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "bytes":
        return load_tokenizer("bytes")
    path = tmp_path_factory.mktemp("tokenizer") / f"tokenizer.{'model' if request.param == 'model' else 'json'}"
    (train_sentencepiece if request.param == "model" else train_huggingface)(SOURCES, path, 700)
    if request.param != "pair":
        return load_tokenizer(path)
    write_pair(path, path.parent)
    path.unlink()
    return load_tokenizer(path.parent)


def test_real_sources_come_back(codec: Tokenizer) -> None:
    for text in SOURCES:
        assert codec.decode(codec.encode(text)) == text


@pytest.mark.parametrize("text", HARD, ids=lambda text: ascii(text[:12]))
def test_hard_texts_come_back_and_are_never_special(codec: Tokenizer, text: str) -> None:
    ids = codec.encode(text)
    assert codec.decode(ids) == text
    assert codec.eod not in ids
    assert all(0 <= number < codec.vocab_size for number in ids)


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@settings(max_examples=150)
def test_any_text_comes_back(codec: Tokenizer, text: str) -> None:
    assert codec.decode(codec.encode(text)) == text


def test_end_of_document_is_a_valid_id_without_text(codec: Tokenizer) -> None:
    assert 0 <= codec.eod < codec.vocab_size
    ids = codec.encode("one")
    assert codec.decode([*ids, codec.eod, *ids]) == "oneone"


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    first = train_sentencepiece(SOURCES[:5], tmp_path / "a.model", 400)
    again = train_sentencepiece(SOURCES[:5], tmp_path / "b.model", 400)
    other = train_sentencepiece(SOURCES[5:10], tmp_path / "c.model", 400)
    assert first.digest == again.digest != other.digest


def test_trained_size_is_what_was_asked(tmp_path: Path) -> None:
    assert train_sentencepiece(SOURCES, tmp_path / "a.model", 555).vocab_size == 555
    assert train_huggingface(SOURCES, tmp_path / "tokenizer.json", 555).vocab_size == 555


def test_directory_and_declared_end_of_document(tmp_path: Path) -> None:
    train_huggingface(SOURCES[:3], tmp_path / "tokenizer.json", 300)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("<|endoftext|>", "<finis>"), encoding="utf-8")
    with pytest.raises(DataError, match="eos_token in tokenizer_config"):
        load_tokenizer(tmp_path)
    for declared in ("<finis>", {"content": "<finis>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": declared}))
        assert load_tokenizer(tmp_path).eod == 0
    for damaged in ('{"eos_token":', "[1]"):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(DataError, match=r"tokenizer_config\.json: is not a JSON object"):
            load_tokenizer(tmp_path)


def test_gpt2s_pair_is_the_tokenizer_json_of_the_same_model(tmp_path: Path) -> None:
    whole = train_huggingface(SOURCES[:5], tmp_path / "tokenizer.json", 500)
    (tmp_path / "pair").mkdir()
    write_pair(tmp_path / "tokenizer.json", tmp_path / "pair")
    pair = load_tokenizer(tmp_path / "pair" / "gpt2-vocab.json")
    assert [pair.encode(text) for text in (*SOURCES[:5], *HARD)] == [
        whole.encode(text) for text in (*SOURCES[:5], *HARD)
    ]
    assert (pair.eod, pair.vocab_size) == (whole.eod, whole.vocab_size)
    with pytest.raises(DataError, match=r"has only the merges of a tokenizer\n    fix: give the vocab\.json"):
        load_tokenizer(tmp_path / "pair" / "gpt2-merges.txt")
    digest = pair.digest
    merges = tmp_path / "pair" / "gpt2-merges.txt"
    # remove one merge
    merges.write_text(merges.read_text(encoding="utf-8").rpartition("\n")[0].rpartition("\n")[0], encoding="utf-8")
    assert load_tokenizer(tmp_path / "pair").digest != digest


@pytest.mark.parametrize(
    ("name", "content"),
    [("x.model", b"no model"), ("tokenizer.json", b"{}"), ("tokenizer.json", b"\xff")],
)
def test_foreign_files(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"is not a .*tokenizer|is not a sentencepiece"):
        load_tokenizer(tmp_path / name)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such tokenizer"):
        load_tokenizer(tmp_path / "x.model")
    with pytest.raises(DataError, match="contains neither"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("train", [train_sentencepiece, train_huggingface])
def test_empty_corpus(tmp_path: Path, train: object) -> None:
    with pytest.raises(DataError, match="contain no text"):
        train([], tmp_path / "x.model", 300)  # type: ignore[operator]
    assert list(tmp_path.iterdir()) == []


def test_vocabulary_larger_than_the_text_allows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at most 282 pieces, fewer than --vocab-size 5000") as raised:
        train_sentencepiece(["too little"], tmp_path / "x.model", 5000)
    assert raised.value.problems[0].fix == "set --vocab-size to at most 282, or give more text"
    with pytest.raises(
        DataError,
        match="--vocab-size 100 is too small: all bytes and the characters of the text need 276",
    ) as raised:
        train_sentencepiece(["too little text of many words"], tmp_path / "x.model", 100)
    assert raised.value.problems[0].fix == "set --vocab-size to at least 276"
    assert list(tmp_path.iterdir()) == []


def test_model_without_byte_fallback_still_loads(tmp_path: Path) -> None:
    import sentencepiece

    options = {"vocab_size": 60, "model_type": "bpe", "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 5),
        model_prefix=str(tmp_path / "plain"),
        **options,
    )
    codec = SentencePieceTokenizer(tmp_path / "plain.model")
    assert codec.decode(codec.encode("the fox")) == "the fox"
    assert codec.encode("▁the")


def test_take_bytes() -> None:
    assert list(take_bytes(["é" * 4, "b" * 4, "c"], 9)) == ["é" * 4, "b" * 4]


@pytest.mark.parametrize(("train", "name"), [("train_sentencepiece", "t.model"), ("train_huggingface", "t.json")])
def test_ctrl_c_ends_training_at_once_and_leaves_nothing(tmp_path: Path, train: str, name: str) -> None:
    code = f"""
import os, signal
from frontier_llm.data.tokenizer import {train}

def texts():
    yield "the first text"
    os.kill(os.getpid(), signal.SIGINT)
    yield "another text"

{train}(texts(), {str(tmp_path / name)!r}, 300)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    assert list(tmp_path.iterdir()) == []
