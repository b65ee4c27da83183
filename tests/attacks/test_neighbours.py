"""Tests attacks on a running job by other users of a node or of the network.

A process with another uid tries to join, to read, or to open the port first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from frontier_llm.comm import Meeting, handshake, host_memory
from frontier_llm.comm.authenticated_store import connect_across, send_parts
from frontier_llm.comm.handshake import GREETING, give_proof
from frontier_llm.comm.rendezvous import forget_stores, join_store, store_address
from frontier_llm.errors import FrontierError
from frontier_llm.run import job_secret
from frontier_llm.run.job_secret import JobSecret, private_folder
from frontier_llm.run.launchers import RankEnv, free_port

NOBODY = 65534
SECRET = os.urandom(32)
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="playing another user takes root")


def as_another_user(attack: Callable[[], str]) -> str:
    """Return the result of `attack`, or its exception, in a process with another uid."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, attack().encode()[:4000])
        except BaseException as error:
            os.write(writing, repr(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    """A job of two nodes with comm.store=authenticated. Rank 0 is this process."""
    meeting = Meeting("127.0.0.1", free_port(), 0, 1, lambda: SECRET, "authenticated")
    join_store(0, 2, meeting, 5.0).set("step", "1")
    yield meeting
    forget_stores()


def test_another_user_of_the_node_is_refused(meeting: Meeting, capfd: pytest.CaptureFixture[str]) -> None:
    def join() -> str:
        """Return the answers of all stores on the node, including this job's."""
        # every user can read /proc/net/unix
        names = {
            line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@frontier-llm-" in line
        }
        answers = b""
        for name in names:
            with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(ConnectionError):
                connection.connect(f"\0{name[1:]}")
                send_parts(connection, b"check", b"step")
                answers += connection.recv(100)
        return f"{len(names) > 0} {answers!r}"

    assert as_another_user(join) == "True b''"
    _until(
        capfd,
        r"refused an unauthenticated connection to the rendezvous of this node from this node: "
        rf"process \d+ belongs to another user \(uid {NOBODY}\)",
    )


def _torch_client(meeting: Meeting) -> str:
    store = dist.TCPStore(
        meeting.address, meeting.port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False
    )
    return f"joined: {store.num_keys()}"


def _guessed(meeting: Meeting) -> str:
    return f"joined: {connect_across(meeting.address, meeting.port, b'guessed')}"


def _replayed(meeting: Meeting) -> str:
    """Send the answer of a rank to an earlier challenge. The server must refuse it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as false_server,
        socket.create_connection(false_server.getsockname()) as rank,
    ):
        pretended, _ = false_server.accept()
        pretended.sendall(GREETING + b"c" * 32)
        with patch.object(handshake, "HANDSHAKE_S", 0.2):
            try:
                give_proof(rank, SECRET)
            except OSError:
                recorded = pretended.recv(1000)
    with socket.create_connection((meeting.address, meeting.port)) as connection:
        connection.sendall(recorded)
        connection.settimeout(5.0)
        said = b""
        while piece := connection.recv(1000):
            said += piece
        return "refused" if len(said) == len(GREETING) + 32 else f"joined: {said!r}"


def _without_greeting(meeting: Meeting) -> str:
    with socket.create_connection((meeting.address, meeting.port)) as connection:
        send_parts(connection, b"set", b"step", b"2")
        connection.settimeout(5.0)
        while piece := connection.recv(1000):
            assert piece[: len(GREETING)] == GREETING
        return "refused"


@pytest.mark.parametrize(
    ("attack", "why"),
    [(_torch_client, "protocol"), (_guessed, "secret"), (_replayed, "secret"), (_without_greeting, "protocol")],
    ids=["torch's client", "a guess", "a replay", "no greeting"],
)
def test_strangers_of_the_network_are_refused(
    attack: Callable[[Meeting], str], why: str, meeting: Meeting, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "joined" not in as_another_user(functools.partial(attack, meeting))
    _until(capfd, rf"refused an unauthenticated connection to the rendezvous from 127\.0\.0\.1:\d+: .*{why}")
    rank = join_store(1, 2, replace(meeting, first=1), 5.0)
    assert rank.get("step") == b"1"


def test_one_that_says_nothing_holds_up_nobody(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 3.0)
    silent = [socket.create_connection((meeting.address, meeting.port)) for _ in range(50)]
    # If the server handled connections one after the other, the idle peers would take 150 s.
    rank = join_store(1, 2, replace(meeting, first=1), 60.0)
    assert rank.get("step") == b"1"
    _until(capfd, "the peer sent nothing; further ones are refused without a message")
    for connection in silent:
        connection.close()


def test_one_that_speaks_slowly_gets_no_more_time(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    with (
        socket.create_connection((meeting.address, meeting.port)) as drip,
        pytest.raises((ConnectionResetError, BrokenPipeError)),
    ):
        for byte in GREETING:
            drip.send(bytes([byte]))
            time.sleep(0.1)


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    """Another process took the port before rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        entrance = handshake.Handshake(
            taken, lambda peer: handshake.require_proof(peer, b"the neighbour's own"), lambda peer: None, "a test"
        )
        with pytest.raises(dist.DistStoreError, match=r"cannot connect to the job's store within 0\.3 s"):
            join_store(1, 2, Meeting("127.0.0.1", port, 1, 1, lambda: SECRET, "authenticated"), 0.3)
        entrance.close()
    forget_stores()


def test_torch_s_store_has_no_authentication_and_what_still_holds_there(tmp_path: Path) -> None:
    """As docs/security.md states, a user of the node can read and change the store after finding the port.

    The store holds no secret.
    """
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)
    meeting = Meeting("127.0.0.1", free_port(), 0, 2, lambda: SECRET, folder=lambda: folder)
    try:
        join_store(0, 2, meeting, 60.0).set("step", "1")
        address = store_address()
        assert address is not None
        assert "PermissionError" in as_another_user(lambda: (folder / "store-port").read_text()), (
            "the port has to be searched for"
        )
        assert "joined" in as_another_user(lambda: _torch_client(replace(meeting, port=address[1])))
        store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
        values = [store.get(key) for key in store.list_keys()]
        assert len(values) >= 2 and not any(SECRET in value or SECRET.hex().encode() in value for value in values)
    finally:
        forget_stores()


def _until(capfd: pytest.CaptureFixture[str], line: str) -> None:
    """Wait until rank 0's log has a line that matches."""
    said = ""
    deadline_s = time.monotonic() + 60.0
    while not re.search(line, said):
        assert time.monotonic() < deadline_s, said
        time.sleep(0.02)
        said += capfd.readouterr().err


def _place(rank: int) -> RankEnv:
    return RankEnv(rank, 2, rank, 2, "n0", "n0", 23456, "torchrun")


def test_the_secret_that_rank_0_writes_is_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(job_secret.VARIABLE, raising=False)
    other = JobSecret(_place(1), tmp_path)
    with pytest.raises(FrontierError, match="cannot read the job's secret, which rank 0 writes"):
        other.wait(0.05)
    first = JobSecret(_place(0), tmp_path)
    (path,) = tmp_path.iterdir()
    assert other() == first() and len(first()) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "PermissionError" in as_another_user(lambda: path.read_text())
    stale = first()
    assert JobSecret(_place(0), tmp_path)() == other() != stale, "a new start, a new secret"
    path.chmod(0o644)
    with pytest.raises(FrontierError, match="belongs to another user or is accessible to others"):
        other.wait(0.05)
    path.chmod(0o600)
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(FrontierError, match="belongs to another user or is accessible to others"):
        other.wait(0.05)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to("elsewhere")
    with pytest.raises(FrontierError, match="symbolic links"):
        other.wait(0.05)
    first.forget()
    assert not path.exists() and tmp_path.exists()
    another = JobSecret(_place(0), tmp_path / "made")
    another.forget()
    assert not (tmp_path / "made").exists()
    with pytest.raises(FrontierError, match=r"cannot write the job's secret: File exists"):
        JobSecret(_place(0), tmp_path / "elsewhere")


def test_a_short_secret_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(job_secret.VARIABLE, "0" * 31)
    with pytest.raises(FrontierError, match="has 31 characters, at least 32"):
        JobSecret(_place(0), tmp_path)


def test_a_folder_that_somebody_else_made_first_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRONTIER_LLM_NODE_LOCAL", str(tmp_path))
    folder = private_folder(SECRET)
    assert private_folder(SECRET) == folder and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder(SECRET[::-1]) != folder
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(FrontierError, match="is not a private folder of this user"):
        private_folder(SECRET)
    shutil.rmtree(folder)
    folder.mkdir(mode=0o755)
    with pytest.raises(FrontierError, match="is not a private folder of this user"):
        private_folder(SECRET)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(FrontierError, match="is not a private folder of this user"):
        private_folder(SECRET)


def test_shared_memory_of_somebody_else_is_not_opened(tmp_path: Path) -> None:
    descriptor, path = host_memory.create_memory()
    os.close(host_memory.open_memory(path))
    os.fchmod(descriptor, 0o666)
    with pytest.raises(OSError, match="belongs to another user or is accessible to other users"):
        host_memory.open_memory(path)
    os.fchmod(descriptor, 0o600)
    os.fchown(descriptor, NOBODY, NOBODY)
    with pytest.raises(OSError, match="belongs to another user or is accessible to other users"):
        host_memory.open_memory(path)
    os.close(descriptor)
    (tmp_path / "victim").write_text("mine")
    with (tmp_path / "victim").open() as victim:
        for other in (
            f"/proc/{os.getpid()}/fd/{victim.fileno()}",
            str(tmp_path / "victim"),
            "/proc/self/fd/0",
            f"{path}/../../mem",
            "",
        ):
            with pytest.raises(OSError, match="not a shared-memory region"):
                host_memory.open_memory(other)
