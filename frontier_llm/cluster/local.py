"""Starts several ranks on this machine without another launcher: a laptop, a workstation, one node.

The parent starts the ranks, shows rank 0's output, and writes the output of each rank to a file. If one rank dies, the
parent stops the others within seconds and prints the traceback of the first failed rank last.
"""

from __future__ import annotations

import ctypes
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, BinaryIO

from frontier_llm import log
from frontier_llm.cluster.rank_logs import conclusion, failure_lines
from frontier_llm.errors import REFUSED_CAUSE, FrontierError
from frontier_llm.files import open_below
from frontier_llm.machine.cores import SLEEP, THREADS, WAITING, choose_threads
from frontier_llm.run.failure import Evidence, Failure, cause_of, forget_failure, read_failure, write_failure
from frontier_llm.run.holder import refuse_second_start
from frontier_llm.run.job_secret import VARIABLE, folder_of, new_secret
from frontier_llm.run.launchers import free_port
from frontier_llm.run.rank_env import COMMAND, with_this_package
from frontier_llm.run.run_dir import make_log_dir, place, refuse_moved
from frontier_llm.run.signals import EXIT_INTERRUPTED, heeded
from frontier_llm.topology.rank_variables import ORIGINS
from frontier_llm.units import printable, strict_json

_PR_SET_PDEATHSIG = 1  # option of prctl(2), from linux/prctl.h


@dataclass(frozen=True)
class RankExit:
    """The end of one rank. `exit_code` is the code that a shell would report (128 + signal number for a signal)."""

    rank: int
    host: str
    exit_code: int
    signal: str | None
    log: str
    stopped_by_us: bool  # True if this process stopped the rank after the first failure

    @property
    def is_killed(self) -> bool:
        """True if a signal from outside ended the rank.

        SIGABRT does not count, because torch raises it after any error.
        """
        return self.signal not in (None, "SIGABRT") and not self.stopped_by_us

    @property
    def how(self) -> str:
        """Text such as 'killed by SIGKILL' or 'exit code 1'."""
        if self.signal == "SIGBUS":
            return "killed by SIGBUS (a mapped file was truncated while it was in use, or its disk failed)"
        return f"killed by {self.signal}" if self.signal else f"exit code {self.exit_code}"

    def describe(self) -> str:
        """Return text such as 'rank 3 on n0: killed by SIGKILL'."""
        return f"rank {self.rank} on {self.host}: {self.how}"


def rank_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return the variables that `rank_env.discover` reads in a rank that is started here."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_PORT": port,
    }
    return {
        **{name: str(value) for name, value in names.items()},
        "FRONTIER_LLM_LAUNCHER": "local",
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
    }


def run_local_ranks(
    num_ranks: int,
    argv: Sequence[str],
    env: Mapping[str, str],
    log_dir: Path,
    *,
    program: Sequence[str] = (sys.executable, *COMMAND),
    run_dir: Path | None = None,
    grace_s: float = 5.0,
) -> int:
    """Run `program + argv` as `num_ranks` ranks. Return the exit code of the first rank that failed, or 0.

    Each rank's stdout and stderr go to `log_dir/rank_N.log`. Rank 0's output also goes to this terminal.
    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are forwarded to the ranks. If the caller blocks them (`signals.held`), they are
    forwarded after all ranks are started, and the ranks block them until they have handlers.
    After the first failure the other ranks get SIGTERM, and SIGKILL `grace_s` later. failure.json in `run_dir`
    (default: `log_dir`) then names the rank that failed first.
    Raises FrontierError, before anything is changed, if a process already trains in `run_dir`.
    Ranks die with this process even if it is killed (Linux: PR_SET_PDEATHSIG).
    """
    refuse_second_start(run_dir or log_dir)
    make_log_dir(log_dir, run_dir)
    forget_failure(run_dir or log_dir)
    return _Ranks(num_ranks, [*program, *argv], env, log_dir, run_dir or log_dir, grace_s).run()


class _Ranks:
    """The running processes of one call of `run_local_ranks`."""

    def __init__(
        self, num_ranks: int, command: list[str], env: Mapping[str, str], log_dir: Path, run_dir: Path, grace_s: float
    ) -> None:
        self.num_ranks = num_ranks
        self.command = command
        self.env = env
        self.grace_s = grace_s
        self.log_dir = log_dir
        self.run_dir = run_dir
        self.place = place(run_dir)
        self.ended: queue.Queue[int] = queue.Queue()
        self.exits: list[RankExit] = []  # ordered by the time of their ends
        self.stopping = False
        self.secret = new_secret()
        self.forwarded: signal.Signals | None = None  # the first signal that this process received from the user
        self.threads: list[threading.Thread] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        old = (
            {number: signal.signal(number, self._forward) for number in heeded()}
            if threading.current_thread() is threading.main_thread()
            else {}
        )
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            self._start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, old)  # all ranks exist and can receive the signals
            self._wait()
        finally:
            self._signal_all(signal.SIGKILL)  # ranks are still alive only if an exception ended the wait
            shutil.rmtree(folder_of(self.secret.encode()), ignore_errors=True)  # killed ranks leave the folder behind
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in old.items():
                signal.signal(number, handler)
        for thread in self.threads:
            thread.join(timeout=2.0)  # a grandchild may still hold rank 0's pipe open
        first = next((end for end in self.exits if end.exit_code and not end.stopped_by_us), None)
        if first is None:
            return 0
        if self.forwarded is not None and first.signal == self.forwarded.name:
            print(f"ranks ended by {first.signal}", file=sys.stderr, flush=True)
        elif first.exit_code != EXIT_INTERRUPTED:  # a save after a signal is no failure; rank 0 has reported the save
            refuse_moved(self.run_dir, self.place)
            self._report(first)
        return first.exit_code

    def _start(self) -> None:
        port = free_port()
        variables = self._shared_variables()
        for rank in range(self.num_ranks):
            log = os.fdopen(
                open_below(self.log_dir, f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", buffering=0
            )
            piped = rank == 0
            process = subprocess.Popen(  # noqa: S603 our own interpreter, no shell
                self.command,
                env={**variables, **rank_variables(rank, self.num_ranks, port), VARIABLE: self.secret},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=subprocess.PIPE if piped else subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C of the terminal reaches a rank only once, through `_forward`
                preexec_fn=_die_with_parent,
            )
            self.processes.append(process)
            if piped:
                assert process.stdout is not None and process.stderr is not None
                self._thread(_copy, process.stdout, sys.stdout, log)
                self._thread(_copy, process.stderr, sys.stderr, log)
            else:
                log.close()
        # threads are started only now, because forking with running threads is unsafe
        for rank, process in enumerate(self.processes):
            self._thread(self._await_end, rank, process)
        for thread in self.threads:
            thread.start()

    def _shared_variables(self) -> dict[str, str]:
        """Return the environment that all ranks get. An exported OMP_NUM_THREADS or OMP_WAIT_POLICY is kept."""
        variables = with_this_package(self.env)
        if THREADS not in variables:
            choice = choose_threads(self.num_ranks)
            log.info(choice.describe())
            variables[THREADS] = str(choice.threads)
            variables[ORIGINS] = strict_json({THREADS: "frontier_llm/machine/cores.py"}, indent=None)
        variables.setdefault(WAITING, SLEEP)
        return variables

    def _thread(self, target: object, *arguments: object) -> None:
        self.threads.append(threading.Thread(target=target, args=arguments, daemon=True))  # type: ignore[arg-type]

    def _await_end(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        _signal_group(process.pid, signal.SIGKILL)  # data workers that a killed rank has left behind
        self.ended.put(rank)

    def _wait(self) -> None:
        """Wait for all ranks, and record their ends in the order in which they end. After the first failure, stop the
        other ranks.
        """
        deadline_s: float | None = None
        while len(self.exits) < self.num_ranks:
            try:
                rank = self.ended.get(timeout=None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                self._signal_all(signal.SIGKILL)
                deadline_s = None
                continue
            self.exits.append(self._exit_of(rank))
            if self.exits[-1].exit_code and not self.stopping:
                self._collect_ended()
                self.stopping = True
                deadline_s = time.monotonic() + self.grace_s
                self._signal_all(signal.SIGTERM)

    def _collect_ended(self) -> None:
        """Record all ranks that have ended before the other ranks are stopped, and list killed ranks first.

        A rank that loses its peer ends a moment after the peer. The end of that rank can still be reported before the
        end of the peer, because a separate thread waits for each rank.
        """
        collected = {end.rank for end in self.exits}
        ended = {rank for rank, process in enumerate(self.processes) if _has_ended(process)}
        missing = ended - collected
        while missing:
            rank = self.ended.get()
            self.exits.append(self._exit_of(rank))
            missing.discard(rank)
        self.exits.sort(key=lambda end: not end.is_killed)

    def _exit_of(self, rank: int) -> RankExit:
        code = self.processes[rank].returncode
        name = signal.Signals(-code).name if code < 0 else None
        stopped = self.stopping and code in (-signal.SIGTERM, -signal.SIGKILL)
        return RankExit(
            rank,
            socket.gethostname(),
            128 - code if code < 0 else code,
            name,
            str(self.log_dir / f"rank_{rank}.log"),
            stopped,
        )

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.returncode is None:
                _signal_group(process.pid, number)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.forwarded = self.forwarded or signal.Signals(number)
        self._signal_all(signal.Signals(number))

    def _report(self, first: RankExit) -> None:
        """Print the failures, the first failure last, because users read the end of the output.

        If rank 0 has already printed a refusal, nothing is added. The ranks' record (failure.json) names the rank that
        failed first. The rank that ended first is named instead if there is no record, or if the record only reports
        missing heartbeats and another rank was killed.
        """
        record = read_failure(self.run_dir)
        named = next((end for end in self.exits if record and end.rank == record.rank), None)
        if (
            record is None
            or named is None
            or (record.evidence is Evidence.NOTICES and first.signal and named is not first)
        ):
            named = first
            lines = failure_lines(Path(first.log))
            refused = first.exit_code == FrontierError.exit_code
            cause = REFUSED_CAUSE if refused else cause_of("\n".join(conclusion(lines)))
            record = Failure(first.how, Evidence.LOGS, cause, first.rank, first.host, message=tuple(lines))
        elif named.signal and not named.stopped_by_us:
            record = replace(record, what=f"{named.how}; {record.what}")
        lines = list(record.message) or failure_lines(Path(named.log))
        write_failure(self.run_dir, record, complete=True)
        if first.exit_code == FrontierError.exit_code and lines == failure_lines(self.log_dir / "rank_0.log"):
            return
        for end in self.exits:
            if end is not named and end.exit_code:
                print(
                    f"{end.describe()} ({'stopped' if end.stopped_by_us else 'secondary'}; {end.log})", file=sys.stderr
                )
        verdict = record.describe() if named.stopped_by_us else f"{named.describe()}; it failed first"
        print(printable("\n".join([*lines, "", f"{verdict} ({named.log})"])), file=sys.stderr, flush=True)


def _copy(source: IO[bytes], terminal: IO[str], log: BinaryIO) -> None:
    """Copy a rank's output line by line to the terminal and into its log.

    If one of the two destinations has an error, the other still gets all output.

    The rank would block if its pipe were not read.
    """
    for line in source:
        with suppress(OSError):  # the disk can be full
            log.write(line)
        with suppress(OSError, ValueError):  # the terminal can be closed
            terminal.write(line.decode(errors="replace"))
            terminal.flush()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True if the process has ended.

    The exit code is not collected here, because another thread waits for it.
    """
    if process.returncode is not None or sys.platform != "linux":
        return process.returncode is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # the waiting thread has just collected the process
        return True


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here, because loading after fork is unsafe


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
