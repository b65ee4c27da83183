"""Does the gradient reduction under the last backward pay on this machine? Steps with and without alternate in one run.

python scripts/bench_overlap.py [RUN] [key=value …] [--rounds 6] [--trace trace.json] [--figure trace.png]
Two ranks, DP2 unless overridden. Prints median step times and, by axis, what a step exposes and hides.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from pathlib import Path

import torch

from frontier_llm.cluster.rank_env import free_port
from frontier_llm.comm import barrier, build_mesh, connect, disconnect
from frontier_llm.comm.timeline import Timeline, draw, write_chrome_trace
from frontier_llm.config import load_run
from frontier_llm.data.loader import open_batches
from frontier_llm.topology import make_plan
from frontier_llm.train.build import TrainState, build_state
from frontier_llm.train.step import train_step


def states(run: str, overrides: list[str], rank: int, ranks: int) -> dict[bool, TrainState]:
    built = {}
    for overlap in (True, False):
        config = load_run(run, [*overrides, f"comm.overlap_gradients={str(overlap).lower()}"])
        plan = make_plan(config, ranks)
        mesh = build_mesh(plan.grid, rank, plan.chunks, config.model.tied_embeddings, 120.0, config.comm.transport)
        batches = open_batches(config, mesh.dp.rank, mesh.dp.size)
        assert batches is not None
        built[overlap] = build_state(config, plan, mesh, torch.device("cpu"), batches)
    return built


def serve(rank: int, ranks: int, port: int, arguments: argparse.Namespace, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    connect(rank, ranks, "127.0.0.1", port, "gloo", 120.0)
    built = states(arguments.run, arguments.overrides, rank, ranks)
    times: dict[bool, list[float]] = {True: [], False: []}
    timelines = {overlap: Timeline(rank) for overlap in built}
    for round_number in range(arguments.rounds + 1):
        for overlap, state in built.items():
            if round_number == arguments.rounds:  # the last round is drawn
                timelines[overlap].attach(state.mesh.ledger)
                state.engine.on_action = lambda action, overlap=overlap: timelines[overlap].at(action.kind.name.lower() if action else "")
            barrier(state.mesh.world)
            begin_s = time.perf_counter()
            train_step(state)
            timelines[overlap].at("")
            if round_number:
                times[overlap].append(time.perf_counter() - begin_s)
    results.put((rank, times, timelines))
    barrier(built[True].mesh.world)
    disconnect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", default="bench")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    arguments.overrides = arguments.overrides or ["parallel.data=2"]
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=serve, args=(rank, arguments.ranks, port, arguments, results)) for rank in range(arguments.ranks)]
    for process in processes:
        process.start()
    _, times, timelines = zip(*sorted((results.get(timeout=240) for _ in processes), key=lambda row: row[0]), strict=True)
    for process in processes:
        process.join()
    for overlap in (True, False):
        steps = [max(rank_times[overlap][index] for rank_times in times) for index in range(len(times[0][overlap]))]
        print(
            f"overlap {'on ' if overlap else 'off'}: median {statistics.median(steps) * 1e3:.0f} ms, fastest {min(steps) * 1e3:.0f} ms of {len(steps)} steps"
        )
        for name, (exposed_s, hidden_s) in timelines[0][overlap].exposed_and_hidden_s().items():
            print(f"  {name:<24} exposed {exposed_s * 1e3:8.1f} ms   hidden {hidden_s * 1e3:8.1f} ms")
    drawn = [timeline[True] for timeline in timelines]
    if arguments.trace:
        write_chrome_trace(arguments.trace, drawn)
    if arguments.figure:
        draw(arguments.figure, drawn)


if __name__ == "__main__":
    main()
