"""Imported tokens: packed samples are cut at the ends of documents, and ids outside the vocabulary are named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from frontier_llm.cli.main import main
from frontier_llm.data import importing
from frontier_llm.data.destination import sole_maker
from frontier_llm.data.importing import import_tokens
from frontier_llm.data.indexed import IndexedDataset, idx_path
from frontier_llm.data.meta import read_meta
from frontier_llm.errors import DataError
from tests.harness.system import full_disk

EOD = 256  # end-of-document id of the tokenizer `bytes`
SHARDS = Path(__file__).parent / "mds_shards"


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(number).tolist() for number in range(dataset.document_count)]


@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_documents_end_at_eod_across_blocks_and_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block: int,
) -> None:
    monkeypatch.setattr(importing, "BLOCK_TOKENS", block)
    np.array([1, 2, EOD, EOD, 3, 4], "<u2").tofile(tmp_path / "part-0.npy")  # OLMo's format has no header
    np.array([5, EOD, 6], "<u2").tofile(tmp_path / "part-1.npy")
    meta = import_tokens([tmp_path], tmp_path / "out", "bytes", "uint16")
    assert documents(tmp_path / "out") == [[1, 2, EOD], [EOD], [3, 4, 5, EOD], [6]]
    assert (meta.documents, meta.tokens, meta.text_bytes) == (4, 9, 0)
    assert read_meta(tmp_path / "out") == meta
    assert import_tokens([tmp_path], tmp_path / "out", "bytes", "uint16") == meta  # out.bin is no input
    with pytest.raises(DataError, match=r"a \.bin with an \.idx is already a dataset"):
        import_tokens([tmp_path / "out.bin"], tmp_path / "other", "bytes", "uint16")


def test_a_numpy_file_knows_its_type(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[7, EOD], [8, EOD]], np.uint32))
    import_tokens([tmp_path / "a.npy"], tmp_path / "out", "bytes")
    assert documents(tmp_path / "out") == [[7, EOD], [8, EOD]]
    np.save(tmp_path / "b.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        import_tokens([tmp_path / "b.npy"], tmp_path / "out2", "bytes")


def test_mds_tokens(tmp_path: Path) -> None:
    import_tokens([SHARDS / "tok-zstd"], tmp_path / "out", "bytes")
    assert IndexedDataset(tmp_path / "out").token_count == 40 * 50
    import_tokens([SHARDS / "bytes"], tmp_path / "legacy", "bytes")
    assert IndexedDataset(tmp_path / "legacy").tokens.tolist() == [
        i for start in range(5) for i in range(start, start + 50)
    ]


def test_refusals(tmp_path: Path) -> None:
    np.array([1, 2, 3, 400], "<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"a\.bin: token 3 has the id 400, but the vocabulary has 257"):
        import_tokens([tmp_path / "a.bin"], tmp_path / "out", "bytes", "uint16")
    with pytest.raises(DataError, match="no header, so the type of its tokens is unknown"):
        import_tokens([tmp_path / "a.bin"], tmp_path / "out", "bytes")
    (tmp_path / "a.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="3 bytes is not a multiple of the size of a uint16"):
        import_tokens([tmp_path / "a.bin"], tmp_path / "out", "bytes", "uint16")
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(DataError, match="contain no tokens"):
        import_tokens([tmp_path / "a.bin"], tmp_path / "out", "bytes", "uint16")
    (tmp_path / "b.csv").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as error:
        import_tokens([tmp_path / "b.csv", tmp_path / "none.npy", tmp_path / "empty"], tmp_path / "out", "bytes")
    assert len(error.value.problems) == 3
    np.save(tmp_path / "f.npy", np.zeros(3))
    with pytest.raises(DataError, match="float64, not token ids"):
        import_tokens([tmp_path / "f.npy"], tmp_path / "out", "bytes")
    assert not list(tmp_path.glob("out*"))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.array([1, EOD], "<u2").tofile(tmp_path / "a.npy")
    words = [
        "data",
        "import",
        str(tmp_path / "a.npy"),
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        "bytes",
        "--dtype",
        "uint16",
    ]
    assert main(words) == 0
    assert "1 documents, 2 tokens" in capsys.readouterr().out


def test_what_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.array([7, 8, EOD] if name == "a" else [9, EOD], np.uint16))
    meta = import_tokens([tmp_path / "a.npy"], tmp_path / "out", "bytes")
    written = idx_path(tmp_path / "out").stat().st_mtime_ns
    assert (
        import_tokens([tmp_path / "a.npy"], tmp_path / "out", "bytes") == meta
        and idx_path(tmp_path / "out").stat().st_mtime_ns == written
    )
    command = ["data", "import", str(tmp_path / "b.npy"), "--output", str(tmp_path / "out"), "--tokenizer", "bytes"]
    with pytest.raises(DataError, match=r"made from other inputs.*(?s:.*)--overwrite"):
        import_tokens([tmp_path / "b.npy"], tmp_path / "out", "bytes")
    assert main(command) == 2 and documents(tmp_path / "out") == [[7, 8, EOD]]
    assert main([*command, "--overwrite"]) == 0 and documents(tmp_path / "out") == [[9, EOD]]


def test_a_second_at_once_is_refused_by_name(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([7, EOD], np.uint16))
    with (
        sole_maker(tmp_path / "out", "another digest", "no fix"),
        pytest.raises(DataError, match=rf"process {os.getpid()} on .* from other inputs"),
    ):
        import_tokens([tmp_path / "a.npy"], tmp_path / "out", "bytes")
    assert not idx_path(tmp_path / "out").exists()


@pytest.mark.parametrize("documents_of", [1, 100_000], ids=["many documents", "long documents"])
def test_a_full_disk_names_the_file_and_keeps_nothing(tmp_path: Path, documents_of: int) -> None:
    tokens = np.full(100_000, 7, np.uint16)
    tokens[documents_of - 1 :: documents_of] = EOD
    np.save(tmp_path / "a.npy", tokens)
    with full_disk(tmp_path / "small", room_kib=64, fill=False) as small:
        with pytest.raises(
            DataError,
            match=r"/small/out\.(bin|lengths|documents)\S*: cannot write: No space left on device(?s:.*)check space",
        ):
            import_tokens([tmp_path / "a.npy"], small / "out", "bytes")
        assert list(small.iterdir()) == []
