"""Text and tokens from object stores, servers and named datasets: the same dataset as from a disk, the same bounds, and
no stored secrets.
"""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from frontier_llm.cli.main import main
from frontier_llm.config.urls import without_secrets
from frontier_llm.data.documents import Damage, read
from frontier_llm.data.importing import import_tokens
from frontier_llm.data.inputs import cut, find_inputs
from frontier_llm.data.meta import read_meta
from frontier_llm.data.remote import UnreachableError, reason_of
from frontier_llm.data.tokenize import TokenizeOptions, tokenize
from frontier_llm.errors import DataError, FrontierError

fsspec = pytest.importorskip("fsspec")
SMALL = TokenizeOptions(shard_bytes=2000)
SHARDS = Path(__file__).parent / "mds_shards"
LINES = "".join(json.dumps({"text": f"document {n} " * (n % 7 + 1)}) + "\n" for n in range(200)).encode()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write one file of each kind."""
    directory = tmp_path / "corpus"
    directory.mkdir()
    (directory / "a.jsonl").write_bytes(LINES)
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(50)]}), directory / "c.parquet", row_group_size=20)
    (directory / "d.txt").write_text("a text\n")
    (directory / "shard.00000.mds").write_bytes((SHARDS / "text-None" / "shard.00000.mds").read_bytes())
    (directory / "index.json").write_text("{}")
    return directory


@pytest.fixture
def bucket(corpus: Path) -> Iterator[str]:
    files = fsspec.filesystem("memory")
    for path in corpus.iterdir():
        files.pipe(f"/bucket/{path.name}", path.read_bytes())
    yield "memory://bucket"
    files.rm("/bucket", recursive=True)


class _Server(BaseHTTPRequestHandler):
    """Serves files and parts of files, until `lives` requests for content have come."""

    files: dict[str, bytes]
    lives = 1 << 30

    def do_HEAD(self) -> None:
        self._answer(self.path.partition("?")[0], body=False)

    def do_GET(self) -> None:
        type(self).lives -= 1
        self._answer(self.path.partition("?")[0], body=True)

    def _answer(self, path: str, body: bool) -> None:
        data = self.files.get(path)
        if data is None or self.lives < 0:
            self.send_error(404 if data is None else 503)
            return
        part = self.headers.get("Range", "").removeprefix("bytes=").split("-")
        first, last = (int(part[0]), int(part[1] or len(data) - 1)) if len(part) == 2 else (0, len(data) - 1)
        self.send_response(206 if len(part) == 2 else 200)
        self.send_header("Content-Length", str(len(data[first : last + 1])))
        if len(part) == 2:
            self.send_header("Content-Range", f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}")
        self.send_header("ETag", f'"{hash(data)}"')
        self.end_headers()
        if body:
            self.wfile.write(data[first : last + 1])

    def log_message(self, *_: object) -> None:
        """Write no log lines."""


@pytest.fixture
def server() -> Iterator[tuple[str, type[_Server]]]:
    handler = type("Server", (_Server,), {"files": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{served.server_port}", handler
        served.shutdown()


def content(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx")]


def test_a_bucket_gives_what_a_directory_gives(corpus: Path, bucket: str, tmp_path: Path) -> None:
    tokenize([corpus], tmp_path / "here", "bytes", SMALL, workers=1)
    tokenize([bucket], tmp_path / "there", "bytes", SMALL, workers=1)
    # a file:// URL, read by two worker processes
    tokenize([corpus.as_uri()], tmp_path / "two", "bytes", SMALL, workers=2)
    assert content(tmp_path / "here") == content(tmp_path / "there") == content(tmp_path / "two")
    assert [file.name for file in find_inputs([f"{bucket}/*.jsonl*"])] == ["a.jsonl", "b.jsonl.gz"]


def test_a_changed_object_is_noticed(bucket: str, tmp_path: Path) -> None:
    first = tokenize([f"{bucket}/a.jsonl"], tmp_path / "out", "bytes", SMALL, workers=1)
    assert tokenize([f"{bucket}/a.jsonl"], tmp_path / "out", "bytes", SMALL, workers=1) == first
    fsspec.filesystem("memory").pipe("/bucket/a.jsonl", LINES.replace(b"document", b"DOCUMENT"))  # other content
    with pytest.raises(DataError, match="made from other inputs"):
        tokenize([f"{bucket}/a.jsonl"], tmp_path / "out", "bytes", SMALL, workers=1)


def test_a_lost_connection_is_no_damage_and_costs_only_unfinished_parts(
    server: tuple[str, type[_Server]], tmp_path: Path
) -> None:
    address, handler = server
    handler.files["/a.jsonl"] = LINES
    skipping = TokenizeOptions(shard_bytes=2000, skip_damaged=True)
    handler.lives = 3
    with pytest.raises(UnreachableError, match=r"(?s)a\.jsonl.*finished parts are kept"):
        tokenize([f"http://{address}/a.jsonl"], tmp_path / "out", "bytes", skipping, workers=1)
    finished = len(list(tmp_path.glob("out.parts-*/*.json")))
    assert finished
    handler.lives = 1 << 30
    assert tokenize([f"http://{address}/a.jsonl"], tmp_path / "out", "bytes", skipping, workers=1).documents == 200


def test_what_lets_somebody_in_is_used_and_kept_nowhere(
    server: tuple[str, type[_Server]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, handler = server
    handler.files["/a.jsonl"] = LINES + b"no json\n"
    url = f"http://me:HUSH@{address}/a.jsonl?sig=HUSH"
    output = str(tmp_path / "out")
    assert main(["data", "tokenize", url, "--tokenizer", "bytes", "--output", output, "--workers", "1"]) == 2
    assert (
        main(["data", "tokenize", url, "--tokenizer", "bytes", "--output", output, "--workers", "1", "--skip-damaged"])
        == 0
    )
    assert (
        main(
            ["data", "tokenize", f"http://me:HUSH@{address}/b.txt?sig=HUSH", "--tokenizer", "bytes", "--output", output]
        )
        == 2
    )
    told = capsys.readouterr()
    assert "HUSH" not in told.err + told.out and f"{address}/a.jsonl:201" in told.err.replace("\n", "")
    meta = read_meta(output)
    assert meta is not None and meta.damaged_examples[0].startswith(f"http://{address}/a.jsonl:201: is not JSON")
    assert not any(b"HUSH" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    # a new signature in the URL gives the same plan
    assert (
        main(
            [
                "data",
                "tokenize",
                url.replace("sig=HUSH", "sig=2"),
                "--tokenizer",
                "bytes",
                "--output",
                output,
                "--skip-damaged",
            ]
        )
        == 0
    )


def test_a_clients_reason_is_one_line_without_secrets_and_never_nothing() -> None:
    assert reason_of(OSError("403, url='https://a:b@c.org/d?e=2'\nand more")) == "403, url='https://c.org/d'"
    assert reason_of(ValueError()) == "ValueError()"


def test_secrets_are_cut_out_of_addresses_alone() -> None:
    assert (
        without_secrets("403, url='https://a:b@c.org/d?X-Sig=1&e=2', why? so") == "403, url='https://c.org/d', why? so"
    )
    assert (
        without_secrets("hf://datasets/me/it@main/a.json, hf://gpt2@main")
        == "hf://datasets/me/it@main/a.json, hf://gpt2@main"
    )


def test_bounds_hold_for_what_lies_elsewhere() -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/bombs/a.jsonl.gz", gzip.compress(b'{"text": "' + b"x" * (1 << 20) + b'"}\n'))
    files.pipe("/bombs/shard.00000.mds.gz", gzip.compress(bytes(1 << 20)))
    pieces = [piece for file in find_inputs(["memory://bombs"]) for piece in cut(file, "file", 1 << 20)]
    items = [item for piece in pieces for item in read(piece, max_bytes=1 << 19)]
    assert len(items) == 2 and all(isinstance(item, Damage) and "--max-mib" in item.why for item in items)
    with pytest.raises(FrontierError, match="chain of URLs"):
        find_inputs(["zip://a.txt::memory://bombs/a.zip"])


def test_tokens_elsewhere(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    raw = tmp_path / "raw.bin"
    raw.write_bytes(bytes([7, 0, 0, 1] * 1000))
    for path in [*(SHARDS / "tok-zstd").iterdir(), raw]:
        files.pipe(f"/tokens/{path.name}", path.read_bytes())
    for number, (here, there, dtype) in enumerate([(SHARDS / "tok-zstd", "shard*", None), (raw, "raw.bin", "uint16")]):
        import_tokens([here], tmp_path / f"here{number}", "bytes", dtype)
        import_tokens([f"memory://tokens/{there}"], tmp_path / f"there{number}", "bytes", dtype)
        assert content(tmp_path / f"here{number}") == content(tmp_path / f"there{number}")
    with pytest.raises(DataError, match="no header"):
        import_tokens(["memory://tokens/raw.bin"], tmp_path / "n", "bytes")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, url in [
        ("s3fs", "s3://bucket/a.jsonl"),
        ("gcsfs", "gs://bucket/a.jsonl"),
        ("datasets", "dataset://me/it"),
    ]:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(FrontierError, match=f"pip install {package}"):
            find_inputs([url])
    with pytest.raises(FrontierError, match="known: s3"):
        find_inputs(["nothing://a"])


@pytest.mark.thorough  # importing datasets takes seconds
def test_a_dataset_by_name(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train-0.jsonl").write_bytes(LINES)
    (folder / "test.jsonl").write_bytes(LINES[:1000].rpartition(b"\n")[0])
    tokenize([folder / "train-0.jsonl"], tmp_path / "here", "bytes", SMALL, workers=1)
    tokenize([f"dataset://{folder}"], tmp_path / "there", "bytes", SMALL, workers=1)
    assert content(tmp_path / "here") == content(tmp_path / "there")
    assert [file.name for file in find_inputs([f"dataset://{folder}?split=test"])] == ["test.jsonl"]
    for query, why in [
        ("split=tests", "did you mean 'test'"),
        ("subset=en", "another subset"),
        ("name=en", "unknown parameter"),
    ]:
        with pytest.raises(DataError, match=why):
            find_inputs([f"dataset://{folder}?{query}"])
    others = tmp_path / "others"
    others.mkdir()
    (others / "train.csv").write_text("text\nwords\n")
    for query, separator in [("", "?"), ("?split=train", "&")]:
        url = f"dataset://{others}{query}"
        with pytest.raises(DataError) as caught:
            find_inputs([url])
        assert f"try {url}{separator}revision=refs/convert/parquet" in str(caught.value)
