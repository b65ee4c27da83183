"""Starts, on rank 0, the separate process that serves TCPStore (`comm.store_process`)."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

from frontier_llm.comm import store_process
from frontier_llm.errors import BackendError
from frontier_llm.run.threads import in_daemon

# A launcher sends these signals to every process of the job. The store must continue until no rank needs it.
SURVIVED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# TCP keep-alive ends the connections of failed nodes, which do not close them.
KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}


class StoreProcess:
    """Starts and controls the process that serves TCPStore. Used on rank 0."""

    def __init__(self, listener: socket.socket, connections: int, token: str, longest_s: float) -> None:
        """Start the process, which accepts up to `connections` clients on `listener`.

        The process ends at most `longest_s` after rank 0 has ended.
        """
        self._address = listener.getsockname()[:2]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted connections inherit this option
        for option, value in KEEPALIVE.items():
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        host, port = self._address
        is_on_all_interfaces = host in ("0.0.0.0", "::")  # noqa: S104 compared, not bound
        request = {
            "address": "localhost" if is_on_all_interfaces else host,
            "port": port,
            "listener": listener.fileno(),
            "connections": connections,
            "token": token,
            "longest_s": longest_s,
        }
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SURVIVED)  # the new process inherits the mask
        try:
            self._process = subprocess.Popen(  # noqa: S603 our own interpreter, no shell
                [sys.executable, "-P", str(Path(store_process.__file__).resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(),),
                start_new_session=True,  # launchers kill the process group of each rank, so the store leaves it
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def wait_until_ready(self, timeout_s: float) -> int:
        """Wait for the process and return the port of its store.

        Raises BackendError if the process may not open enough files, DistStoreError if it does not start within
        `timeout_s`.
        """
        said = self._read_answer(timeout_s)
        last = said.splitlines()[-1] if said else "no message"
        if not last.startswith("{"):
            raise dist.DistStoreError(f"the store's process did not start: {last}")
        answer = json.loads(last)
        if "problem" in answer:
            raise BackendError(
                str(answer["problem"]),
                "ask the site to raise the hard limit of open files (ulimit -Hn), or use fewer ranks",
                "comm.store",
            )
        return int(answer["port"])

    def _read_answer(self, timeout_s: float) -> str:
        """Return the output of the process: its JSON line, or if it ends early, everything that it has printed."""
        deadline_s = time.monotonic() + timeout_s
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        said = b""
        while True:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            if not waiting.poll(1000 * left_s):
                raise dist.DistStoreError(f"the store's process did not start within {timeout_s:g} s")
            piece = os.read(descriptor, 65536)
            said += piece
            if not piece:  # the pipe is closed: the JSON line is complete, or the process has ended
                return said.decode(errors="replace")

    def let_go(self) -> None:
        """Tell the process that rank 0 no longer needs it. The process ends when no client is connected."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        # a thread waits for the end of the process, so that the process does not remain as a zombie
        in_daemon(self._process.wait, "store process")
