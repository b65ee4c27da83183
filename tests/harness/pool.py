"""Runs test functions on a pool of rank processes. The pool is started once per test run, because starting ranks takes
longer than most tests.

Each job has its own world. Its ranks join a fresh default process group (gloo, loopback) under a key prefix that no
other job uses. They leave the group when the next job begins. A job therefore cannot see state of an earlier job, and
cannot destroy a group that a slower peer still needs.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

SIZE = 8
GRACE_S = 2.0  # time for the other ranks of a failed job to reply
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class Reply(NamedTuple):
    """The reply of a rank to a job: its result, or the traceback and the time of its failure."""

    rank: int
    failed_at: float | None
    value: Any
    # True if the process died. A dead process is reported as the cause, even if its peers failed before its death was
    # detected.
    died: bool = False


class RankError(AssertionError):
    """A job failed. The message is the first failing rank's traceback, then one line for each rank that failed
    later.
    """

    def __init__(self, failures: list[Reply], silent: list[int]) -> None:
        first, *later = sorted(failures, key=lambda reply: (not reply.died, reply.failed_at or 0.0))
        lines = [f"rank {first.rank} failed first:\n{first.value}"]
        lines += [
            f"rank {reply.rank} failed {max(0.0, reply.failed_at - first.failed_at):.2f} s later (secondary): "
            f"{_last_line(reply)}"
            for reply in later
        ]
        lines += [f"ranks {silent} were still waiting"] if silent else []
        super().__init__("\n".join(lines))
        self.first_rank = first.rank


def _last_line(reply: Reply) -> str:
    return str(reply.value).strip().splitlines()[-1]


class RankPool:
    """Ranks 0 … SIZE-1 as processes. They are started at the first `run`. After a failure they are killed and started
    again.
    """

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self._jobs = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: Any = None
        self._stacks = tempfile.TemporaryDirectory(prefix="ranks-")  # this folder is removed with the pool

    def run(self, world_size: int, work: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Run `work(rank, *args)` on ranks 0 … world_size-1 of a fresh gloo world. Returns the results by rank.

        `work` is a module-level function. Arguments and results are pickled. Raises RankError if a rank raises, dies,
        or does not reply within `timeout_s`. For a timeout the message has the stack of every rank without a reply.
        After an error the next job starts new processes.
        """
        assert world_size <= self.size, f"the pool has {self.size} ranks"
        if not self._processes:
            self._start()
        self._jobs += 1
        job = pickle.dumps((f"job{self._jobs}", world_size, timeout_s, work, args))
        for pipe in self._pipes[:world_size]:
            pipe.send_bytes(job)
        replies, silent = self._collect(world_size, time.monotonic() + timeout_s)
        failures = [reply for reply in replies if reply.failed_at is not None]
        if silent and not failures:
            failures = [
                Reply(rank, 0.0, f"no answer after {timeout_s:.0f} s; it stands in\n{self._stack(rank)}")
                for rank in silent
            ]
            silent = []
        if failures:
            self.stop()
            raise RankError(failures, silent)
        return [reply.value for reply in sorted(replies)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes = []
        self._pipes = []
        self._store = None

    def _start(self) -> None:
        """Fork the ranks from a server that has imported torch once. This takes a second or two, instead of seven to
        fifteen for separate imports.
        """
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "frontier_llm.training.build"])
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, theirs, self._store.port, str(self._stack_file(rank))), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})

    def _collect(self, world_size: int, deadline_s: float) -> tuple[list[Reply], list[int]]:
        """Return the replies, and the ranks without a reply. Waits for all replies or, after a failure, for GRACE_S
        only.
        """
        waiting = dict(zip(self._pipes[:world_size], range(world_size), strict=True))
        replies: list[Reply] = []
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left_s):
                rank = waiting.pop(pipe)  # type: ignore[index]
                try:
                    replies.append(pickle.loads(pipe.recv_bytes()))  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(GRACE_S)
                    what = f"the process died with exit code {self._processes[rank].exitcode}"
                    replies.append(Reply(rank, time.monotonic(), what, died=True))
                if replies[-1].failed_at is not None:
                    deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        return replies, sorted(waiting.values())

    def _stack_file(self, rank: int) -> Path:
        return Path(self._stacks.name) / f"rank{rank}.txt"

    def _stack(self, rank: int) -> str:
        """Return the stack of a rank that has not replied."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        return self._stack_file(rank).read_text(encoding="utf-8")


def wait_for_file(path: str) -> None:
    """Wait until another rank has created the file at `path`. The limit of `RankPool.run` ends an endless wait."""
    while not Path(path).exists():
        time.sleep(0.01)


def _serve(rank: int, pipe: Connection, port: int, stack_file: str) -> None:
    """Process of a rank: receive a job, join its world, run it, reply."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stacks = open(stack_file, "w", encoding="utf-8")  # noqa: SIM115  # faulthandler needs it for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # Exclude torch's 200,000 objects from the collection after each job. Scanning them takes 0.1 s on every rank, a
    # fifth of the complete test suite's CPU time.
    gc.freeze()
    while True:
        try:
            prefix, world_size, timeout_s, work, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            own = dist.PrefixStore(prefix, store)
            dist.init_process_group(
                "gloo", store=own, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
            )
            reply = Reply(rank, None, work(rank, *args))
        except BaseException:
            reply = Reply(rank, time.monotonic(), traceback.format_exc())
        sys.stdout.flush()
        pipe.send_bytes(pickle.dumps(reply))
        del work, args, reply
        # a group in a reference cycle keeps three threads alive, and a test run creates hundreds of groups
        gc.collect()
