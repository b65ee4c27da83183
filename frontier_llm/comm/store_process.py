"""Program of the process that serves torch's TCPStore to the ranks of a job. Rank 0 starts it (`comm.rendezvous`).

Rank 0 runs this file by its path (`python -P store_process.py`). The file imports only torch and the standard library.
Standard input contains one line of JSON, the request, and stays open until rank 0 ends.
Standard output contains one line of JSON, the reply: {"port": 21234}, or {"problem": "…"} if the store cannot be
served. The process ends after rank 0 has ended and all other ranks have closed their connections.
"""

from __future__ import annotations

import json
import os
import resource
import time
from datetime import timedelta

JOB_KEY = "job"  # Key under which the store has a token that identifies its job.
OWN_FILES = 1024  # Number of open files that the process needs besides the connections: libraries, logs, data.
GRACE_S = 0.5  # After rank 0 has ended, the process ends if no client has been connected for this time.
POLL_S = 0.1
# environment variables for torch: the process uses no GPU and no thread pool
TORCH_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ROCR_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}


def raise_open_file_limit(connections: int) -> str | None:
    """Raise the soft limit of open files of this process. Returns a message if the hard limit is too low."""
    needed = connections + OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        return (
            f"the store needs {needed} open files, but the hard limit is {hard}: it opens up to {connections} "
            f"connections and its own files"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return None


def _answer(values: dict[str, int | str]) -> None:
    print(json.dumps(values), flush=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # closes the pipe to rank 0, which reads the reply up to the pipe's end
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _wait_until_left(life_line: int, files_when_idle: int, longest_s: float) -> None:
    """Wait until rank 0 has ended and no client is connected, or until `longest_s` after rank 0's end.

    `life_line` is a pipe that rank 0 keeps open. `files_when_idle` is the number of open files without clients.
    """
    while os.read(life_line, 1):
        pass
    rank_0_ended_s = time.monotonic()
    last_connected_s = rank_0_ended_s
    while True:
        now_s = time.monotonic()
        if _open_files() > files_when_idle:
            last_connected_s = now_s
        if now_s - last_connected_s > GRACE_S or now_s - rank_0_ended_s > longest_s:
            return
        time.sleep(POLL_S)


def main() -> None:
    """Read the request, serve the store, and exit when no rank needs the store."""
    with open(0, "rb", buffering=0, closefd=False) as requests:
        request = json.loads(requests.readline())
    problem = raise_open_file_limit(request["connections"])
    if problem is not None:
        _answer({"problem": problem})
        return
    for name, value in TORCH_VARIABLES.items():
        os.putenv(name, value)
    from torch.distributed import TCPStore

    store = TCPStore(
        request["address"],
        request["port"],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=request["listener"],
        timeout=timedelta(seconds=60),
    )
    store.set(JOB_KEY, request["token"])
    store.get(JOB_KEY)  # waits until the key is stored, because set() does not wait for a reply
    _answer({"port": store.port})
    _wait_until_left(0, _open_files(), request["longest_s"])
    os._exit(0)  # ends at once: the destructors of torch's threads do not run


if __name__ == "__main__":
    main()
