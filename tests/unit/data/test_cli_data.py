"""`frontier-llm data …` through its parser: results on stdout, JSON if requested, errors as FrontierError."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from frontier_llm.cli.main import parse
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.inspect import truncation
from frontier_llm.data.meta import read_meta
from frontier_llm.errors import DataError


def run(*words: object) -> int:
    args = parse(["data", *map(str, words)])
    return int(args.work(args))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"[bold] text {n} [/x]\n" * 5}) + "\n" for n in range(50))
    )
    (tmp_path / "in" / "b.md").write_text("# heading\nand words\n" * 100)
    return tmp_path


@pytest.mark.parametrize("kind", ["model", "json"])
def test_tokenizer_tokenize_inspect(corpus: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    tokenizer = corpus / f"tok.{kind}"
    prefix = corpus / "out" / "tokens"
    assert run("tokenizer", corpus / "in", "--output", tokenizer, "--vocab-size", 290) == 0
    assert "290 ids" in capsys.readouterr().out
    assert run("tokenize", corpus / "in", "--output", prefix, "--tokenizer", tokenizer, "--workers", 1, "--json") == 0
    meta = json.loads(capsys.readouterr().out)
    assert meta["documents"] == 51
    assert run("inspect", prefix, "--json", "--samples", 2, "--top", 7) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == meta["tokens"]
    assert report["documents"] == 51
    assert len(report["top_tokens"]) == 7
    assert sum(token["count"] for token in report["top_tokens"]) <= report["tokens"]
    assert report["samples"][0]["text"].startswith("[bold] text 0 [/x]\n")
    assert report["vocab_size"] == 290
    assert run("inspect", prefix) == 0
    shown = capsys.readouterr().out
    assert "[bold] text 0 [/x]" in shown
    assert "most frequent tokens" in shown
    assert run("inspect", prefix, "--top", 0, "--samples", 0) == 0
    assert "most frequent tokens" not in capsys.readouterr().out


def test_inspect_without_a_record(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("tokenize", corpus / "in", "--output", corpus / "t", "--tokenizer", "bytes", "--workers", 1)
    (corpus / "t.meta.json").unlink()
    capsys.readouterr()
    run("inspect", corpus / "t", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["samples"][0]["text"] is None
    assert report["samples"][0]["first_ids"][:6] == list(b"[bold]")
    run("inspect", corpus / "t", "--json", "--tokenizer", "bytes")
    assert json.loads(capsys.readouterr().out)["samples"][0]["text"].startswith("[bold]")


def test_inspect_counts_what_is_there(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus / "x.txt").write_text("aaab")
    run("tokenize", corpus / "x.txt", "--output", corpus / "x", "--tokenizer", "bytes", "--workers", 1)
    capsys.readouterr()
    run("inspect", corpus / "x", "--json")
    report = json.loads(capsys.readouterr().out)
    assert [(token["id"], token["count"]) for token in report["top_tokens"]] == [(97, 3), (98, 1), (256, 1)]
    assert report["unigram_entropy_bits"] == pytest.approx(1.3709505944546687)
    assert report["document_lengths"]["p50"] == 5


def test_inspect_finds_the_tokenizer_beside_moved_data(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (corpus / "old").mkdir()
    run("tokenizer", corpus / "in", "--output", corpus / "old" / "tok.model", "--vocab-size", 290)
    run(
        "tokenize",
        corpus / "in",
        "--output",
        corpus / "old" / "t",
        "--tokenizer",
        corpus / "old" / "tok.model",
        "--workers",
        1,
    )
    (corpus / "old").rename(corpus / "new")
    capsys.readouterr()
    run("inspect", corpus / "new" / "t", "--json")
    assert json.loads(capsys.readouterr().out)["samples"][0]["text"].startswith("[bold]")


def test_inspect_refuses_another_tokenizer(corpus: Path) -> None:
    run("tokenizer", corpus / "in", "--output", corpus / "tok.model", "--vocab-size", 290)
    run("tokenize", corpus / "in", "--output", corpus / "t", "--tokenizer", "bytes", "--workers", 1)
    with pytest.raises(DataError, match="is not the tokenizer of"):
        run("inspect", corpus / "t", "--tokenizer", corpus / "tok.model")


def test_tokenizer_output_without_a_kind(corpus: Path) -> None:
    with pytest.raises(DataError, match=r"does not end in \.model or \.json"):
        run("tokenizer", corpus / "in", "--output", corpus / "tok")


@pytest.mark.parametrize("kind", ["model", "json"])
def test_another_tokenizer_is_not_replaced_unasked(corpus: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    words = ("tokenizer", corpus / "in", "--output", corpus / f"t.{kind}")
    assert run(*words, "--vocab-size", 290) == run(*words, "--vocab-size", 290) == 0  # the same result again
    before = (corpus / f"t.{kind}").read_bytes()
    with pytest.raises(DataError, match=rf"(?s)t\.{kind}: already contains another tokenizer.*t\.new\.{kind}"):
        run(*words, "--vocab-size", 300)
    assert (corpus / f"t.{kind}").read_bytes() == before != (corpus / f"t.new.{kind}").read_bytes()
    assert run(*words, "--vocab-size", 300, "--overwrite") == 0
    assert (corpus / f"t.{kind}").read_bytes() == (corpus / f"t.new.{kind}").read_bytes()


def test_tokenizer_names_damage(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (corpus / "in" / "a.jsonl").open("a") as handle:
        handle.write("broken\n")
    with pytest.raises(DataError, match=r"a\.jsonl:51"):
        run("tokenizer", corpus / "in", "--output", corpus / "tok.model", "--vocab-size", 290)
    assert run("tokenizer", corpus / "in", "--output", corpus / "tok.model", "--vocab-size", 290, "--skip-damaged") == 0
    assert "a.jsonl:51" in capsys.readouterr().err


def test_inspect_of_imported_tokens_has_no_text_to_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (np.arange(300) % 256).astype("<u2").tofile(tmp_path / "tokens.npy")
    assert (
        run("import", tmp_path / "tokens.npy", "--dtype", "uint16", "--tokenizer", "bytes", "--output", tmp_path / "x")
        == 0
    )
    capsys.readouterr()
    assert run("inspect", tmp_path / "x", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == 300 and report["tokenizer"] == "bytes"
    assert not {"text_bytes", "bits_per_byte_of_one_nat"} & report.keys()


def test_a_prefix_may_be_what_a_shell_completes_but_no_folder(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("tokenize", corpus / "in", "--output", f"{corpus}/tokens.bin", "--tokenizer", "bytes", "--workers", 1) == 0
    )
    for ending in ("", ".", ".bin", ".idx"):
        assert run("inspect", f"{corpus}/tokens{ending}", "--samples", 0) == 0
    with pytest.raises(SystemExit):
        run("tokenize", corpus / "in", "--output", f"{corpus}/folder/", "--tokenizer", "bytes")
    assert (
        f"'{corpus}/folder/' is not the name of a file" in capsys.readouterr().err and not (corpus / "folder").exists()
    )


def test_fewer_ids_than_asked_for_are_announced(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tokenizer", corpus / "in", "--output", corpus / "tok.json", "--vocab-size", 9000) == 0
    assert "of the 9000 ids" in capsys.readouterr().err


def test_more_ids_than_asked_for_are_announced(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tokenizer", corpus / "in", "--output", corpus / "few.json", "--vocab-size", 100) == 0
    assert (
        "100 ids are too few for every byte and the end of a document: the tokenizer has 257" in capsys.readouterr().err
    )


def test_records_of_datasets_are_no_text(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # in the second round the first result is among the inputs
        assert (
            run("tokenize", corpus / "in", "--output", corpus / "in" / "tokens", "--tokenizer", "bytes", "--workers", 1)
            == 0
        )
    assert (corpus / "in" / "tokens.meta.json").exists()


def test_the_tokens_that_lose_their_beginning_are_counted() -> None:
    """The expected number is the mean over cuts of the concatenated documents at every offset."""
    lengths = np.array([3, 17, 40, 8, 1])
    S = 8
    ends = lengths.cumsum()
    beginnings = np.repeat(ends - lengths, lengths)  # the beginning of each token's document
    places = np.arange(lengths.sum())
    lost = [int((beginnings < (places + offset) // S * S - offset).sum()) for offset in range(S)]
    found = truncation(lengths, S)
    assert found["longer_documents"] == 2 and found["unavoidable_tokens"] == 9 + 32
    assert found["expected_tokens"] == round(np.mean(lost)) and found["expected_share"] == pytest.approx(
        np.mean(lost) / lengths.sum()
    )


def test_check_names_the_first_id_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedWriter(tmp_path / "d", np.dtype("<u2")) as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 700, 5, 800])
    assert run("check", tmp_path / "d") == 0
    assert "800" in capsys.readouterr().out
    assert run("check", tmp_path / "d", "--vocab-size", 257) == 1
    assert (
        f"{tmp_path}/d: document 1, token 1 is 700, which is outside the vocabulary of 257" in capsys.readouterr().out
    )
    assert run("check", tmp_path / "d", "--vocab-size", 801, "--json") == 0
    (scan,) = json.loads(capsys.readouterr().out)
    assert (scan["largest_id"], scan["smallest_id"], scan["outside"]) == (800, 1, None)
    negative = IndexedWriter(tmp_path / "n", np.dtype("<i4"))
    with negative as writer:
        writer.add_document([1, -3])
    assert run("check", tmp_path / "n") == 1
    assert f"{tmp_path}/n: document 0, token 1 is -3" in capsys.readouterr().out


def test_the_largest_id_is_recorded_by_every_maker(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("tokenize", corpus / "in", "--output", corpus / "t", "--tokenizer", "bytes", "--workers", 1)
    np.array([3, 200, 256], np.uint16).tofile(corpus / "raw.bin")
    run("import", corpus / "raw.bin", "--output", corpus / "i", "--tokenizer", "bytes", "--dtype", "uint16")
    capsys.readouterr()
    for name in ("t", "i"):
        meta = read_meta(corpus / name)
        assert meta is not None and meta.largest_id == 256 == IndexedDataset(corpus / name).tokens.max()
