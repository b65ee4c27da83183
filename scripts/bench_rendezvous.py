"""How long do rendezvous and groups take, and what follows for a whole machine? Real code and processes, then a formula.

python scripts/bench_rendezvous.py [--ranks 2 4 8 16] [--store direct node] [--per-node 8]
Each rank joins the store, builds the mesh of TP2 x DP (every axis, local synchronisation), gives the store simple operations to do, and then takes the
ids of some communicators from it as torch does for RCCL: one id for each 128 ranks, asked for together by every rank. `node` goes through a relay per
pretended node. What the server's one thread computes is read from the kernel, so other work on the machine matters little. Extrapolated for n ranks:
  server seconds = n x (JOIN_OPERATIONS + groups per rank x OPERATIONS_PER_GROUP) x seconds per operation
                 + askers x ids of the world's communicator x seconds per id          askers: the ranks, or the nodes where relays keep ids
RCCL makes its communicators at the first collective of each group; their cost is RCCL's own and is not in here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from frontier_llm.cluster.launchers import free_port
from frontier_llm.comm import Meeting, barrier, build_mesh, connect, disconnect
from frontier_llm.comm.rendezvous import open_store
from frontier_llm.topology import Grid

JOIN_OPERATIONS = 3  # torch's store barrier: add, one wait, and the last one's set; the same per group
OPERATIONS_PER_GROUP = 3 + 2  # and RCCL's unique id, one set or get, with its check
GROUPS_PER_RANK = 8  # tp, pp, dp, world, tied and up to four channels
WHOLE_MACHINE = (3072, 16_384, 75_264)  # the 1T run, a large one, all of Frontier's GCDs
RANKS_PER_ID, ID_BYTES = 128, 128  # TORCH_NCCL_RANKS_PER_ROOT, sizeof(ncclUniqueId)
COMMUNICATORS = 5  # whose ids are exchanged


class Row(NamedTuple):
    """What one rank has seen; the server's numbers are rank 0's."""

    join_s: float
    mesh_s: float
    connections: int
    server_us_per_operation: float
    server_us_per_id: float  # for all ranks


def connections(port: int) -> int:
    """Established TCP connections to the store, from the clients' side."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]]
    return sum(int(row[2].split(":")[1], 16) == port and row[3] == "01" for row in rows)


def server_us() -> float:
    """What the store's thread of this process has computed; 0 in a process that has none."""
    threads = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().startswith("store server")]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in threads) / 1e3


def serve(rank: int, ranks: int, port: int, per_node: int | None, arguments: argparse.Namespace, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    meeting = Meeting("127.0.0.1", port, rank - rank % arguments.per_node, arguments.per_node, relayed=per_node is not None)
    start_s = time.perf_counter()
    connect(rank, ranks, meeting, "gloo", 120.0)
    store = open_store(60.0)  # the notice board's
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
    results.put((rank, Row(joined_s - start_s, built_s - joined_s, connections(port), per_operation_us, per_id_us)))
    barrier(mesh.world)
    disconnect()


def measure(ranks: int, per_node: int | None, arguments: argparse.Namespace) -> Row:
    """The slowest rank's times, and the server's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["frontier_llm.comm"])
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=serve, args=(rank, ranks, port, per_node, arguments, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    rows = dict(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    return rows[0]._replace(join_s=max(row.join_s for row in rows.values()), mesh_s=max(row.mesh_s for row in rows.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--store", nargs="+", choices=("direct", "node"), default=["direct", "node"])
    parser.add_argument("--per-node", type=int, default=8, help="ranks of a pretended node (default 8)")
    parser.add_argument("--operations", type=int, default=2000, help="of each rank")
    parser.add_argument(
        "--ids", type=int, default=WHOLE_MACHINE[-1] // RANKS_PER_ID, help="of each communicator (default: all of Frontier's)"
    )
    arguments = parser.parse_args()
    print(f"{'store':<8}{'ranks':>6}{'join s':>10}{'mesh s':>10}{'connections':>13}{'server us/operation':>21}{'us/id of all ranks':>20}")
    for kind in arguments.store:
        per_node = arguments.per_node if kind == "node" else None
        for ranks in arguments.ranks:
            row = measure(ranks, per_node, arguments)
            print(
                f"{kind:<8}{ranks:>6}{row.join_s:>10.3f}{row.mesh_s:>10.3f}{row.connections:>13}{row.server_us_per_operation:>21.2f}{row.server_us_per_id:>20.2f}"
            )
        extrapolate(kind, row, row.server_us_per_id / (-(-ranks // per_node) if per_node else ranks), arguments.per_node)


def extrapolate(kind: str, row: Row, us_per_id: float, per_node: int) -> None:
    """What the measurement of most ranks says about a whole machine; `us_per_id` is for one asker."""
    operations = JOIN_OPERATIONS + GROUPS_PER_RANK * OPERATIONS_PER_GROUP
    for ranks in WHOLE_MACHINE:
        askers, ids = -(-ranks // per_node) if kind == "node" else ranks, -(-ranks // RANKS_PER_ID)
        operations_s, ids_s = ranks * operations * row.server_us_per_operation / 1e6, askers * ids * us_per_id / 1e6
        sent_gb = askers * ids * ID_BYTES / 1e9
        print(
            f"extrapolated, {kind}, {ranks:,} ranks: {operations_s:.1f} s of operations and {ids_s:.1f} s of ids ({sent_gb:.2f} GB) "
            f"on the server; {2 * askers if kind == 'direct' else askers:,} connections"
        )


if __name__ == "__main__":
    main()
