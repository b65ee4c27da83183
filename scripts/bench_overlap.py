"""Does an overlap pay on this machine, or over a link of a given speed? Steps with and without it alternate in one run.

python scripts/bench_overlap.py gradients|weights|messages|chunks [key=value …] [--link-gbps 0.5] [--rounds 6] [--trace t.json] [--figure t.png]
Two ranks. A round plays two steps each way and times the second, which pays for what the first left under way. Prints median step times of the slowest rank and, by axis, what a step exposes and hides. Without --link-gbps the ranks'
own transport is measured; with it every transfer takes the time of a *simulated* link (simulated_link.py), while the ranks compute.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from pathlib import Path

import torch
from simulated_link import Link, linked

from frontier_llm.cluster.launchers import free_port
from frontier_llm.comm import barrier, build_mesh, connect, disconnect
from frontier_llm.comm.timeline import Timeline, draw, write_chrome_trace
from frontier_llm.config import load_run
from frontier_llm.data.loader import open_batches
from frontier_llm.topology import make_plan
from frontier_llm.train.build import TrainState, build_state
from frontier_llm.train.step import train_step

DP = ("parallel.data=2", "comm.bucket_elements=1000000")  # some twenty buckets of this model
SWITCHES = {  # what to measure: (layout, on, off)
    "gradients": (DP, "comm.overlap_gradients=true", "comm.overlap_gradients=false"),
    "weights": (DP, "comm.overlap_weights=true", "comm.overlap_weights=false"),
    "messages": (("parallel.pipeline=2", "batch.micro_batch=2"), "comm.overlap_messages=true", "comm.overlap_messages=false"),
    "chunks": (("parallel.tensor=2", "parallel.sequence_parallel=true"), "comm.tensor_chunks=4", "comm.tensor_chunks=1"),
}


def states(arguments: argparse.Namespace, rank: int) -> dict[bool, TrainState]:
    built = {}
    layout, on, off = SWITCHES[arguments.switch]
    for overlap in (True, False):
        config = load_run(arguments.run, [*layout, on if overlap else off, *arguments.overrides])
        plan = make_plan(config, arguments.ranks)
        mesh = build_mesh(plan.grid, rank, plan.chunks, config.model.tied_embeddings, 120.0, config.comm.transport)
        if arguments.link_gbps:
            mesh = linked(mesh, Link(arguments.link_gbps * 1e9, arguments.link_us * 1e-6))
        batches = open_batches(config, mesh.dp.rank, mesh.dp.size)
        assert batches is not None
        built[overlap] = build_state(config, plan, mesh, torch.device("cpu"), batches)
    return built


def serve(rank: int, port: int, arguments: argparse.Namespace, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    connect(rank, arguments.ranks, "127.0.0.1", port, "gloo", 120.0)
    built = states(arguments, rank)
    times: dict[bool, list[float]] = {True: [], False: []}
    timelines = {overlap: Timeline(rank) for overlap in built}
    for round_number in range(arguments.rounds):
        for overlap, state in built.items():
            barrier(state.mesh.world)
            train_step(state)
            if round_number == arguments.rounds - 1:  # the last round is drawn
                timelines[overlap].attach(state.mesh.ledger)
                state.pipeline.on_action = lambda action, overlap=overlap: timelines[overlap].at(action.kind.name.lower() if action else "")
            begin_s = time.perf_counter()
            train_step(state)
            timelines[overlap].at("")
            times[overlap].append(time.perf_counter() - begin_s)
            state.mesh.ledger.observer = None
    for state in built.values():
        state.optimizer.settle()
    results.put((rank, times, timelines))
    barrier(built[True].mesh.world)
    disconnect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("switch", choices=SWITCHES)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--run", default="bench")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--link-gbps", type=float, help="GB/s (10^9 bytes) of a simulated link")
    parser.add_argument("--link-us", type=float, default=20.0, help="its latency in microseconds (default 20)")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of the last step with the overlap")
    parser.add_argument("--figure", type=Path, help="draw it")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=serve, args=(rank, port, arguments, results)) for rank in range(arguments.ranks)]
    for process in processes:
        process.start()
    _, times, timelines = zip(*sorted((results.get(timeout=900) for _ in processes), key=lambda row: row[0]), strict=True)
    for process in processes:
        process.join()
    link = f"simulated link of {arguments.link_gbps} GB/s" if arguments.link_gbps else "the ranks' own transport"
    for overlap in (True, False):
        steps = [max(rank_times[overlap][index] for rank_times in times) for index in range(arguments.rounds)]
        name = f"{arguments.switch} {'on' if overlap else 'off'}, {link}"
        print(f"{name}: median {statistics.median(steps) * 1e3:.0f} ms, fastest {min(steps) * 1e3:.0f} ms of {len(steps)} steps")
        for row, (exposed_s, hidden_s) in timelines[0][overlap].exposed_and_hidden_s().items():
            print(f"  {row:<24} exposed {exposed_s * 1e3:8.1f} ms   hidden {hidden_s * 1e3:8.1f} ms")
    drawn = [timeline[True] for timeline in timelines]
    if arguments.trace:
        write_chrome_trace(arguments.trace, drawn)
    if arguments.figure:
        draw(arguments.figure, drawn)


if __name__ == "__main__":
    main()
