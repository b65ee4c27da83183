from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from frontier_llm.cluster.local import _copy, _Ranks, run_local_ranks
from frontier_llm.cluster.rank_logs import failure_lines
from frontier_llm.run.failure import Evidence, read_failure

PYTHON = (sys.executable, "-u", "-c")


def run(code: str, log_dir: Path, ranks: int = 3, grace_s: float = 1.0) -> int:
    return run_local_ranks(ranks, [textwrap.dedent(code)], dict(os.environ), log_dir, program=PYTHON, grace_s=grace_s)


def test_ranks_discover_themselves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
        from frontier_llm.run.rank_env import discover
        import os
        place = discover()
        print(place.rank, place.world_size, place.local_rank, place.local_world_size, place.launcher, place.master_addr)
        print(place.master_port, os.environ["OMP_NUM_THREADS"])
    """
    assert run(code, tmp_path) == 0
    logs = [(tmp_path / f"rank_{rank}.log").read_text().splitlines() for rank in range(3)]
    assert [log[0] for log in logs] == [f"{rank} 3 {rank} 3 local 127.0.0.1" for rank in range(3)]
    assert len({log[1] for log in logs}) == 1
    out = capfd.readouterr().out
    assert out.splitlines() == logs[0]  # the terminal shows only rank 0's output
    assert not (tmp_path / "failure.json").exists()


def test_ranks_get_threads_by_affinity_that_sleep(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontier_llm.machine.cores.affinity", lambda: {0})
    code = 'import os; print(os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"])'
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert run(code, tmp_path, ranks=1) == 0
    captured = capfd.readouterr()
    assert captured.out == "1 ACTIVE\n"
    assert "threads: 1 per rank (1 core of the affinity, 1 rank)" in captured.err


def test_first_failure_is_told_last_and_stops_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        import os, signal, sys, time
        from pathlib import Path
        from frontier_llm.run.rank_env import discover
        rank, ready = discover().rank, Path(os.environ["READY"])
        if rank == 1:
            while not ready.exists():
                time.sleep(0.01)
            print(time.time())
            raise ValueError("the cause")
        if rank == 2:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
            ready.touch()
        time.sleep(600)
    """
    monkeypatch.setenv("READY", str(tmp_path / "ready"))
    assert run(code, tmp_path) == 1
    assert time.time() - float((tmp_path / "rank_1.log").read_text().split()[0]) < 60  # the others sleep for 600 s
    err = capfd.readouterr().err.rstrip().splitlines()
    assert "rank 1 on" in err[-1] and "exit code 1" in err[-1] and "failed first" in err[-1]
    assert "ValueError: the cause" in "\n".join(err[-4:])
    assert any("rank 0 on" in line and "stopped" in line for line in err)
    assert any("rank 2 on" in line and "exit code 7 (secondary" in line for line in err)
    record = read_failure(tmp_path)
    assert record is not None and record.rank == 1 and "ValueError: the cause" in record.message


def test_a_killed_rank_failed_first_although_its_end_is_received_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 ends with an error because rank 0 is gone. The end of rank 0 is reported only after the end of rank 1."""
    code = """
        import os, signal, sys, time
        from pathlib import Path
        pid = Path(os.environ["PID"])
        if os.environ["RANK"] == "0":
            pid.with_suffix(".new").write_text(str(os.getpid()))
            pid.with_suffix(".new").rename(pid)
            os.kill(os.getpid(), signal.SIGKILL)
        while not pid.exists():
            time.sleep(0.01)
        state = Path("/proc") / pid.read_text() / "stat"
        while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        sys.exit("lost rank 0")
    """
    monkeypatch.setenv("PID", str(tmp_path / "pid"))
    survivor_is_reported = threading.Event()
    await_end = _Ranks._await_end

    def in_planted_order(self: _Ranks, rank: int, process: subprocess.Popen[bytes]) -> None:
        if rank == 0:
            assert survivor_is_reported.wait(60)
        await_end(self, rank, process)
        if rank == 1:
            survivor_is_reported.set()

    monkeypatch.setattr(_Ranks, "_await_end", in_planted_order)
    assert run(code, tmp_path, ranks=2, grace_s=60) == 128 + signal.SIGKILL
    lines = capfd.readouterr().err.rstrip().splitlines()
    assert "rank 0 on" in lines[-1] and "killed by SIGKILL; it failed first" in lines[-1]
    assert any("rank 1 on" in line and "exit code 1 (secondary" in line for line in lines)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_ranks_own_record_names_the_first(tmp_path: Path, capfd: pytest.CaptureFixture[str], frozen: bool) -> None:
    """Rank 0 ends first, because it lost contact with rank 1. It has written a record that names rank 1."""
    # Rank 1 either never ends, or ends after the launcher has collected rank 0 and sent SIGTERM.
    code = f"""
        import os, signal, sys, time
        from pathlib import Path
        from frontier_llm.run.failure import Evidence, Failure, write_failure
        ready = Path({str(tmp_path / "ready")!r})
        if os.environ["RANK"] == "0":
            while not ready.exists():
                time.sleep(0.01)
            record = Failure("no sign of life", Evidence.NOTICES, rank=1, host="n1", step=3, section="train")
            write_failure(Path({str(tmp_path)!r}), record)
            sys.exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if {frozen} else lambda *_: sys.exit(9))
        ready.touch()
        time.sleep(600)
    """
    assert run(code, tmp_path, ranks=2, grace_s=1.0 if frozen else 30.0) == 1
    record = read_failure(tmp_path)
    last = capfd.readouterr().err.splitlines()[-1]
    assert record is not None and (record.rank, record.host, record.step) == (1, "n1", 3)
    assert last.startswith("rank 1 on n1 failed first, at step 3 (train)" if frozen else "rank 1 on")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('saved', flush=True); sys.exit(75)", ["saved"]),  # ended by a signal: no failure
        (
            r"sys.exit(print('10:00 a word\nfrontier-llm train: error\nlr: is wrong', flush=True) or 2)",
            ["frontier-llm train: error", "lr: is wrong"],
        ),
    ],
    ids=["interrupted", "refused"],
)
def test_what_all_ranks_say_alike_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: str, told: list[str]
) -> None:
    # Rank 0 ends last, after the launcher has collected the other ranks. The others end only when rank 0 already
    # ignores SIGTERM.
    start = """
        import os, signal, sys, time
        from pathlib import Path
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready = Path(os.environ["READY"])
        (ready / str(os.getpid())).touch()
        while len(os.listdir(ready)) < 3:
            time.sleep(0.01)
        others = set(os.listdir(ready)) - {str(os.getpid())}
        while os.environ["RANK"] == "0" and any(Path("/proc", pid).exists() for pid in others):
            time.sleep(0.01)
    """
    (tmp_path / "ready").mkdir()
    monkeypatch.setenv("READY", str(tmp_path / "ready"))
    assert run(f"{textwrap.dedent(start)}\n{code}", tmp_path, grace_s=30) in (2, 75)
    out, err = capfd.readouterr()
    assert [line for line in out.splitlines() if line in told] == told
    assert err == ""


def test_a_handled_error_in_the_chain_is_not_the_cause(tmp_path: Path) -> None:
    """Regression: the cause was searched in the whole traceback, so a handled error changed the run's plan."""
    code = """
        try:
            raise RuntimeError("HIP out of memory")
        except RuntimeError:
            raise ValueError("not a number")
    """
    assert run(code, tmp_path, ranks=1) == 1
    failure = read_failure(tmp_path)
    assert failure is not None and failure.cause == "crash"
    assert any("HIP out of memory" in line for line in failure.message)


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
        import os, signal, time
        from frontier_llm.run.rank_env import discover
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if discover().rank == 2:
            time.sleep(0.7)
            print(time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """
    assert run(code, tmp_path) == 128 + signal.SIGKILL
    assert time.time() - float((tmp_path / "rank_2.log").read_text().split()[0]) < 60  # the others sleep for 600 s
    assert "rank 2 on" in capfd.readouterr().err.splitlines()[-1]
    record = read_failure(tmp_path)
    assert record is not None and record.what == "killed by SIGKILL" and record.evidence is Evidence.LOGS


LAUNCHER = """
import os, sys
from pathlib import Path
from frontier_llm.cluster.local import run_local_ranks
sys.exit(run_local_ranks(2, [sys.argv[2]], dict(os.environ), Path(sys.argv[1]), program=(sys.executable, "-u", "-c")))
"""


def start_launcher(tmp_path: Path, code: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    ranks = psutil.Process(launcher.pid).children()
    assert len(ranks) == 2
    return launcher, ranks


def gone(processes: list[psutil.Process], within_s: float) -> bool:
    return not psutil.wait_procs(processes, timeout=within_s)[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_forwarded(tmp_path: Path, number: signal.Signals) -> None:
    code = """
        import time
        from frontier_llm.run.signals import SignalWatcher
        with SignalWatcher() as watcher:
            print("ready")
            while watcher.requested is None:
                time.sleep(0.01)
            print("asked by", watcher.requested)
    """
    launcher, ranks = start_launcher(tmp_path, code)
    deadline = time.monotonic() + 120
    while (tmp_path / "rank_1.log").read_text() != "ready\n":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.send_signal(number)
    assert launcher.wait(60) == 0
    assert gone(ranks, 1)
    assert all(f"asked by {number.name}" in (tmp_path / f"rank_{rank}.log").read_text() for rank in (0, 1))


STRUCK_WHILE_STARTING = """
import os, signal, subprocess, sys
from pathlib import Path
from frontier_llm.cluster import local
from frontier_llm.run.signals import held

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), signal.SIGUSR1)  # reaches the parent when it has started its first rank

local.subprocess.Popen = Popen
with held():
    sys.exit(local.run_local_ranks(2, [sys.argv[2]], dict(os.environ), Path(sys.argv[1]), program=(sys.executable, "-u", "-c")))
"""  # noqa: E501


def test_a_signal_while_ranks_are_started_reaches_all_and_none_dies_of_it(tmp_path: Path) -> None:
    code = """
        import time
        from frontier_llm.run.signals import SignalWatcher
        with SignalWatcher() as watcher:
            while watcher.requested is None:
                time.sleep(0.01)
            print("asked by", watcher.requested)
    """
    command = [sys.executable, "-c", STRUCK_WHILE_STARTING, str(tmp_path), textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank_{rank}.log").read_text() for rank in (0, 1)] == ["asked by SIGUSR1\n"] * 2


def test_a_signal_that_ranks_do_not_handle_gives_its_code(tmp_path: Path) -> None:
    launcher, _ = start_launcher(tmp_path, "import time; print('ready'); time.sleep(600)")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 128 + signal.SIGTERM


def test_ranks_die_with_a_killed_launcher(tmp_path: Path) -> None:
    launcher, ranks = start_launcher(tmp_path, "import time; print('ready'); time.sleep(600)")
    launcher.kill()
    launcher.wait(10)
    assert gone(ranks, 10)


def test_children_of_a_dead_rank_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        import os, subprocess, sys, time
        from pathlib import Path
        from frontier_llm.run.rank_env import discover
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        while discover().rank == 1:
            time.sleep(0.05)
            if Path(os.environ["OTHER_LOG"]).read_text():
                os.abort()
        time.sleep(600)
    """
    monkeypatch.setenv("OTHER_LOG", str(tmp_path / "rank_0.log"))
    assert run(code, tmp_path, ranks=2) != 0
    pids = [int((tmp_path / f"rank_{rank}.log").read_text().splitlines()[0]) for rank in (0, 1)]
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_full_disk_does_not_hold_the_ranks_up() -> None:
    lines = [b"x" * 1000 + b"\n"] * 200  # three times the capacity of a pipe
    terminal = io.StringIO()
    with open("/dev/full", "wb", buffering=0) as full:
        _copy(io.BytesIO(b"".join(lines)), terminal, full)
    assert terminal.getvalue().encode() == b"".join(lines)


def test_failure_lines_keep_the_chain_and_fall_back_to_the_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = ["Traceback (most recent call last):", '  File "a"', "KeyError: 1", ""]
    chain = ["During handling of the above exception, another exception occurred:", ""]
    second = ["Traceback (most recent call last):", '  File "b"', "ValueError: 2"]
    log.write_text("\n".join(["noise", *first, *chain, *second]))
    assert failure_lines(log) == [*first, *chain, *second]
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    assert failure_lines(log)[0] == "line 60"
    log.write_text("noise\nfrontier-llm train: error\nlr: is wrong\n    fix: mend it\n")
    assert failure_lines(log) == ["frontier-llm train: error", "lr: is wrong", "    fix: mend it"]


def test_ranks_take_the_package_of_their_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "frontier_llm").mkdir()
    (tmp_path / "frontier_llm" / "__init__.py").write_text("raise ImportError('of the working directory')\n")
    monkeypatch.chdir(tmp_path)
    assert run_local_ranks(1, ["submit", "--help"], {**os.environ, "PYTHONPATH": ""}, tmp_path / "logs") == 0
