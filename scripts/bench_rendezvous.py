"""How long do rendezvous and groups take, and what follows for a whole machine? Real code and processes, then a formula.

python scripts/bench_rendezvous.py [--ranks 2 4 8 16]
Each rank joins the store, builds the mesh of TP2 x DP (every axis, local synchronisation), and counts the store operations that a
group costs; then all ranks hammer the store to find how many operations per second its one server takes. Extrapolated time for n ranks:
  seconds = n x (JOIN_OPERATIONS + groups per rank x OPERATIONS_PER_GROUP) / operations per second
RCCL makes its communicators at the first collective of each group; their cost is RCCL's own and is not in here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time

import torch
import torch.distributed as dist

from frontier_llm.cluster.rank_env import free_port
from frontier_llm.comm import barrier, build_mesh, connect, disconnect
from frontier_llm.topology import Grid

JOIN_OPERATIONS = 3  # torch's store barrier: add, one wait, and the last one's set; the same per group
OPERATIONS_PER_GROUP = 3 + 2  # and RCCL's unique id, one set or get, with its check
GROUPS_PER_RANK = 8  # tp, pp, dp, world, tied and up to four channels


def serve(rank: int, ranks: int, port: int, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    connect(rank, ranks, "127.0.0.1", port, "gloo", 120.0)
    joined_s = time.perf_counter()
    mesh = build_mesh(Grid(2, 1, ranks // 2), rank, timeout_s=60.0)
    built_s = time.perf_counter()
    barrier(mesh.world)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    count = 3000
    begin_s = time.perf_counter()
    for number in range(count):
        store.add(f"bench/{rank}/{number % 7}", 1)
    rate = count / (time.perf_counter() - begin_s)
    results.put((joined_s - start_s, built_s - joined_s, rate))
    barrier(mesh.world)
    disconnect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    arguments = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["frontier_llm.comm"])
    rate = 0.0
    print(f"{'ranks':>6}{'join s':>10}{'mesh s':>10}{'store operations/s, all ranks':>32}")
    for ranks in arguments.ranks:
        results, port = context.Queue(), free_port()
        processes = [context.Process(target=serve, args=(rank, ranks, port, results)) for rank in range(ranks)]
        for process in processes:
            process.start()
        rows = [results.get(timeout=120) for _ in processes]
        for process in processes:
            process.join()
        rate = sum(row[2] for row in rows)
        print(f"{ranks:>6}{max(row[0] for row in rows):>10.3f}{max(row[1] for row in rows):>10.3f}{rate:>32,.0f}")
    for ranks in (3072, 16_384, 75_264):
        seconds = ranks * (JOIN_OPERATIONS + GROUPS_PER_RANK * OPERATIONS_PER_GROUP) / rate
        print(f"extrapolated to {ranks:,} ranks: {seconds:.0f} s of store operations on a server as fast as this one")


if __name__ == "__main__":
    main()
