"""The real client uploads an export to a local server that imitates the Hub. Faults are refused before anything is
written.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.errors import CheckpointError
from frontier_llm.interop.huggingface import HubRepository
from tests.unit.checkpoint.serial import Run
from tests.unit.checkpoint.test_damage import flip

hub = pytest.importorskip("huggingface_hub")


class _Hub(BaseHTTPRequestHandler):
    """Accepts every repository and every file of a commit."""

    files: dict[str, bytes]
    created: list[dict[str, object]]
    refuses = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self._answer({"url": f"{self.server.server_name}/me/model"}, 401 if self.refuses else 200)
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            self._answer({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        elif "/commit/" not in self.path:
            self._answer({})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(
                {
                    "success": True,
                    "commitOid": "0" * 40,
                    "commitUrl": "https://huggingface.co/me/model/commit/0",
                    "hookOutput": "",
                }
            )

    def do_GET(self) -> None:
        self._answer({"id": "me/model", "siblings": [], "sha": "0" * 40}, 404 if self.refuses else 200)

    def _answer(self, content: object, code: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Write no log lines."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Hub]]:
    handler = type("Hub", (_Hub,), {"files": {}, "created": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        for name in ("huggingface_hub.constants.ENDPOINT", "huggingface_hub.hf_api.ENDPOINT"):
            monkeypatch.setattr(name, f"http://127.0.0.1:{served.server_port}", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False, raising=False)
        monkeypatch.setenv("HF_TOKEN", "hf_not_a_real_one")
        yield handler
        served.shutdown()


def test_every_file_of_an_export_arrives(server: type[_Hub], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("# a model")
    assert HubRepository("me/model", private=True).upload(tmp_path).endswith("/commit/0")
    assert server.files == {"config.json": b"{}", "README.md": b"# a model"}
    assert server.created[0]["name"] == "model" and "private" in json.dumps(server.created[0])


def test_a_refusal_comes_before_the_export(
    server: type[_Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuses = True
    with pytest.raises(CheckpointError, match=r"(?s)me/model.*HF_TOKEN"):
        HubRepository("me/model")
    run = Run(tmp_path / "run")
    run.save(1)
    flip(run.checkpoints.directory / "step_00000001" / "shard_00000.safetensors", 100_000)
    out = tmp_path / "out"
    words = ["checkpoint", "export-hf", str(tmp_path / "run"), str(out), "--tokenizer", "none", "--push-to-hub"]
    assert main([*words, "not a name"]) == 2
    assert "not a name" in capsys.readouterr().err and not out.exists()
    server.refuses = False
    server.created.clear()
    out.mkdir()
    (out / "file").write_text("")
    assert main([*words, "me/model"]) == 2
    assert f"{out}: is not empty" in capsys.readouterr().err  # although the checkpoint is damaged
    assert server.created == []
    (out / "file").unlink()
    assert main([*words, "me/model"]) == 2
    assert "shard_00000.safetensors" in capsys.readouterr().err and len(server.created) == 1
