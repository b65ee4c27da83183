"""How long do rendezvous and groups take, and what follows for a whole machine? Real code and processes, then a formula.

python scripts/bench_rendezvous.py [--ranks 2 4 8 16] [--store direct node] [--per-node 8]
Each rank joins the store, builds the mesh of TP2 x DP (every axis, local synchronisation); then all ranks hammer the store to find how many
operations per second it takes. `node` goes through a relay per pretended node. Extrapolated time for n ranks, the larger of
  server: n x (JOIN_OPERATIONS + groups per rank x OPERATIONS_PER_GROUP) / operations per second of all ranks, direct
  relay:  ranks per node x the same / operations per second of one relay
RCCL makes its communicators at the first collective of each group; their cost is RCCL's own and is not in here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path

import torch

from frontier_llm.cluster.launchers import free_port
from frontier_llm.comm import barrier, build_mesh, connect, disconnect
from frontier_llm.comm.node_store import open_store
from frontier_llm.topology import Grid

JOIN_OPERATIONS = 3  # torch's store barrier: add, one wait, and the last one's set; the same per group
OPERATIONS_PER_GROUP = 3 + 2  # and RCCL's unique id, one set or get, with its check
GROUPS_PER_RANK = 8  # tp, pp, dp, world, tied and up to four channels
WHOLE_MACHINE = (3072, 16_384, 75_264)  # the 1T run, a large one, all of Frontier's GCDs


def connections(port: int) -> int:
    """Established TCP connections to the store, from the clients' side."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]]
    return sum(int(row[2].split(":")[1], 16) == port and row[3] == "01" for row in rows)


def serve(rank: int, ranks: int, port: int, per_node: int | None, operations: int, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    first = rank - rank % per_node if per_node else None
    start_s = time.perf_counter()
    connect(rank, ranks, "127.0.0.1", port, "gloo", 120.0, (first, per_node) if first is not None and per_node else None)
    store = open_store("127.0.0.1", port, 60.0, first)  # the notice board's
    joined_s = time.perf_counter()
    mesh = build_mesh(Grid(2, 1, ranks // 2), rank, timeout_s=60.0)
    built_s = time.perf_counter()
    barrier(mesh.world)
    begin_s = time.perf_counter()
    for number in range(operations):
        store.add(f"bench/{rank}/{number % 7}", 1)
    rate = operations / (time.perf_counter() - begin_s)
    results.put((joined_s - start_s, built_s - joined_s, rate, connections(port)))
    barrier(mesh.world)
    disconnect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--store", nargs="+", choices=("direct", "node"), default=["direct", "node"])
    parser.add_argument("--per-node", type=int, default=8, help="ranks of a pretended node (default 8)")
    parser.add_argument("--operations", type=int, default=2000, help="of each rank")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["frontier_llm.comm"])
    rates: dict[str, float] = {}
    print(f"{'store':<8}{'ranks':>6}{'join s':>10}{'mesh s':>10}{'connections':>13}{'operations/s, all ranks':>26}")
    for ranks in arguments.ranks:
        for kind in arguments.store:
            per_node = arguments.per_node if kind == "node" else None
            results, port = context.Queue(), free_port()
            given = (ranks, port, per_node, arguments.operations, results)
            processes = [context.Process(target=serve, args=(rank, *given)) for rank in range(ranks)]
            for process in processes:
                process.start()
            rows = [results.get(timeout=300) for _ in processes]
            for process in processes:
                process.join()
            join_s, mesh_s, rate, open_connections = (
                max(r[0] for r in rows),
                max(r[1] for r in rows),
                sum(r[2] for r in rows),
                max(r[3] for r in rows),
            )
            rates[kind] = rate
            print(f"{kind:<8}{ranks:>6}{join_s:>10.3f}{mesh_s:>10.3f}{open_connections:>13}{rate:>26,.0f}")
    extrapolate(rates, arguments.per_node, nodes=-(-arguments.ranks[-1] // arguments.per_node))


def extrapolate(rates: dict[str, float], per_node: int, nodes: int) -> None:
    """What the last measurement, over `nodes` pretended nodes, says about a whole machine."""
    operations = JOIN_OPERATIONS + GROUPS_PER_RANK * OPERATIONS_PER_GROUP
    for ranks in WHOLE_MACHINE:
        if "direct" in rates:
            seconds = ranks * operations / rates["direct"]
            print(f"extrapolated, {ranks:,} ranks: {seconds:.0f} s of operations on the server; {2 * ranks:,} connections if direct")
    if "node" in rates:
        relay_s = per_node * operations / (rates["node"] / nodes)
        clients = ", ".join(f"{-(-ranks // per_node):,}" for ranks in WHOLE_MACHINE)
        print(f"extrapolated, relays: {relay_s:.2f} s of operations on each, all nodes at once; {clients} connections")


if __name__ == "__main__":
    main()
