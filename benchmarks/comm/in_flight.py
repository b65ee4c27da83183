"""Measures how much one communication in flight slows down a pipeline, and compares it with the simulator. CPU only.

    python -m benchmarks.comm.in_flight [--forward-ms 40] [--rounds 5] [--json FILE]

The engine and the gloo messages are real. Compute is a sleep, so that four ranks share few cores without slowing each
other down. Messages go through gloo. Each message occupies its sender and its receiver until a *simulated* link would
have delivered it. Steps with `comm.in_flight=many` and with `comm.in_flight=one` alternate.

Prints a Markdown table with the fastest rounds and the simulator's times. Other processes on the cores disturb the
fastest rounds least. The JSON file contains every round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import parse_arguments, run_ranks, write_json
from frontier_llm.comm import Group, Meeting, Mesh, Pending, barrier, build_mesh, connect, disconnect
from frontier_llm.comm.group import Sending
from frontier_llm.config import CommConfig
from frontier_llm.parallel.pipeline import Engine
from frontier_llm.parallel.stages import ActivationSpec
from frontier_llm.parallel.tensor import WeightGradients
from frontier_llm.planner.pipeline import StageTimes, simulate_schedule
from frontier_llm.schedule import build
from frontier_llm.topology.grid import Grid

STAGES = 4
CASES = [
    (name, chunks, m, share)
    for name, chunks, m in (("1f1b", 1, 8), ("gpipe", 1, 8), ("interleaved", 2, 8))
    for share in (0.06, 0.2)
]


class _Transfer:
    """A message in transfer. On both ends it counts as complete only when the simulated link has delivered it."""

    def __init__(self, works: list[Pending], stamps: list[Tensor], seconds: float) -> None:
        self._works = works
        self._stamps = stamps
        self._seconds = seconds

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        time.sleep(max(0.0, max(map(float, self._stamps)) + self._seconds - time.monotonic()))

    def is_done(self) -> bool:
        return False  # senders poll this method first; False makes them wait


class Link:
    """A process group with a simulated link. A message starts when both ends are ready and the link is free."""

    def __init__(self, group: Group, seconds: float) -> None:
        self._group = group
        self._seconds = seconds
        self._free_s = 0.0

    def _stamp(self) -> Tensor:
        now_s = max(time.monotonic(), self._free_s)
        self._free_s = now_s + self._seconds
        return torch.tensor([now_s], dtype=torch.float64)

    def send(self, x: Tensor, to: int) -> Sending:
        mine = self._stamp()
        theirs = torch.empty(1, dtype=torch.float64)
        return _Transfer(
            [self._group.send(x, to), self._group.send(mine, to), self._group.receive(theirs, to)],
            [mine, theirs],
            self._seconds,
        )

    def receive(self, buffer: Tensor, source: int) -> Pending:
        mine = torch.tensor([time.monotonic()], dtype=torch.float64)
        theirs = torch.empty(1, dtype=torch.float64)
        group = self._group
        return _Transfer(
            [group.receive(buffer, source), group.receive(theirs, source), group.send(mine, source)],
            [mine, theirs],
            self._seconds,
        )


def linked(group: Group | None, seconds: float) -> Any:
    """Wrap a group in a link. The link replaces the group."""
    assert group is not None  # every channel has a group
    return Link(group, seconds)


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


def engine_of(mesh: Mesh, name: str, chunks: int, m: int, forward_s: float) -> Engine:
    schedule = build(name, STAGES, m, chunks)

    def stage(position: int) -> Any:
        def run(x: Tensor | None, _batch: Any) -> Tensor:
            y = _Asleep.apply(
                torch.ones(1, 1, 1, requires_grad=True) if x is None else x, forward_s / chunks, 2 * forward_s / chunks
            )
            return y.sum() if position == schedule.placement.last else y

        return run

    stages = [stage(position) for position in schedule.placement.positions_of(mesh.pp.rank)]
    return Engine(
        schedule, stages, mesh, WeightGradients(), ActivationSpec((1, 1, 1), torch.float32, torch.device("cpu"))
    )


def serve(rank: int, port: int, args: argparse.Namespace, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    connect(
        rank,
        STAGES,
        Meeting("127.0.0.1", port, 0, STAGES),
        "gloo",
        120.0,
    )
    forward_s = args.forward_ms / 1e3
    measured = {}
    for name, chunks, m, share in CASES:
        engines = {}
        for mode in ("many", "one"):
            placement = build(name, STAGES, m, chunks).placement
            mesh = build_mesh(
                Grid(1, STAGES, 1), rank, placement, timeout_s=120.0, comm=CommConfig(transport="torch", in_flight=mode)
            )
            channels = {
                key: replace(axis, group=linked(axis.group, share * forward_s)) for key, axis in mesh.channels.items()
            }
            engines[mode] = (
                mesh,
                engine_of(
                    replace(mesh, channels=channels),
                    name,
                    chunks,
                    m,
                    forward_s,
                ),
            )
        times: dict[str, list[float]] = {mode: [] for mode in engines}
        for _ in range(args.rounds):
            for mode, (mesh, engine) in engines.items():
                barrier(mesh.world)
                begin_s = time.perf_counter()
                engine.run(lambda _: None)
                barrier(mesh.world)
                times[mode].append(time.perf_counter() - begin_s)
        measured[name, chunks, m, share] = times
    if rank == 0:
        results.put(measured)
    disconnect()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward-ms", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parse_arguments(parser, smoke=["--forward-ms", "1", "--rounds", "1"])
    (measured,) = run_ranks(STAGES, serve, args)
    rows = []
    forward_s = args.forward_ms / 1e3
    print(
        "| schedule, 4 stages | message | many, measured | many, simulated | one, measured | one, simulated | cost "
        "measured | cost simulated |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for (name, chunks, m, share), rounds in measured.items():
        times = {mode: min(each) for mode, each in rounds.items()}
        stages = tuple(
            StageTimes(forward_s / chunks, 2 * forward_s / chunks, forward_s / chunks) for _ in range(STAGES * chunks)
        )
        many, one = (
            simulate_schedule(
                name,
                STAGES,
                m,
                chunks,
                stages,
                share * forward_s,
                mode,
            ).makespan_s
            for mode in ("many", "waiting")
        )
        row = {
            "schedule": name,
            "chunks": chunks,
            "microbatches": m,
            "message": share,
            "rounds_s": rounds,
            "many_s": many,
            "one_s": one,
        }
        rows.append(row)
        cells = [
            f"{name}, {m} x {chunks}",
            f"{share:.0%} of a forward",
            *(f"{s:.3f} s" for s in (times["many"], many, times["one"], one)),
        ]
        cells += [f"{each:.1%}" for each in (times["one"] / times["many"] - 1, one / many - 1)]
        print(f"| {' | '.join(cells)} |")
    write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
