"""The process that uploads one checkpoint of a running job. Started by `upload.Uploads`; does not import torch.

It is a process of its own, so that neither the store's client nor its threads slow down or block rank 0. It reads one
JSON request from stdin, and ends at once when stdin closes, because rank 0 has then ended. It prints a line `+` for
each block that was sent, and a last line with the problem, or null.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from frontier_llm.checkpoint.manifest import DamagedCheckpoint
from frontier_llm.checkpoint.remote import RateLimit, push, remote_checkpoints
from frontier_llm.checkpoint.remote_writer import TakenUrl, claim, release, renew, this_writer
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.errors import FrontierError
from frontier_llm.run.threads import in_daemon
from frontier_llm.units import strict_json

NICENESS = 10  # below the rank on the same cores
# kinds of problems
DAMAGED = "damaged"  # the local checkpoint cannot be uploaded
TAKEN = "taken"  # another run directory writes to the URL
UNREACHABLE = "unreachable"  # a later attempt may succeed


def main() -> None:
    """Serve one request."""
    os.nice(NICENESS)
    request = json.loads(sys.stdin.readline())
    in_daemon(_end_with_rank_0, "rank 0")
    print(strict_json(_problem_of(request), indent=None), flush=True)
    os._exit(0)  # the client's threads may still wait for the store


def _end_with_rank_0() -> None:
    sys.stdin.read()
    os._exit(1)


def _problem_of(request: dict[str, Any]) -> dict[str, str] | None:
    """Serve the request. Return its kind of problem and a text, or None after a success."""
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
    if request["is_claimed"]:
        renew(place, writer)
    else:
        claim(place, writer)
    if request["task"] == "discard":
        for one in remote_checkpoints(place):
            if one.step > request["step"]:
                one.delete()
                _mark()
        return
    limit = RateLimit(request["mib_per_s"] * 2**20)
    push(Path(request["checkpoint"]), place, writer, limit, lambda _: _mark())


if __name__ == "__main__":
    main()
