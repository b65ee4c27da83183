"""The process that uploads one checkpoint of a running job, and its protocol with rank 0. Does not import torch.

The upload runs in a separate process, so that neither the store's client nor its threads slow down or block rank 0. It
reads one JSON request from stdin, and ends at once when stdin closes, because rank 0 has then ended. It prints a line
`+` for each block that was read or sent, and a last line with the problem, or null.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint import remote
from frontier_llm.checkpoint.manifest import DamagedCheckpoint
from frontier_llm.checkpoint.remote import POLL_S, RateLimit, delete_above, push, uploaded_checkpoints
from frontier_llm.checkpoint.remote_writer import TakenUrl, claim, refuse_foreign, release, renew, this_writer
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.errors import FrontierError
from frontier_llm.run.rank_env import environment, with_this_package
from frontier_llm.run.signals import SIGNALS
from frontier_llm.run.threads import in_daemon
from frontier_llm.units import strict_json

NICENESS = 10  # lower priority than the rank that runs on the same cores.
# Kinds of problems
DAMAGED = "damaged"  # the local checkpoint cannot be uploaded
TAKEN = "taken"  # another run directory writes to the URL
UNREACHABLE = "unreachable"  # a later attempt may succeed


# --- rank 0 ---


def answer_of(
    request: dict[str, Any], must_end: Callable[[], bool], longest_s: float = float("inf")
) -> dict[str, str] | None:
    """Execute a request in a separate process. Return the problem of the request, or None after a success.

    The process is ended when `must_end` returns True, after `longest_s`, or if it makes no progress.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # rank 0 alone handles the job's signals
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "frontier_llm.checkpoint.upload_process"],
            env=with_this_package(environment()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(strict_json(request, indent=None).encode() + b"\n")
        process.stdin.flush()
        return _wait_for_answer(process.stdout.fileno(), must_end, longest_s)
    except BrokenPipeError:
        return {"kind": UNREACHABLE, "text": "the process of the upload did not start"}
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _wait_for_answer(descriptor: int, must_end: Callable[[], bool], longest_s: float) -> dict[str, str] | None:
    said = b""
    began_s = time.monotonic()
    moved_s = began_s
    while not must_end():
        now_s = time.monotonic()
        if now_s - moved_s > remote.STALL_S or now_s - began_s > longest_s:
            return {"kind": UNREACHABLE, "text": f"the object store accepted no data for {now_s - moved_s:.0f} s"}
        if not select.select([descriptor], [], [], POLL_S)[0]:
            continue
        piece = os.read(descriptor, 65536)
        moved_s = now_s
        said = (said + piece)[-65536:]
        if not piece or (said.endswith(b"\n") and _answers(said)):
            break
    try:
        answer: dict[str, str] | None = json.loads(_answers(said)[-1])
    except (IndexError, ValueError):
        return {"kind": UNREACHABLE, "text": "the upload was interrupted"}
    return answer


def _answers(said: bytes) -> list[bytes]:
    """Return the output lines that are not progress marks (`+`). The last line is the result of the request."""
    return [line for line in said.splitlines() if line.strip(b"+")]


# --- the process ---


def main() -> None:
    """Execute one request that is read from stdin."""
    os.nice(NICENESS)
    request = json.loads(sys.stdin.readline())
    in_daemon(_end_with_rank_0, "rank 0")
    print(strict_json(_problem_of(request), indent=None), flush=True)
    os._exit(0)  # the client's threads may still wait for the store


def _end_with_rank_0() -> None:
    sys.stdin.read()
    os._exit(1)


def _problem_of(request: dict[str, Any]) -> dict[str, str] | None:
    """Execute the request. Return the kind of problem and its text, or None after a success."""
    try:
        _serve(request)
    except DamagedCheckpoint as error:
        return {"kind": DAMAGED, "text": str(error)}
    except TakenUrl as error:
        return {"kind": TAKEN, "text": str(error)}
    except (FrontierError, OSError) as error:
        return {"kind": UNREACHABLE, "text": str(error)}
    return None


def _mark() -> None:
    """Report progress. One system call, because several threads write marks."""
    os.write(sys.stdout.fileno(), b"+\n")


def _serve(request: dict[str, Any]) -> None:
    place = RemoteFolder(request["url"])
    writer = this_writer(request["writer"], Path(request["run_dir"]))
    if request["task"] == "release":
        release(place, writer)
        return
    if request["task"] == "claim":
        claim(place, writer)
        steps = [one.step for one in uploaded_checkpoints(place)]
        refuse_foreign(place, steps, writer, request["known_step"], request["branched_at"])
        return
    renew(place, writer)
    if request["task"] == "discard":
        delete_above(place, request["step"], _mark)
        return
    limit = RateLimit(request["mib_per_s"] * 2**20)
    push(Path(request["checkpoint"]), place, writer, limit, lambda _: _mark())


if __name__ == "__main__":
    main()
