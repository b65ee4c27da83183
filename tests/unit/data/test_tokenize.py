"""Tokenization gives the same bytes for any number of workers. A kill costs only unfinished parts, and damaged input
follows an explicit policy.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from frontier_llm.data import documents
from frontier_llm.data import tokenize as tokenize_module
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.meta import read_meta
from frontier_llm.data.tokenize import TokenizeOptions, make_share, missing_dataset, plan_dataset, shares_of, tokenize
from frontier_llm.data.tokenizer import ByteTokenizer, load_tokenizer, train_sentencepiece
from frontier_llm.errors import DataError

SMALL = TokenizeOptions(shard_bytes=2000)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    directory = tmp_path / "corpus"
    directory.mkdir()
    (directory / "lines.jsonl").write_text(
        "".join(json.dumps({"text": f"document {n} " * (n % 7 + 1)}) + "\n" for n in range(200))
    )
    for number in range(10):
        (directory / f"file{number}.txt").write_text(f"a text file, number {number}\n" * number)
    return directory


def expected(corpus: Path) -> list[str]:
    files = [(corpus / f"file{number}.txt").read_text() for number in range(1, 10)]
    return files + [json.loads(line)["text"] for line in (corpus / "lines.jsonl").read_text().splitlines()]


def content(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx")]


def test_documents_end_in_eod_and_come_in_input_order(corpus: Path, tmp_path: Path) -> None:
    meta = tokenize([corpus], tmp_path / "out", "bytes", SMALL, workers=1)
    dataset = IndexedDataset(tmp_path / "out")
    codec = load_tokenizer("bytes")
    assert [codec.decode(dataset.document(d)[:-1]) for d in range(dataset.document_count)] == expected(corpus)
    assert all(dataset.document(d)[-1] == codec.eod for d in range(dataset.document_count))
    assert meta.documents == 209
    assert meta.text_bytes == sum(len(text.encode()) for text in expected(corpus))
    assert meta.tokens == meta.text_bytes + meta.documents
    assert read_meta(tmp_path / "out") == meta
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out.bin", "out.idx", "out.meta.json"]


def test_any_number_of_workers_and_any_shards_give_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    train_sentencepiece(expected(corpus), tmp_path / "t.model", 300)
    tokenizer = str(tmp_path / "t.model")
    tokenize([corpus], tmp_path / "one", tokenizer, SMALL, workers=1)
    tokenize([corpus], tmp_path / "two", tokenizer, SMALL, workers=2)
    tokenize([corpus], tmp_path / "whole", tokenizer, TokenizeOptions(), workers=1)
    assert content(tmp_path / "one") == content(tmp_path / "two") == content(tmp_path / "whole")


def test_nothing_is_done_twice_but_a_change_is_noticed(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = tokenize([corpus], tmp_path / "out", "bytes", SMALL, workers=1)
    make_part = tokenize_module.make_part
    monkeypatch.setattr(tokenize_module, "make_part", lambda job: pytest.fail("was made again"))
    assert tokenize([corpus], tmp_path / "out", "bytes", SMALL, workers=1) == first
    monkeypatch.setattr(tokenize_module, "make_part", make_part)
    with (corpus / "file1.txt").open("a") as handle:
        handle.write("more")
    assert tokenize([corpus], tmp_path / "out", "bytes", SMALL, workers=1, overwrite=True).tokens == first.tokens + 4
    by_line = dataclasses.replace(SMALL, documents="line")
    assert tokenize([corpus], tmp_path / "out", "bytes", by_line, workers=1, overwrite=True).documents == 246


def test_a_larger_limit_of_lines_and_another_end_of_document_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "a" * 5000}) + "\n" + json.dumps({"text": "b"}) + "\n")
    short = TokenizeOptions(skip_damaged=True, max_bytes=1000)
    assert tokenize([tmp_path / "in.jsonl"], tmp_path / "out", "bytes", short, workers=1).damaged == 1
    long = dataclasses.replace(short, max_bytes=10_000)
    with pytest.raises(DataError, match="--overwrite"):
        tokenize([tmp_path / "in.jsonl"], tmp_path / "out", "bytes", long, workers=1)
    assert tokenize([tmp_path / "in.jsonl"], tmp_path / "out", "bytes", long, workers=1, overwrite=True).damaged == 0

    monkeypatch.setattr(ByteTokenizer, "eod", 0)
    with pytest.raises(DataError, match="--overwrite"):
        tokenize([tmp_path / "in.jsonl"], tmp_path / "out", "bytes", long, workers=1)


@pytest.mark.parametrize("suffix", ["bin", "idx", "meta.json"])
def test_a_damaged_dataset_is_made_again(corpus: Path, tmp_path: Path, suffix: str) -> None:
    """A damaged record needs --overwrite, because the dataset may come from other inputs."""
    tokenize([corpus], tmp_path / "out", "bytes", SMALL, workers=1)
    whole = content(tmp_path / "out")
    damaged = tmp_path / f"out.{suffix}"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    tokenize([corpus], tmp_path / "out", "bytes", SMALL, workers=1, overwrite=suffix == "meta.json")
    assert content(tmp_path / "out") == whole
    damaged.unlink()
    tokenize([corpus], tmp_path / "out", "bytes", SMALL, workers=1, overwrite=suffix == "meta.json")
    assert content(tmp_path / "out") == whole


def test_resume_makes_only_what_is_missing(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize([corpus], tmp_path / "whole", "bytes", SMALL, workers=1)
    make_part = tokenize_module.make_part
    made = []

    def stop_after_three(job: tokenize_module.ShardWork) -> tokenize_module.ShardReport:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(job.prefix)
        return make_part(job)

    monkeypatch.setattr(tokenize_module, "make_part", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        tokenize([corpus], tmp_path / "out", "bytes", SMALL, workers=1)
    assert not (tmp_path / "out.idx").exists()
    again: list[str] = []
    monkeypatch.setattr(tokenize_module, "make_part", lambda job: (again.append(job.prefix), make_part(job))[1])
    tokenize([corpus], tmp_path / "out", "bytes", SMALL, workers=1)
    assert len(made) == 3
    assert again
    assert not set(made) & set(again)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_nodes_share_the_parts_and_one_process_joins_them(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize([corpus], tmp_path / "alone", "bytes", SMALL, workers=1)
    make_part = tokenize_module.make_part
    made: list[str] = []

    def counted(job: tokenize_module.ShardWork) -> tokenize_module.ShardReport:
        made.append(job.prefix)
        return make_part(job)

    monkeypatch.setattr(tokenize_module, "make_part", counted)
    plan = plan_dataset([corpus], tmp_path / "out", "bytes", SMALL)
    shared = {"plan": plan, "workers": 1, "overwrite": False, "count": 3}
    counts = [make_share(**shared, index=index) for index in (0, 1)]  # the third node was killed
    counts.append(make_share(**shared, index=1))  # a second start of a share finds its parts
    assert counts[1] == counts[2] and sum(counts[:2]) == len(made) == len(set(made)) > 4
    digest = missing_dataset(plan, overwrite=False)
    assert digest is not None
    with shares_of(tmp_path / "out", digest):
        make_share(**shared, index=2)
        with pytest.raises(DataError, match="is writing it, from the same inputs"):
            tokenize([corpus], tmp_path / "out", "bytes", SMALL)
    tokenize([corpus], tmp_path / "out", "bytes", SMALL)
    assert len(made) == len(set(made))
    assert content(tmp_path / "out") == content(tmp_path / "alone")
    assert make_share(**shared, index=0) == 0  # the dataset is complete
    assert missing_dataset(plan, overwrite=False) is None
    assert not list(tmp_path.glob("out.parts*"))


KILLED = """
import sys, time
from frontier_llm.data import tokenize as module
make = module.make_part
made = 0
def slow(job):
    global made
    made += 1
    time.sleep(0 if made <= 4 else 600)
    return make(job)
module.make_part = slow
module.tokenize([sys.argv[1]], sys.argv[2], "bytes", module.TokenizeOptions(shard_bytes=500), workers=1)
"""


def test_a_killed_run_resumes(corpus: Path, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(corpus), str(tmp_path / "out")])
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("out.parts-*/*.json"))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("out.parts-*/*.json")}
    assert len(kept) >= 4
    assert not (tmp_path / "out.idx").exists()
    options = TokenizeOptions(shard_bytes=500)
    tokenize([corpus], tmp_path / "out", "bytes", options, workers=1)
    tokenize([corpus], tmp_path / "whole", "bytes", options, workers=1)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not list(tmp_path.glob("*.parts-*"))


@pytest.mark.parametrize("workers", [1, 2])
def test_damage_stops_or_is_skipped_and_counted(corpus: Path, tmp_path: Path, workers: int) -> None:
    lines = (corpus / "lines.jsonl").read_text().splitlines()
    lines[150] = '{"text": "cut off'
    lines[160] = '{"text": null}'
    (corpus / "lines.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"lines\.jsonl:1[56]1: .*(?s:.*)--skip-damaged"):
        tokenize([corpus], tmp_path / "out", "bytes", SMALL, workers)
    assert not (tmp_path / "out.idx").exists()
    meta = tokenize([corpus], tmp_path / "out", "bytes", dataclasses.replace(SMALL, skip_damaged=True), workers)
    assert meta.damaged == 2
    assert [example.split(": ")[0] for example in meta.damaged_examples] == [
        f"{corpus}/lines.jsonl:{line}" for line in (151, 161)
    ]
    assert meta.documents == 207


def test_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"text": ""}\n')
    with pytest.raises(DataError, match="contain no documents"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", workers=1)
    (tmp_path / "a.jsonl").write_text("broken\n")
    with pytest.raises(DataError, match=r"1 damaged inputs were skipped"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", TokenizeOptions(skip_damaged=True), workers=1)
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match="contain no documents"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", workers=1)
    assert not list(tmp_path.glob("out*"))


def test_long_document_of_several_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", 100)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 50)
    text = "".join(f"line {number}\n" for number in range(100))
    (tmp_path / "a.txt").write_text(text)
    tokenize([tmp_path / "a.txt"], tmp_path / "out", "bytes", workers=1)
    dataset = IndexedDataset(tmp_path / "out")
    assert dataset.document_count == 1
    assert dataset.sequence_count > 5
    assert load_tokenizer("bytes").decode(dataset.document(0)) == text
    assert dataset.document(0)[-1] == 256


def test_directory_that_cannot_be_written(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        tokenize([corpus], tmp_path / "file" / "out", "bytes", workers=1)
