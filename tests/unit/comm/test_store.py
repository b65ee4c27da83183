"""Tests TCPStore in its own process: it outlives rank 0, ends with the last rank, and limits the time of each
request.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from frontier_llm.comm import Meeting, rendezvous
from frontier_llm.comm.heartbeat_store import HeartbeatStore
from frontier_llm.comm.rendezvous import forget_stores, join_store, limit_answer_time, open_store, store_address
from frontier_llm.comm.store_launch import SURVIVED
from frontier_llm.comm.store_process import raise_open_file_limit
from frontier_llm.errors import BackendError
from frontier_llm.run.launchers import free_port
from tests.harness.marks import thorough
from tests.harness.stopped import stop_process

SECRET = b"a secret of this job"
START_S = 60.0  # time limit for the start of a process that loads torch on a busy machine

# Rank 0 of two. It prints the process id of the store, then does the action that its argument names.
RANK_0 = """
import ctypes, sys, time
from frontier_llm.comm import Meeting, rendezvous
from frontier_llm.comm.heartbeat_store import HeartbeatStore
meeting = Meeting("127.0.0.1", int(sys.argv[1]), 0, 2, lambda: b"a secret of this job")
rendezvous.join_store(0, 2, meeting, 60.0)
heartbeat_store = HeartbeatStore(period_s=0.05)
heartbeat_store.post(0, {"at": 0})
print(rendezvous._starting[-1]._process.pid, flush=True)
if sys.argv[2] == "hold":
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # holds the interpreter lock until a byte arrives
    print("released", flush=True)
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def _left() -> Iterator[None]:
    yield
    forget_stores()


class Rank0:
    def __init__(self, what: str = "sleep") -> None:
        self.port = free_port()
        command = [sys.executable, "-c", RANK_0, str(self.port), what]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.say = self.process.stdin
        self.hear = self.process.stdout
        self.server = int(self.hear.readline())

    def joined_by_rank_1(self) -> dist.Store:
        return join_store(1, 2, Meeting("127.0.0.1", self.port, 0, 2, lambda: SECRET), START_S)


@pytest.fixture
def rank_0() -> Iterator[Callable[..., Rank0]]:
    made: list[Rank0] = []

    def make(what: str = "sleep") -> Rank0:
        made.append(Rank0(what))
        return made[-1]

    yield make
    for rank in made:
        rank.process.kill()
        rank.process.communicate()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ends(pid: int) -> bool:
    deadline_s = time.monotonic() + 30.0
    while is_running(pid):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def test_a_rank_0_that_is_stopped_or_killed_takes_nothing_from_the_others(rank_0: Callable[..., Rank0]) -> None:
    first = rank_0()
    store = first.joined_by_rank_1()
    stop_process(first.process.pid)
    store.set("while it is stopped", "1")
    assert open_store(START_S).get("while it is stopped") == b"1"
    first.process.kill()
    first.process.wait()
    store.set("when it is gone", "2")
    assert open_store(START_S).get("when it is gone") == b"2"
    assert HeartbeatStore().read(0) is not None, "its last heartbeat"
    del store
    forget_stores()
    assert ends(first.server), "nobody is connected any more"


def test_the_store_goes_on_while_rank_0_lives_and_ends_with_it(rank_0: Callable[..., Rank0]) -> None:
    first = rank_0()
    for number in SURVIVED:
        os.kill(first.server, number)  # launchers send these signals to each process of a job
    assert first.joined_by_rank_1().add("count", 1) == 1
    forget_stores()
    time.sleep(1.5)
    assert is_running(first.server)
    first.process.kill()
    assert ends(first.server)


def test_a_stranger_that_stays_connected_does_not_keep_the_process_for_ever() -> None:
    rank = "import sys; from frontier_llm.comm import store_launch as s, rendezvous as r; "
    rank += "listener = r._listen('127.0.0.1', 0); p = s.StoreProcess(listener, 8, 'token', longest_s=2.0); "
    rank += "print(p.wait_until_ready(60.0), p._process.pid, flush=True); sys.stdin.readline()"
    process = subprocess.Popen([sys.executable, "-c", rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port, server = map(int, process.stdout.readline().split())
    with socket.create_connection(("127.0.0.1", port)):
        process.communicate()
        assert ends(server)


def test_on_one_node_the_port_is_random_and_on_loopback(tmp_path: Path) -> None:
    seen = set()
    for _ in range(2):
        meeting = Meeting("127.0.0.1", free_port(), 0, 2, lambda: SECRET, folder=lambda: tmp_path)
        (tmp_path / "store-port").write_text("1")  # left by an earlier start
        join_store(0, 2, meeting, START_S)
        join_store(1, 2, meeting, START_S)
        address = store_address()
        assert address is not None and address[0] == "127.0.0.1" and address[1] != meeting.port
        table = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
        listening = {tuple(row.split()[1].split(":")) for row in table if row.split()[3] == "0A"}
        assert ("0100007F", f"{address[1]:04X}") in listening and ("00000000", f"{address[1]:04X}") not in listening
        seen.add(address[1])
        forget_stores()
    assert len(seen) == 2


def test_the_store_of_another_job_is_not_joined(rank_0: Callable[..., Rank0]) -> None:
    first = rank_0()
    with pytest.raises(dist.DistStoreError, match="the store at this address belongs to another job"):
        join_store(1, 2, Meeting("127.0.0.1", first.port, 0, 2, lambda: b"another job's"), 1.0)


def test_a_port_on_which_something_else_listens_ends_in_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        meeting = Meeting("127.0.0.1", silent.getsockname()[1], 0, 2, lambda: SECRET)
        with pytest.raises(
            dist.DistStoreError,
            match=r"cannot connect to the job's store within 1 s: .*does not respond as torch's TCPStore",
        ):
            join_store(1, 2, meeting, 1.0)
        with pytest.raises(OSError, match="Address already in use"):
            join_store(0, 2, meeting, 1.0)


def test_a_stopped_store_answers_with_a_time_out(rank_0: Callable[..., Rank0]) -> None:
    first = rank_0()
    store = first.joined_by_rank_1()
    with patch.object(rendezvous, "ANSWER_S", 1.0):
        limit_answer_time()
    stop_process(first.server)
    try:
        for question in (lambda: store.check(["key"]), lambda: store.add("count", 1)):
            with pytest.raises((dist.DistNetworkError, dist.DistStoreError), match="Socket Timeout"):
                question()
    finally:
        os.kill(first.server, signal.SIGKILL)


def test_the_limit_of_open_files_is_raised_or_refused_with_the_figure() -> None:
    with patch("resource.getrlimit", return_value=(1024, 4096)), patch("resource.setrlimit") as raised:
        assert raise_open_file_limit(2000) is None
        assert raised.call_args.args[1] == (3024, 4096)
        problem = raise_open_file_limit(150_000)
        assert problem is not None and "needs 151024 open files, but the hard limit is 4096" in problem


def test_rank_0_is_told_that_the_store_s_process_may_not_open_enough_files() -> None:
    rank = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000)); from frontier_llm.comm import "
        "Meeting, rendezvous; "
    )
    rank += f"rendezvous.join_store(0, 1000, Meeting('127.0.0.1', {free_port()}, 0, 1000), {START_S})"
    done = subprocess.run([sys.executable, "-c", rank], capture_output=True, text=True, check=False)
    assert (
        "BackendError: comm.store: the store needs 5024 open files, but the hard limit is 2000: it opens up to 4000 "
        "connections" in done.stderr
    )


def test_heartbeats_go_on_while_the_main_thread_holds_the_interpreter_lock(rank_0: Callable[..., Rank0]) -> None:
    first = rank_0("hold")
    first.joined_by_rank_1()
    heartbeat_store = HeartbeatStore()
    first_posts = posts_of_rank_0(heartbeat_store)
    while posts_of_rank_0(heartbeat_store) <= first_posts + 10:  # pytest's limit ends a wait that never ends
        time.sleep(0.1)
    first.say.write("release\n")
    first.say.flush()
    assert first.hear.readline() == "released\n"


def posts_of_rank_0(heartbeat_store: HeartbeatStore) -> int:
    """Return the number of heartbeats that rank 0 has sent."""
    heartbeat = heartbeat_store.read(0)
    assert heartbeat is not None and heartbeat["at"] == 0
    return int(heartbeat["posts"])


def test_without_the_library_heartbeats_come_from_python(capfd: pytest.CaptureFixture[str]) -> None:
    join_store(0, 1, Meeting("127.0.0.1", free_port(), 0, 1, lambda: SECRET), START_S)
    with patch(
        "frontier_llm.comm.heartbeat_store.Heartbeats", side_effect=BackendError("libheartbeat.so has not been built")
    ):
        heartbeat_store = HeartbeatStore()
        heartbeat_store.post(0, {"at": 1})
        heartbeat_store.post(0, {"at": 2})
    assert heartbeat_store.read(0) == {"at": 2, "posts": 2}
    assert capfd.readouterr().err.count("heartbeats are sent from Python") == 1


def test_a_store_that_is_gone_ends_the_heartbeats(rank_0: Callable[..., Rank0]) -> None:
    first = rank_0()
    first.joined_by_rank_1()
    heartbeat_store = HeartbeatStore(period_s=0.05)
    heartbeat_store.post(1, {"at": 1})
    os.kill(first.server, signal.SIGKILL)
    deadline_s = time.monotonic() + 30.0
    with pytest.raises(dist.DistStoreError, match="heartbeats cannot be sent"):
        while time.monotonic() < deadline_s:
            heartbeat_store.post(1, {"at": 2})
            time.sleep(0.05)


@pytest.mark.thorough
@pytest.mark.parametrize(("store", "waits"), [("torch", False), thorough("authenticated", True)])
def test_a_poller_in_cpp_beside_a_main_thread_that_holds_the_lock(store: str, waits: bool) -> None:
    """RCCL's monitor and watchdog threads poll like this. The authenticated store is written in Python, so it waits for
    the lock.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.comm.store", "lock", "--store", store, "--hold-s", "4"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    (row,) = json.loads(done.stdout)["pollers"]
    assert (row["worst_check_s"] > 3.0) == waits and (row["worst_check_s"] < 2.0) != waits
