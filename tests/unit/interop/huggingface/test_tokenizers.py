"""Exported tokenizers give transformers the same ids and the same text."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from frontier_llm.data.tokenizer import Tokenizer, load_tokenizer, train_huggingface, train_sentencepiece
from frontier_llm.interop.huggingface import tokenizer_files

transformers = pytest.importorskip("transformers")

TEXTS = [inspect.getsource(module)[:20_000] for module in (inspect, json, pytest.importorskip("argparse"))]
HARD = ["  two  spaces\n\n\n\ttab ", "é ünï 漢字 \U0001f600", "", " ", "\n", "a\r\nb", "ends with space "]


def tokenizer(kind: str, directory: Path) -> Tokenizer:
    if kind == "sentencepiece":
        return train_sentencepiece(TEXTS, directory / "spm.model", 600)
    if kind == "huggingface":
        return train_huggingface(TEXTS, directory / "hf.json", 600)
    if kind == "vocab and merges":
        train_huggingface(TEXTS, directory / "hf.json", 600)
        model = json.loads((directory / "hf.json").read_text(encoding="utf-8"))["model"]
        (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
        (directory / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])), encoding="utf-8")
        return load_tokenizer(directory / "vocab.json")
    return load_tokenizer("bytes")


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "vocab and merges", "bytes"])
def test_ids_and_text_are_the_same_in_transformers(kind: str, tmp_path: Path) -> None:
    ours = tokenizer(kind, tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    for name, content in tokenizer_files(ours, 128).items():
        (out / name).write_bytes(content.read_bytes() if isinstance(content, Path) else content.encode())
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.eos_token_id == ours.eod and len(theirs) == ours.vocab_size and theirs.model_max_length == 128
    for text in TEXTS + HARD:
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == text == ours.decode(ids)


def test_a_declared_end_of_document_is_kept(tmp_path: Path) -> None:
    train_huggingface(TEXTS, tmp_path / "tokenizer.json", 600)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}, "mine": 1}))
    files = tokenizer_files(load_tokenizer(tmp_path), 128)
    assert files["tokenizer_config.json"] == tmp_path / "tokenizer_config.json"
