"""Measures the job's store under the heartbeats of a large job, and whether torch's C++ threads wait for the
interpreter lock.

    python -m benchmarks.comm.store heartbeats [--ranks 3072] [--period-s 0.25] [--seconds 20] [--processes 4]
    [--ids 24]
    python -m benchmarks.comm.store lock [--store torch authenticated] [--hold-s 4]

`heartbeats` starts the store's process in the same way as rank 0. A few processes then simulate all ranks. Each rank
has its own connection and its own C++ thread of frontier_llm/comm/heartbeat.py. The thread sends a heartbeat of a real
run's size at the usual period. In addition each process sends `check` requests through torch's client, one per rank and
second (as RCCL's monitors do). Each process also reads the ids of one communicator for each of its ranks.

Everything runs on this machine over loopback. The clients therefore compete with the server for the cores, and no
network is measured.

`lock` compiles a poller in C++ against torch's headers (about 20 s). The poller sends a `check` every 5 ms while the
main thread holds the lock. Text goes to stderr, JSON to stdout.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import parse_arguments
from frontier_llm.comm import Meeting
from frontier_llm.comm.heartbeat import LATE_FACTOR, Heartbeats
from frontier_llm.comm.rendezvous import forget_stores, join_store, open_store, start_store, store_address
from frontier_llm.comm.store_process import raise_open_file_limit
from frontier_llm.run.launchers import free_port

SECRET = b"a secret of this benchmark"
NOTICE = {
    "host": "frontier00001",
    "pid": 123456,
    "step": 1234,
    "section": "train",
    "collectives": 123456,
    "progress": 1234.567,
    "call": "all_reduce of 40000000 x float32 over dp",
}
# The default of TORCH_NCCL_RANKS_PER_ROOT, and sizeof(ncclUniqueId).
RANKS_PER_ID = 128
ID_BYTES = 128
START_S = 120.0

POLLER = r"""
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace {
using Clock = std::chrono::steady_clock;
std::atomic<bool> is_ended{false};
double worst_s = 0.0;
std::thread poller;

void start(c10::intrusive_ptr<c10d::Store> store) {
    is_ended = false;
    worst_s = 0.0;
    poller = std::thread([store] {
        while (!is_ended) {
            const auto begin = Clock::now();
            store->check({"exception_dump"});
            worst_s = std::max(worst_s, std::chrono::duration<double>(Clock::now() - begin).count());
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    });
}

double finish() {
    is_ended = true;
    pybind11::gil_scoped_release released;
    poller.join();
    return worst_s;
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("start", &start);
    module.def("finish", &finish);
}
"""


def say(text: str) -> None:
    """Print a progress message to stderr."""
    print(text, file=sys.stderr, flush=True)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def own_store(ranks: int, kind: str = "torch") -> Iterator[tuple[dist.Store, int, float]]:
    """Start the store of a job of `ranks` ranks. Yields the store, the process id of its server, and the seconds that
    its start took.
    """
    before = children()
    meeting = Meeting(
        "127.0.0.1", free_port(), 0, ranks, lambda: SECRET, "torch" if kind == "torch" else "authenticated"
    )
    began_s = time.monotonic()
    start_store(0, ranks, meeting, START_S)
    store = join_store(0, ranks, meeting, START_S)
    started_s = time.monotonic() - began_s
    (server,) = children() - before or {os.getpid()}
    try:
        yield store, server, started_s
    finally:
        del store
        forget_stores()


def children() -> set[int]:
    """Return the process ids of this process's children."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def run_ranks(
    first: int, ranks: list[int], address: tuple[str, int], begin: Any, results: Any, arguments: argparse.Namespace
) -> None:
    """Simulate some of the ranks for `arguments.seconds`."""
    problem = raise_open_file_limit(2 * len(ranks))
    assert problem is None, problem
    client = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
    heartbeats = [Heartbeats(address, f"board/{rank}", arguments.period_s / LATE_FACTOR) for rank in ranks]
    begin.wait()
    for sender in heartbeats:  # from here on the threads repeat the heartbeat by themselves
        sender.update(NOTICE)
        time.sleep(arguments.period_s / len(ranks))
    before = [sender.sent for sender in heartbeats]
    began_s = time.monotonic()
    ids = [f"id/{number}" for number in range(arguments.ids)]
    slowest_ids_s = 0.0
    checks: list[float] = []
    number = 0
    while (now_s := time.monotonic()) < began_s + arguments.seconds:
        if number < len(ranks):
            client.multi_get(ids)
            slowest_ids_s = max(slowest_ids_s, time.monotonic() - now_s)
        asked_s = time.monotonic()
        client.check(["exception_dump"])
        checks.append(time.monotonic() - asked_s)
        number += 1
        time.sleep(max(0.0, began_s + number / len(ranks) - time.monotonic()))  # len(ranks) requests per second
    lasted_s = time.monotonic() - began_s
    sent = [sender.sent - earlier for sender, earlier in zip(heartbeats, before, strict=True)]
    final = {rank: sender.sent for rank, sender in zip(ranks, heartbeats, strict=True)}
    for sender in heartbeats:
        sender.close()
    results.put({
        "first": first, "heartbeats": sum(sent), "fewest": min(sent), "checks": checks,
        "slowest_ids_s": slowest_ids_s, "lasted_s": lasted_s, "final": final,
    })  # fmt: skip


def measure_heartbeats(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure one store that receives all heartbeats of a job and, at the same time, other requests."""
    context = multiprocessing.get_context("spawn")
    with own_store(arguments.ranks) as (store, server, started_s):
        address = store_address()
        assert address is not None
        for number in range(arguments.ids):
            store.set(f"id/{number}", "i" * ID_BYTES)
        begin = context.Barrier(arguments.processes + 1)
        results = context.Queue()
        shares = [list(range(first, arguments.ranks, arguments.processes)) for first in range(arguments.processes)]
        senders = [
            context.Process(target=run_ranks, args=(first, share, address, begin, results, arguments))
            for first, share in enumerate(shares)
        ]
        for sender in senders:
            sender.start()
        begin.wait()
        idle_cpu_s = cpu_s(server)
        began_s = time.monotonic()
        rows = [results.get(timeout=arguments.seconds + 300) for _ in senders]
        lasted_s = time.monotonic() - began_s
        server_cpu_s = cpu_s(server) - idle_cpu_s
        memory_mib = resident_mib(server)
        for sender in senders:
            sender.join()
        wrong = lost_heartbeats(store, {rank: count for row in rows for rank, count in row["final"].items()})
        checks = sorted(seconds for row in rows for seconds in row["checks"])
    return {
        "ranks": arguments.ranks,
        "processes_that_play_them": arguments.processes,
        "cores": os.cpu_count(),
        "seconds": round(lasted_s, 2),
        "heartbeats_per_s": round(sum(row["heartbeats"] / row["lasted_s"] for row in rows), 1),
        "wanted_heartbeats_per_s": round(arguments.ranks / arguments.period_s, 1),
        "fewest_of_a_rank": min(row["fewest"] for row in rows),
        "lost_heartbeats": wrong,
        "checks_per_s": round(len(checks) / lasted_s, 1),
        "check_ms": {
            "median": ms(checks[len(checks) // 2]),
            "p99": ms(checks[int(0.99 * len(checks))]),
            "worst": ms(checks[-1]),
        },
        "id_bytes_read": arguments.ranks * arguments.ids * ID_BYTES,
        "slowest_ids_ms": ms(max(row["slowest_ids_s"] for row in rows)),
        "server_cores": round(server_cpu_s / lasted_s, 3),
        "server_memory_mib": round(memory_mib),
        "server_start_s": round(started_s, 2),
    }


def ms(seconds: float) -> float:
    """Convert seconds to milliseconds, rounded to 0.01 ms."""
    return round(1e3 * seconds, 2)


def lost_heartbeats(store: dist.Store, sent: dict[int, int]) -> int:
    """Return the number of ranks whose last heartbeat is missing in the store."""
    deadline_s = time.monotonic() + 10.0
    while True:
        lost = [rank for rank, count in sent.items() if json.loads(store.get(f"board/{rank}"))["posts"] < count]
        if not lost or time.monotonic() > deadline_s:
            return len(lost)
        time.sleep(0.1)


def measure_lock(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure the slowest response to a C++ thread while the main thread holds the interpreter lock."""
    from torch.utils.cpp_extension import load

    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "poller.cpp"
        source.write_text(POLLER)
        poller: Any = load("store_poller", [str(source)], build_directory=folder, extra_cflags=["-O1"])
        for kind in arguments.store:
            with own_store(1, kind) as (_, _, _):
                store = open_store(START_S)
                poller.start(store)
                time.sleep(0.2)
                ctypes.PyDLL(None).usleep(int(1e6 * arguments.hold_s))  # PyDLL does not release the lock
                rows.append(
                    {
                        "store": kind,
                        "lock_held_s": arguments.hold_s,
                        "worst_check_s": round(poller.finish(), 4),
                    }
                )
                del store
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    heartbeats = kinds.add_parser("heartbeats", help="the heartbeats of a large job, simulated by a few processes")
    heartbeats.add_argument("--ranks", type=int, default=3072)
    heartbeats.add_argument("--period-s", type=float, default=0.25)
    heartbeats.add_argument("--seconds", type=float, default=20.0)
    heartbeats.add_argument("--processes", type=int, default=4)
    heartbeats.add_argument(
        "--ids", type=int, default=3072 // RANKS_PER_ID, help="ids of one communicator, read once for each rank"
    )
    lock = kinds.add_parser("lock", help="a C++ thread polls while the main thread holds the interpreter lock")
    lock.add_argument("--store", nargs="+", choices=("torch", "authenticated"), default=["torch", "authenticated"])
    lock.add_argument("--hold-s", type=float, default=4.0)
    small = ["heartbeats", "--ranks", "64", "--seconds", "1", "--processes", "2", "--ids", "2"]
    arguments = parse_arguments(parser, smoke=small)
    load_before = os.getloadavg()[0]
    if arguments.kind == "lock":
        result: dict[str, object] = {"pollers": measure_lock(arguments)}
    else:
        result = measure_heartbeats(arguments)
    result["torch"] = torch.__version__
    result["load_before"] = round(load_before, 1)
    for name, value in result.items():
        say(f"{name:<28}{value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
