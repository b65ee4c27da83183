"""Inputs that are damaged on purpose, that unpack to more than their size, or that another process uses at the same
time.

The error names the file.
"""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from frontier_llm.data import samples
from frontier_llm.data.documents import Damage, Text, read
from frontier_llm.data.indexed import SCAN_LIMIT, IndexedDataset, idx_path
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.inputs import cut
from frontier_llm.data.inspect import inspect
from frontier_llm.data.mds import open_column
from frontier_llm.data.meta import read_meta
from frontier_llm.data.tokenize import TokenizeOptions, tokenize
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.errors import DataError, Problem

SHARDS = Path(__file__).parents[1] / "unit" / "data" / "mds_shards"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some words\n" * 10)
    (tmp_path / "b.txt").write_text("others\n" * 3)
    return tmp_path


def test_a_dataset_of_other_inputs_is_not_replaced_unless_asked_for(text: Path) -> None:
    first = tokenize([text / "a.txt"], text / "out", "bytes", workers=1)
    with pytest.raises(DataError, match=r"other inputs(?s:.*)--overwrite"):
        tokenize([text / "b.txt"], text / "out", "bytes", workers=1)
    assert IndexedDataset(text / "out").token_count == first.tokens
    assert tokenize([text / "a.txt"], text / "out", "bytes", workers=1) == first
    assert tokenize([text / "b.txt"], text / "out", "bytes", workers=1, overwrite=True).tokens == 22


def test_a_dataset_without_a_record_is_not_replaced(text: Path) -> None:
    tokenize([text / "a.txt"], text / "out", "bytes", workers=1)
    (text / "out.meta.json").unlink()
    with pytest.raises(DataError, match=r"--overwrite"):
        tokenize([text / "b.txt"], text / "out", "bytes", workers=1)


@pytest.mark.parametrize(("name", "says"), [("a.txt", "from the same inputs"), ("b.txt", "from other inputs")])
def test_two_at_once_on_one_prefix(text: Path, name: str, says: str) -> None:
    slow = (
        "import sys, time\nfrom frontier_llm.data import tokenize as module\n"
        "module.make_part = lambda job: (print('begun', flush=True), time.sleep(600))\n"
        "module.tokenize([sys.argv[1]], sys.argv[2], 'bytes', workers=1)"
    )
    words = [sys.executable, "-c", slow, str(text / "a.txt"), str(text / "out")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "begun\n"
        try:
            with pytest.raises(
                DataError, match=rf"process {first.pid} on {socket.gethostname()} is writing it, {says}"
            ):
                tokenize([text / name], text / "out", "bytes", workers=1)
        finally:
            first.kill()
    tokenize([text / name], text / "out", "bytes", workers=1)  # the lock of a process that was killed does not block
    assert not list(text.glob("out.lock*"))


def test_a_missing_key_is_told_with_the_option_that_names_another(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    with pytest.raises(DataError, match=r"has no key 'text'(?s:.*)--text-key; valid: content"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", workers=1)


def test_one_deeply_nested_line_does_not_stop_a_corpus(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', '{"text": ' + "[" * 200_000 + "]" * 200_000 + "}", '{"\\ud800": 1}', '{"text": "b"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    meta = tokenize([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", TokenizeOptions(skip_damaged=True), workers=1)
    assert (meta.documents, meta.damaged) == (2, 2)
    with pytest.raises(DataError, match=r"a\.jsonl:2: is not JSON"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "other", "bytes", workers=1)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_line_beyond_the_bound_is_left_out_whole(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    content = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in ("a", "x" * 5000, "b"))
    path.write_bytes(gzip.compress(content) if ending else content)
    (piece,) = cut(path, "file", 1 << 20)
    first, damage, last = read(piece, max_bytes=1000)
    assert (first, last) == (Text("a"), Text("b"))
    assert (
        isinstance(damage, Damage)
        and damage.where == f"{path}:2"
        and "more than 1000 B" in damage.why
        and "--max-mib" in damage.why
    )
    assert len(list(read(piece, max_bytes=6000))) == 3


def test_a_packed_shard_is_not_unpacked_beyond_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "shard.00000.mds.gz"
    path.write_bytes(gzip.compress(bytes(300 << 20), 9))
    before = peak_bytes()
    with pytest.raises(DataError, match=r"more than 128\.0 MiB(?s:.*)--max-mib"):
        open_column(path, "text")
    assert peak_bytes() - before < 300 << 20


def peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_a_parquet_value_beyond_the_bound_is_left_out(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["short", "x" * 1001, "also"]}), tmp_path / "a.parquet")
    (piece,) = cut(tmp_path / "a.parquet", "file", 1 << 20)
    why = "has more than 1000 B; if the input is correct, give a larger --max-mib"
    assert list(read(piece, max_bytes=1000)) == [
        Text("short"),
        Damage(f"{tmp_path}/a.parquet row 1", why),
        Text("also"),
    ]


def damages(path: Path, max_bytes: int) -> list[str]:
    return [
        item.why
        for piece in cut(path, "file", 1 << 20)
        for item in read(piece, max_bytes=max_bytes)
        if isinstance(item, Damage)
    ]


def test_a_parquet_page_is_measured_before_it_is_decoded(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    texts = [f"{number}" * 1000 for number in range(2000)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), path, use_dictionary=False, compression="none", data_page_size=4 << 20
    )
    assert damages(path, 2 << 20) == []
    (why,) = damages(path, 1 << 19)
    assert "more than 4.0 MiB in a page" in why and "--max-mib" in why
    content = bytearray(path.read_bytes())
    before = peak_bytes()
    # Find the page header: the type "data page", then the page's size.
    field = next(at for at in range(100) if content[at : at + 3] == b"\x15\x00\x15") + 3
    assert content[field + 3] < 128 <= content[field + 2], "four bytes"
    content[field : field + 4] = b"\xfe\xff\xff\x7f"
    path.write_bytes(content)
    (why,) = damages(path, 2 << 20)
    assert "more than 16.0 MiB in a page" in why and peak_bytes() - before < 64 << 20
    content[field : field + 4] = b"\xff\xff\xff\x7f"  # a negative size
    path.write_bytes(content)
    (why,) = damages(path, 2 << 20)
    assert "has a damaged page at byte 4" in why


def test_one_long_value_said_often_is_not_held_often(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    before = peak_bytes()
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 500, pyarrow.int32()), ["x" * (1 << 20)])
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    (why,) = damages(path, 1 << 20)
    assert "has more than 8.0 MiB" in why and peak_bytes() - before < 100 << 20


def test_a_parquet_footer_that_no_file_has(tmp_path: Path) -> None:
    with (tmp_path / "a.parquet").open("wb") as file:
        file.truncate(100 << 20)  # a sparse file
        file.seek(0, 2)
        file.write((90 << 20).to_bytes(4, "little") + b"PAR1")
    (why,) = damages(tmp_path / "a.parquet", 1 << 20)
    assert "its footer has 94371840 bytes, more than the limit of 33554432" in why


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
def test_a_tokenizer_that_is_too_large_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with (tmp_path / name).open("wb") as handle:
        handle.truncate((256 << 20) + 1)  # a sparse file that uses no disk space
    with pytest.raises(DataError, match=f"{name}: has 256.0 MiB, more than the limit of 256.0 MiB"):
        load_tokenizer(tmp_path / name if name.endswith(".model") else tmp_path)


def test_a_record_that_is_too_large_is_not_read(text: Path) -> None:
    tokenize([text / "a.txt"], text / "out", "bytes", workers=1)
    with (text / "out.meta.json").open("wb") as handle:
        handle.truncate((16 << 20) + 1)
    with pytest.raises(DataError, match=r"more than the limit of 16\.0 MiB"):
        read_meta(text / "out")


def test_floats_are_no_tokens(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", "f4") as writer:
        writer.add_document(np.ones(3, np.float32))
    with pytest.raises(DataError, match="has values of type float32, not token ids"):
        inspect(str(tmp_path / "d"))


def test_document_indices_far_outside_end_in_an_error_not_in_a_crash(tmp_path: Path) -> None:
    """With a cached sample index the table is not scanned again, and its digest reads only 256 blocks of it."""
    with IndexedWriter(tmp_path / "some", "u2") as writer:
        for _ in range(1000):
            writer.add_document([5])
    with IndexedWriter(tmp_path / "d", "u2") as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4])
        for _ in range(SCAN_LIMIT // 1000 + 1):
            writer.append(IndexedDataset(tmp_path / "some", scan=False))
    stream = samples.DocumentSamples(IndexedDataset(tmp_path / "d"), 7, 1, cache_dir=tmp_path / "cache")
    stream.prepare(1)
    dataset = IndexedDataset(tmp_path / "d")
    assert not dataset.scanned
    at = 34 + 12 * dataset.sequence_count
    content = bytearray(idx_path(tmp_path / "d").read_bytes())
    indices = np.frombuffer(content, "<i8", offset=at)
    words = [sys.executable, "-c", FIRST_SAMPLE, str(tmp_path / "d"), str(next((tmp_path / "cache").glob("*.npy")))]
    for damage in (1 << 44, -(1 << 44)):
        indices[1:-1:2] = damage
        idx_path(tmp_path / "d").write_bytes(content)
        ended = subprocess.run(words, capture_output=True, text=True)
        assert ended.returncode == 1 and "DataError" in ended.stderr and "damaged" in ended.stderr, ended.stderr[-500:]


FIRST_SAMPLE = """
import sys
from pathlib import Path
import numpy as np
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.samples import DocumentSamples, EpochIndex
EpochIndex.path = lambda self, epoch: Path(sys.argv[2])
DocumentSamples(IndexedDataset(sys.argv[1]), 7, 1).fill(0, np.empty(8, np.int64))
"""


def test_reading_outside_the_file_is_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", "u2") as writer:
        writer.add_document([1, 2, 3])
    dataset = IndexedDataset(tmp_path / "d")
    for start, count in ((-1, 1), (0, -1), (1 << 62, 1), (2, 2)):
        with pytest.raises(DataError, match="expected"):
            dataset.read(start, count)


def test_control_characters_from_files_are_written_out() -> None:
    assert str(Problem("a\x1b[2J\x07", "holds \x9b31m and \u202e", "write \ud800")) == (
        "a\\x1b[2J\\x07: holds \\x9b31m and \\u202e\n    fix: write \\ud800"
    )


def test_a_log_line_and_an_inspection_hold_no_control_character(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from frontier_llm import log
    from frontier_llm.cli.main import main

    log.info("left out a\x1b]0;title\x07.txt")
    assert "\x1b" not in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("text \x1b[31m red \x07")
    tokenize([tmp_path / "a.txt"], tmp_path / "out", "bytes", workers=1)
    capsys.readouterr()
    assert main(["data", "inspect", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown and "\\x1b[31m red" in shown


@pytest.mark.parametrize(
    "content",
    [
        '{"format": ' + "[" * 200_000,
        '{"vocab_size": "many"}',
        '{"tokens": 1.5}',
        '{"damaged_examples": 3}',
        '{"format": 2}',
        '{"more": 1}',
    ],
)
def test_a_record_of_another_form_is_damage(text: Path, content: str) -> None:
    tokenize([text / "a.txt"], text / "out", "bytes", workers=1)
    record = json.loads((text / "out.meta.json").read_text())
    nested = content.endswith("[")
    (text / "out.meta.json").write_text(content if nested else json.dumps(record | json.loads(content)))
    with pytest.raises(DataError, match=r"out\.meta\.json: is damaged"):
        read_meta(text / "out")


def test_a_deeply_nested_task_or_tokenizer_file_is_named(tmp_path: Path) -> None:
    from frontier_llm.data.tokenizer import load_tokenizer, train_huggingface
    from frontier_llm.inference.tasks import read_task

    (tmp_path / "task.jsonl").write_text("[" * 200_000)
    with pytest.raises(DataError, match=r"task\.jsonl:1: is not JSON"):
        read_task("piqa", tmp_path / "task.jsonl")
    train_huggingface(["some text"], tmp_path / "tokenizer.json", 300)
    (tmp_path / "tokenizer_config.json").write_text("[" * 200_000)
    with pytest.raises(DataError, match=r"tokenizer_config\.json: is not a JSON"):
        load_tokenizer(tmp_path / "tokenizer.json")
