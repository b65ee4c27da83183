"""A tokenizer by its name on the Hub. The real client fetches it from a local server that imitates the Hub, and later
from its cache.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from frontier_llm.data.hub import tokenizer_directory
from frontier_llm.data.inspect import inspect
from frontier_llm.data.remote import UnreachableError
from frontier_llm.data.tokenize import tokenize
from frontier_llm.data.tokenizer import load_tokenizer, train_huggingface
from frontier_llm.errors import DataError

hub = pytest.importorskip("huggingface_hub")
COMMIT = "c0ffee" + "0" * 34


class _Hub(BaseHTTPRequestHandler):
    """Serves one repository with these files."""

    files: dict[str, bytes]
    claimed_bytes: int | None = None

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        siblings = [{"rfilename": name, "size": self.claimed_bytes or len(data)} for name, data in self.files.items()]
        about = json.dumps({"id": "me/tok", "sha": COMMIT, "siblings": siblings}).encode()
        data = about if path.startswith("/api/models/me/tok") else self.files.get(path.rpartition("/")[2])
        self.send_response(200 if data is not None else 404)
        self.send_header("Content-Length", str(len(data or b"")))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{abs(hash(data)):x}"')
        self.end_headers()
        if body and data:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Write no log lines."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[_Hub]]:
    made = train_huggingface(["some text, and some more text"] * 5, tmp_path / "tokenizer.json", 300)
    config = {"eos_token": made.eod_name}
    files = {
        "tokenizer.json": (tmp_path / "tokenizer.json").read_bytes(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    handler = type("Hub", (_Hub,), {"files": files | {"model.safetensors": b"weights"}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        address = f"http://127.0.0.1:{served.server_port}"
        for name in ("huggingface_hub.constants.ENDPOINT", "huggingface_hub.hf_api.ENDPOINT"):
            monkeypatch.setattr(name, address, raising=False)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield handler
        served.shutdown()


def test_it_is_fetched_once_and_then_needs_no_network(
    server: type[_Hub],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a.txt").write_text("some text")
    meta = tokenize([tmp_path / "a.txt"], tmp_path / "out", "hf://me/tok", workers=1)
    local = load_tokenizer(tmp_path / "tokenizer.json")
    assert (meta.tokenizer, meta.tokenizer_digest, meta.eod) == ("hf://me/tok", local.digest, local.eod)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    server.files.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load_tokenizer("hf://me/tok").digest == load_tokenizer(f"hf://me/tok@{COMMIT}").digest == local.digest
    assert inspect(str(tmp_path / "out"))["samples"][0]["text"] == "some text"
    with pytest.raises(UnreachableError, match=r"(?s)hf://me/other.*HF_HOME"):
        load_tokenizer("hf://me/other")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "another machine"))
    # a name from a dataset's record is not looked up on the Hub
    assert inspect(str(tmp_path / "out"))["samples"][0]["text"] is None


def test_what_is_no_tokenizer_is_not_fetched(server: type[_Hub]) -> None:
    server.claimed_bytes = 1 << 40
    with pytest.raises(DataError, match="for a tokenizer"):
        tokenizer_directory("hf://me/tok")
    server.claimed_bytes = None
    server.files = {"model.safetensors": b"weights"}
    with pytest.raises(DataError, match="has none of"):
        tokenizer_directory("hf://me/tok")
