"""Measures whether overlapping communication with compute makes a step faster, on this machine or over a link of a
given speed.

    python -m benchmarks.comm.overlap all|gradients|weights|messages|chunks|sums|experts [key=value …]
    [--link-gbps 0.5] [--rounds 6] [--json f] [--trace t.json] [--figure t.png]

Steps with and without the overlap alternate in one run. The run has two ranks, or four for `experts`. A round executes
two steps with each setting and times the second step. The second step includes communication that the first step left
in flight.

Prints a Markdown table: median and fastest step of the slowest rank, and by axis the exposed and hidden communication
of rank 0's last step. Without --link-gbps the ranks' own transport is measured. With --link-gbps every transfer takes
the time of a *simulated* link (simulated_link.py), and the ranks compute during the transfer. --json keeps the rows of
earlier calls.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.comm.simulated_link import Link, linked
from benchmarks.harness import TINY, parse_arguments, read_json, run_ranks, write_json
from frontier_llm.comm import Meeting, barrier, build_mesh, connect, disconnect
from frontier_llm.config import load_run
from frontier_llm.data.loader import open_batches
from frontier_llm.schedule import Action
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import TrainState, build_state
from frontier_llm.training.step import train_step
from tests.harness.timeline import MeasuredTimeline, draw, write_chrome_trace

EXPERTS = (
    "parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=dualpipe-v", "parallel.data=2", "parallel.expert=2",
    "model.bias=false", "model.moe={experts: 16, top_k: 4, expert_hidden: 384}", "batch.micro_batch=1",
)  # fmt: skip
DP = ("parallel.data=2", "comm.bucket_elements=1000000")  # gives this model about twenty gradient buckets
SWITCHES = {  # switch: (layout, on, off)
    "gradients": (DP, "comm.overlap_gradients=true", "comm.overlap_gradients=false"),
    "weights": (DP, "comm.overlap_weights=true", "comm.overlap_weights=false"),
    "messages": (
        ("parallel.pipeline=2", "batch.micro_batch=2"),
        "comm.overlap_messages=true",
        "comm.overlap_messages=false",
    ),
    "chunks": (
        ("parallel.tensor=2", "parallel.sequence_parallel=true"),
        "comm.tensor_chunks=4",
        "comm.tensor_chunks=1",
    ),
    "sums": (("parallel.tensor=2",), "comm.tensor_chunks=4", "comm.tensor_chunks=1"),
    "experts": (EXPERTS, "comm.overlap_experts=true", "comm.overlap_experts=false"),
}
RANKS = {switch: 4 if switch == "experts" else 2 for switch in SWITCHES}


def states(arguments: argparse.Namespace, switch: str, rank: int) -> dict[bool, TrainState]:
    built = {}
    layout, on, off = SWITCHES[switch]
    for overlap in (True, False):
        config = load_run(arguments.run, [*layout, on if overlap else off, *arguments.overrides])
        plan = make_plan(config, RANKS[switch])
        experts = config.model.moe is not None
        mesh = build_mesh(
            plan.grid, rank, plan.placement, config.model.tied_embeddings, 120.0, config.comm, experts=experts
        )
        if arguments.link_gbps:
            mesh = linked(mesh, Link(arguments.link_gbps * 1e9, arguments.link_us * 1e-6))
        batches = open_batches(config, mesh.dp.rank, mesh.dp.size)
        built[overlap] = build_state(
            config,
            plan,
            mesh,
            torch.device("cpu"),
            batches,
        )
    return built


def serve(rank: int, port: int, arguments: argparse.Namespace, switch: str, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    connect(
        rank,
        RANKS[switch],
        Meeting("127.0.0.1", port, 0, RANKS[switch]),
        "gloo",
        120.0,
    )
    built = states(arguments, switch, rank)
    times: dict[bool, list[float]] = {True: [], False: []}
    timelines = {overlap: MeasuredTimeline(rank) for overlap in built}
    for round_number in range(arguments.rounds):
        for overlap, state in built.items():
            barrier(state.mesh.world)
            train_step(state)
            if round_number == arguments.rounds - 1:  # the timeline shows the last round
                timelines[overlap].attach(state.mesh.ledger)

                def begins(action: Action | None, timeline: MeasuredTimeline = timelines[overlap]) -> None:
                    timeline.at(action.kind.name.lower() if action else "")

                state.pipeline.on_action = begins
            begin_s = time.perf_counter()
            train_step(state)
            timelines[overlap].at("")
            times[overlap].append(time.perf_counter() - begin_s)
            state.mesh.ledger.observer = None
    for state in built.values():
        state.optimizer.wait_for_gather()
    results.put((rank, times, timelines))
    barrier(built[True].mesh.world)
    disconnect()


def measure(arguments: argparse.Namespace, switch: str) -> tuple[dict[str, Any], list[MeasuredTimeline]]:
    """Return the results of one switch, and the timelines of the last step with the switch on."""
    of_ranks = run_ranks(
        RANKS[switch],
        serve,
        arguments,
        switch,
        results=RANKS[switch],
    )
    _, times, timelines = zip(*sorted(of_ranks, key=lambda row: row[0]), strict=True)
    row: dict[str, Any] = {
        "switch": switch,
        "simulated_link_gbps": arguments.link_gbps,
        "rounds": arguments.rounds,
    }
    row |= {"load": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d %H:%M")}
    for overlap in (True, False):
        steps = [max(rank_times[overlap][index] for rank_times in times) for index in range(arguments.rounds)]
        by_axis = timelines[0][overlap].exposed_and_hidden_s().items()
        row["on" if overlap else "off"] = {
            "median_ms": round(statistics.median(steps) * 1e3, 1),
            "fastest_ms": round(min(steps) * 1e3, 1),
            "exposed_ms": {name: round(exposed_s * 1e3, 1) for name, (exposed_s, _) in by_axis},
            "hidden_ms": {name: round(hidden_s * 1e3, 1) for name, (_, hidden_s) in by_axis},
        }
    return row, [timeline[True] for timeline in timelines]


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return a table with a line for each switch and link: off → on."""
    lines = ["| switch | link | step, median | step, fastest | exposed | load |", "|---|---|---|---|---|---|"]
    for row in rows:
        off = row["off"]
        on = row["on"]
        largest = sorted(
            off["exposed_ms"], key=lambda name: -max(off["exposed_ms"][name], on["exposed_ms"].get(name, 0.0))
        )[:2]
        exposed = "; ".join(
            f"{name} {off['exposed_ms'][name]:.1f} → {on['exposed_ms'].get(name, 0.0):.1f} ms" for name in largest
        )
        link = f"simulated, {row['simulated_link_gbps']} GB/s" if row["simulated_link_gbps"] else "own transport"
        step = (
            f"{off['median_ms']:.0f} → {on['median_ms']:.0f} ms | {off['fastest_ms']:.0f} → {on['fastest_ms']:.0f} ms"
        )
        lines.append(f"| `{row['switch']}` | {link} | {step} | {exposed} | {row['load']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("switch", choices=["all", *SWITCHES])
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--run", default="bench")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--link-gbps", type=float, help="bandwidth of a simulated link in GB/s (10^9 bytes)")
    parser.add_argument(
        "--link-us", type=float, default=20.0, help="latency of the simulated link in microseconds (default 20)"
    )
    parser.add_argument("--json", type=Path, help="file to which the rows are added")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of the last step with the last overlap")
    parser.add_argument("--figure", type=Path, help="draw the trace into this file")
    arguments = parse_arguments(parser, smoke=["gradients", *TINY, "--rounds", "1"])
    rows: list[dict[str, Any]] = read_json(arguments.json, [])
    for switch in SWITCHES if arguments.switch == "all" else [arguments.switch]:
        row, drawn = measure(arguments, switch)
        same = ("switch", "simulated_link_gbps")
        rows = [*(other for other in rows if any(other[key] != row[key] for key in same)), row]
        write_json(arguments.json, rows)  # after each row, so that an interrupted call keeps its results
    print(markdown(rows))
    if arguments.trace:
        write_chrome_trace(arguments.trace, drawn)
    if arguments.figure:
        draw(arguments.figure, drawn)


if __name__ == "__main__":
    main()
