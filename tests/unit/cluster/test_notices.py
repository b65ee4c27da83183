"""Tests notices of a run's events, which are sent to a command or a server. The receiver works, fails, hangs, or does
not exist.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from frontier_llm.cluster.notices import WEBHOOK_VARIABLE, Notifier, Watch, webhook_address
from frontier_llm.errors import FrontierError
from frontier_llm.run import run_dir
from frontier_llm.run.job import Job

SECRET = "hook-5ecret"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job without notices."""
    monkeypatch.delenv(WEBHOOK_VARIABLE, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return Job(run_dir=str(tmp_path), words=("run.yaml",), site="local", nodes=1, warning_s=60.0)


@contextmanager
def server(status: int | None) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """A server on this machine. It answers every request with `status`, or never (None). Yield (address, contents)."""
    contents: list[dict[str, object]] = []
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            contents.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if status is None:
                ended.wait()
                return
            self.send_response(status)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.daemon_threads = True
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{web.server_port}/{SECRET}", contents
    finally:
        ended.set()
        web.shutdown()
        web.server_close()


def private_file(path: Path, address: str) -> str:
    path.write_text(address + "\n")
    path.chmod(0o600)
    return str(path)


def test_a_webhook_receives_the_event(job: Job, tmp_path: Path) -> None:
    with server(200) as (address, contents):
        job = replace(job, webhook_file=private_file(tmp_path / "hook", address))
        notifier = Notifier(job, "77")
        notifier.send("given up", "three attempts ended at step 5", 5)
        notifier.close()
    (content,) = contents
    assert content["text"] == "given up: three attempts ended at step 5"
    assert (content["event"], content["job_id"], content["step"]) == ("given up", "77", 5)


@pytest.mark.parametrize(("status", "message"), [(500, "the webhook answered 500"), (None, "")])
def test_a_server_that_fails_or_hangs_does_not_hold_the_supervisor(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], status: int | None, message: str
) -> None:
    """The server that hangs ends a request only after `close` has returned. Without its time limit, `close` would
    therefore never return.
    """
    with server(status) as (address, contents):
        monkeypatch.setenv(WEBHOOK_VARIABLE, address)
        notifier = Notifier(job, "77", limit_s=60.0 if status else 0.5)
        notifier.send("end", "finished", 9)
        notifier.close()
        assert len(contents) <= 1
    error = capfd.readouterr().err
    assert message in error and SECRET not in error


@pytest.mark.parametrize("address", ["http://no-such-host.invalid/", "http://127.0.0.1:1/"])
def test_a_host_that_does_not_exist_is_only_logged(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], address: str
) -> None:
    monkeypatch.setenv(WEBHOOK_VARIABLE, address + SECRET)
    notifier = Notifier(job, "77")
    notifier.send("end", "finished", 9)
    notifier.close()
    error = capfd.readouterr().err
    assert "the webhook does not answer" in error and SECRET not in error


@pytest.mark.parametrize(
    ("mode", "content", "message"),
    [(0o640, "https://a.b/c", "has mode 0640"), (0o600, "a.b/c", "contains no address"), (None, "", "cannot be read")],
)
def test_a_file_that_others_can_read_is_refused_without_its_content(
    job: Job, tmp_path: Path, mode: int | None, content: str, message: str
) -> None:
    path = tmp_path / "hook"
    if mode is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(FrontierError, match=message) as caught:
        webhook_address(replace(job, webhook_file=str(path)))
    assert "a.b/c" not in str(caught.value)


def test_a_command_receives_event_and_text_without_a_shell(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "tell"
    script.write_text(f'#!/bin/bash\nprintf "%s|" "$@" "$FRONTIER_LLM_NOTICE_STEP" > {tmp_path}/told\n')
    script.chmod(0o755)
    notifier = Notifier(replace(job, notice_command=(str(script), "to me")), "77")
    notifier.send("node lost", "n3; $(touch /tmp/x) failed", 12)
    notifier.close()
    assert (tmp_path / "told").read_text() == "to me|node lost|n3; $(touch /tmp/x) failed|12|"


def test_a_command_that_hangs_is_ended_with_its_children(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "hang"
    script.write_text(f"#!/bin/bash\nsleep 600 &\necho $! > {tmp_path}/child\nwait\n")
    script.chmod(0o755)
    notifier = Notifier(replace(job, notice_command=(str(script),)), "77", limit_s=1e9)
    notifier.send("end", "finished", 9)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    notifier._limit_s = 0.0
    notifier.close()
    assert capfd.readouterr().err.count(f"the notice command {script} was ended after 0 s") == 1
    child = int((tmp_path / "child").read_text())
    while os.path.exists(f"/proc/{child}") and "Z" not in Path(f"/proc/{child}/stat").read_text().split(")")[1]:
        time.sleep(0.01)  # if the child is still alive, the test hangs here


def test_a_missing_command_is_only_logged(job: Job, capfd: pytest.CaptureFixture[str]) -> None:
    notifier = Notifier(replace(job, notice_command=("/no/such/program",)), "77")
    notifier.send("end", "finished", 9)
    notifier.close()
    assert "the notice command /no/such/program does not start" in capfd.readouterr().err


def test_rewinds_and_stragglers_are_reported_while_the_ranks_run(job: Job, tmp_path: Path) -> None:
    sent: list[tuple[str, str, int]] = []
    notifier = Notifier(job, "77")
    notifier.send = lambda event, text, step: sent.append((event, text, step))  # type: ignore[method-assign]
    lines = tmp_path / "metrics.jsonl"
    run_dir.append_line(lines, {"kind": "rewind", "step": 1})  # this line is of an earlier start
    with Watch(notifier, tmp_path, poll_s=10.0):
        run_dir.append_line(lines, {"kind": "straggler", "step": 7, "host": "n5", "slowdown": 1.5})
        run_dir.append_line(lines, {"kind": "step", "step": 8, "loss": 1.0})
        run_dir.append_line(lines, {"kind": "rewind", "step": 4})
        with lines.open("a") as file:
            file.write('not JSON\n{"kind": "rewind", "st')
    assert sent == [
        ("straggler", "n5 is 1.5 times slower at step 7", 7),
        ("rewind", "the run returned to step 4", 4),
    ]
