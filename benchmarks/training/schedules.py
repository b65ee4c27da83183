"""Measures steps of four pipeline ranks by schedule, and compares them with the simulation of the same actions.

The engine, the order of actions, and the messages between four processes are real. A pass of a stage is a sleep, so
that bubbles are visible although the ranks share cores. F, I and W take `--unit-ms` each for a whole stage. The
optimizer takes one more unit, followed by the sum over the world.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import MEASURED, RESULTS, parse_arguments, read_json, run_ranks, write_json, write_measured
from frontier_llm.comm import Meeting, all_reduce_, barrier, build_mesh, connect, disconnect
from frontier_llm.config import CommConfig
from frontier_llm.parallel.pipeline import Engine
from frontier_llm.parallel.stages import ActivationSpec
from frontier_llm.schedule import Action, Kind, Schedule, build, rule, simulate, simulate_one_in_flight
from frontier_llm.topology.grid import Grid

RANKS = 4
MESSAGE = (64, 1, 64)  # 16 KiB in fp32
PAGE = MEASURED / "schedules.md"
KEPT = RESULTS / "schedules_pp4.json"
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "interleaved-zb",
    "zb-v",
    "dualpipe-v",
    "v-half",
    "v-min",
)
OPTIMIZER_UNITS = 1.0
UNITS = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}


class Sleeps:
    """Acts as stage and as deferred work. A pass sleeps and computes nothing."""

    def __init__(self, pass_s: float) -> None:
        self.pass_s = pass_s
        self._deferred: list[float] | None = None

    def forward(self, x: Tensor | None, batch: Any) -> Tensor:
        """Stands for the forward pass of a stage."""
        time.sleep(self.pass_s)
        return _Pass.apply(torch.ones(MESSAGE, requires_grad=True) if x is None else x, self)

    def loss(self, x: Tensor | None, batch: Any) -> Tensor:
        """Stands for the forward pass of the last stage."""
        return self.forward(x, batch).sum()

    def backward(self) -> None:
        time.sleep(self.pass_s)
        if self._deferred is None:
            time.sleep(self.pass_s)
        else:
            self._deferred.append(self.pass_s)

    def defer(self) -> None:
        self._deferred = []

    def take_deferred(self) -> list[float]:
        taken = self._deferred
        self._deferred = None
        return taken or []

    def run(self, work: list[float]) -> None:
        time.sleep(sum(work))


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sleeps: Sleeps) -> Tensor:
        ctx.sleeps = sleeps
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.sleeps.backward()
        return gradient, None


def schedule_of(name: str, microbatches: int) -> Schedule:
    chunks = rule(name).chunks
    return build(name, RANKS, microbatches, 2 if 2 in chunks else 1)


def serve(rank: int, port: int, arguments: argparse.Namespace, results: multiprocessing.Queue) -> None:
    """Send the times at which this rank's steps end, by case."""
    torch.set_num_threads(1)
    connect(
        rank,
        RANKS,
        Meeting("127.0.0.1", port, 0, RANKS),
        "gloo",
        120.0,
    )
    seconds: dict[str, list[float]] = {}
    for name in SCHEDULES:
        schedule = schedule_of(name, arguments.microbatches)
        comm = CommConfig(in_flight=arguments.in_flight)
        mesh = build_mesh(
            Grid(1, RANKS, 1),
            rank,
            schedule.placement,
            False,
            120.0,
            comm,
        )
        sleeps = Sleeps(arguments.unit_ms / 1e3 / schedule.chunks)
        positions = schedule.placement.positions_of(rank)
        stages = [sleeps.loss if position == schedule.placement.last else sleeps.forward for position in positions]
        spec = ActivationSpec(MESSAGE, torch.float32, torch.device("cpu"))
        engine = Engine(
            schedule,
            stages,
            mesh,
            sleeps,
            spec,
        )
        numbers = torch.zeros(4, dtype=torch.float64)
        barrier(mesh.world)
        ended = []
        for _ in range(arguments.steps + 1):
            engine.run(lambda microbatch: microbatch)
            ended.append(time.perf_counter())
            all_reduce_(numbers, mesh.world)
            time.sleep(arguments.unit_ms / 1e3)  # stands for the optimizer
        seconds[name] = ended
    results.put((rank, seconds))
    barrier(mesh.world)
    disconnect()


def simulated(schedule: Schedule, in_flight: str) -> float:
    """Return the simulated time from one step's end to the next one's, in units of `--unit-ms`."""

    def duration(rank: int, action: Action) -> float:
        return UNITS[action.kind] / schedule.chunks

    if in_flight == "one":
        timeline = simulate_one_in_flight(schedule, duration, 0.0, waits=True)
    else:
        timeline = simulate(schedule, duration)
    return timeline.makespan_s + OPTIMIZER_UNITS


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    of_ranks = run_ranks(RANKS, serve, arguments, results=RANKS)
    _, seconds = zip(*sorted(of_ranks, key=lambda row: row[0]), strict=True)
    rows = []
    for name in SCHEDULES:
        ended = [max(ranks) for ranks in zip(*(of[name] for of in seconds), strict=True)]
        steps = [after - before for before, after in itertools.pairwise(ended)]
        units = simulated(schedule_of(name, arguments.microbatches), arguments.in_flight)
        row = {
            "schedule": name,
            "in_flight": arguments.in_flight,
            "simulated_ms": units * arguments.unit_ms,
        }
        rows.append(
            row
            | {
                "median_ms": statistics.median(steps) * 1e3,
                "fastest_ms": min(steps) * 1e3,
                "steps": len(steps),
            }
        )
    return rows


def lines(kept: dict[str, Any]) -> Iterator[str]:
    """Yield the table for one and for many communications in flight, in the order of the simulated times."""
    yield (
        f"## Measured\n\n{RANKS} pipeline ranks run in {RANKS} processes that share two cores, with "
        f"{kept['microbatches']} microbatches. F, I, W of a complete stage and the optimizer take "
        f"{kept['unit_ms']:g} ms each."
    )
    yield (
        "Engine, messages and waiting are real, and a pass of a stage is a sleep. So the table measures the order of "
        "actions, not arithmetic."
    )
    yield f"Milliseconds from step to step, load of the machine {kept['load']:.0f}:\n"
    yield "| schedule | in flight | simulated | fastest measured | median measured | fastest / simulated |"
    yield "|---|---|--:|--:|--:|--:|"
    for row in sorted(kept["rows"], key=lambda row: (row["in_flight"], row["simulated_ms"])):
        times = (
            f"{row['simulated_ms']:.0f} | {row['fastest_ms']:.0f} | {row['median_ms']:.0f} | "
            f"{row['fastest_ms'] / row['simulated_ms']:.3f}"
        )
        yield f"| {row['schedule']} | {row['in_flight']} | {times} |"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-flight", choices=["one", "many"], default="many")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--unit-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parse_arguments(parser, smoke=["--unit-ms", "1", "--steps", "1", "--microbatches", "8"])
    kept: dict[str, Any] = read_json(KEPT, {"rows": []})
    rows = [row for row in kept["rows"] if row["in_flight"] != arguments.in_flight] + measure(arguments)
    kept = {
        "microbatches": arguments.microbatches,
        "unit_ms": arguments.unit_ms,
        "load": os.getloadavg()[0],
        "rows": rows,
    }
    write_json(KEPT, kept, arguments.smoke)
    write_measured(PAGE, __file__, "\n".join(lines(kept)), arguments.smoke)


if __name__ == "__main__":
    main()
