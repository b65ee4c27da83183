"""Measures the time of rendezvous and process groups with real processes, and extrapolates it to a large machine.

    python -m benchmarks.comm.rendezvous [--ranks 2 4 8 16] [--store torch authenticated] [--per-node 8]

Each rank joins the store, builds the process groups of all axes of TP2 x DP, and sends simple operations to the store.
It then reads the ids of some communicators in the same way as torch does for RCCL. A communicator has one id for each
128 ranks, and every rank reads all ids in one request. The server's CPU time comes from the kernel, so other load on
the machine has little influence. Extrapolated for n ranks:

  server seconds = n x (JOIN_OPERATIONS + groups per rank x OPERATIONS_PER_GROUP) x seconds per operation
                 + n x ids of the world's communicator x seconds per id

RCCL creates its communicators at the first collective of each group. That time is not included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.harness import parse_arguments, run_ranks
from frontier_llm.comm import Meeting, barrier, build_mesh, connect, disconnect
from frontier_llm.comm.rendezvous import StoreKind, open_store
from frontier_llm.run.launchers import STORE_CONNECTIONS
from frontier_llm.topology.grid import Grid

JOIN_OPERATIONS = 3  # operations of torch's store barrier: add, wait, and set by the last rank
OPERATIONS_PER_GROUP = 3 + 2  # the store barrier of the group, and one set or get of RCCL's unique id, with its check
GROUPS_PER_RANK = 8  # tp, pp, dp, world, tied and up to four channels.
WHOLE_MACHINE = (3072, 16_384, 75_264)  # ranks of the 1T run, of a larger run, and of a run on all of Frontier's GCDs
# The default of TORCH_NCCL_RANKS_PER_ROOT, and sizeof(ncclUniqueId).
RANKS_PER_ID = 128
ID_BYTES = 128
COMMUNICATORS = 5  # communicators whose ids are exchanged


class Row(NamedTuple):
    """The measurements of one rank. Only rank 0 measures the server's values."""

    join_s: float
    mesh_s: float
    connections: int
    server_us_per_operation: float
    server_us_per_id: float  # for one id that all ranks read


def connections(port: int) -> int:
    """Count the established TCP connections to the store on this machine, at the clients' ends."""
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(int(row[2].split(":")[1], 16) == port and row[3] == "01" for row in rows)


def server_us() -> float:
    """Return the CPU time of the store's server in microseconds.

    The server is a process that rank 0 has started, or a thread of rank 0. The result is 0 on other ranks.
    """
    pids = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    tasks += [
        task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().startswith("store server")
    ]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e3


def serve(
    rank: int, port: int, ranks: int, kind: StoreKind, arguments: argparse.Namespace, results: multiprocessing.Queue
) -> None:
    torch.set_num_threads(1)
    meeting = Meeting(
        "127.0.0.1",
        port,
        rank - rank % arguments.per_node,
        arguments.per_node,
        store=kind,
    )
    start_s = time.perf_counter()
    connect(
        rank,
        ranks,
        meeting,
        "gloo",
        120.0,
    )
    store = open_store(60.0)  # the heartbeats' store
    joined_s = time.perf_counter()
    mesh = build_mesh(Grid(2, 1, ranks // 2), rank, timeout_s=60.0)
    built_s = time.perf_counter()

    def computed_us(work: Any) -> float:
        barrier(mesh.world)
        before_us = server_us()
        work()
        barrier(mesh.world)
        return server_us() - before_us

    def operations() -> None:
        for number in range(arguments.operations):
            store.add(f"bench/{rank}/{number % 7}", 1)

    groups = [dist.PrefixStore(f"default_pg/{number}/cuda/", store) for number in range(COMMUNICATORS)]
    names = [f"UniqueNCCLID:{root}" for root in range(arguments.ids)]
    for group in groups:
        for name in names[rank::ranks]:
            group.set(name, "i" * ID_BYTES)

    def ids() -> None:
        for group in groups:
            assert [len(value) for value in group.multi_get(names)] == [ID_BYTES] * arguments.ids

    per_operation_us = computed_us(operations) / arguments.operations / ranks
    per_id_us = computed_us(ids) / COMMUNICATORS / arguments.ids
    results.put(
        (
            rank,
            Row(
                joined_s - start_s,
                built_s - joined_s,
                connections(port),
                per_operation_us,
                per_id_us,
            ),
        )
    )
    barrier(mesh.world)
    disconnect()


def measure(ranks: int, kind: StoreKind, arguments: argparse.Namespace) -> Row:
    """Return the times of the slowest rank, and the server's."""
    rows = dict(
        run_ranks(
            ranks,
            serve,
            ranks,
            kind,
            arguments,
            results=ranks,
            preload="frontier_llm.comm",
        )
    )
    return rows[0]._replace(
        join_s=max(row.join_s for row in rows.values()), mesh_s=max(row.mesh_s for row in rows.values())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--store", nargs="+", choices=("torch", "authenticated"), default=["torch", "authenticated"])
    parser.add_argument("--per-node", type=int, default=8, help="ranks of a simulated node (default 8)")
    parser.add_argument("--operations", type=int, default=2000, help="operations of each rank")
    parser.add_argument(
        "--ids",
        type=int,
        default=WHOLE_MACHINE[-1] // RANKS_PER_ID,
        help="ids of each communicator (default: for all ranks of Frontier)",
    )
    arguments = parse_arguments(parser, smoke=["--ranks", "2", "--operations", "20", "--ids", "4"])
    print(
        f"{'store':<14}{'ranks':>6}{'join s':>10}{'mesh s':>10}{'connections':>13}{'server us/operation':>21}"
        f"{'us/id of all ranks':>20}"
    )
    for kind in arguments.store:
        for ranks in arguments.ranks:
            row = measure(ranks, kind, arguments)
            print(
                f"{kind:<14}{ranks:>6}{row.join_s:>10.3f}{row.mesh_s:>10.3f}{row.connections:>13}"
                f"{row.server_us_per_operation:>21.2f}{row.server_us_per_id:>20.2f}"
            )
        extrapolate(kind, row, row.server_us_per_id / ranks)


def extrapolate(kind: str, row: Row, us_per_id: float) -> None:
    """Print the extrapolation of the largest measurement to large machines. `us_per_id` is the server's CPU time in
    microseconds for one rank that reads one id.
    """
    operations = JOIN_OPERATIONS + GROUPS_PER_RANK * OPERATIONS_PER_GROUP
    for ranks in WHOLE_MACHINE:
        ids = -(-ranks // RANKS_PER_ID)
        operations_s = ranks * operations * row.server_us_per_operation / 1e6
        ids_s = ranks * ids * us_per_id / 1e6
        sent_gb = ranks * ids * ID_BYTES / 1e9
        print(
            f"extrapolated, {kind}, {ranks:,} ranks: {operations_s:.1f} s of operations and {ids_s:.1f} s of ids "
            f"({sent_gb:.2f} GB) "
            f"on the server; up to {STORE_CONNECTIONS * ranks:,} connections"
        )


if __name__ == "__main__":
    main()
