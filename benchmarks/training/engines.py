"""Compares native ZeRO, DeepSpeed and FSDP: the same run on the same ranks, in alternating steps, one thread per rank.

    python -m benchmarks.training.engines [RUN] [key=value …] [--engines native,zero-1,fsdp] [--rounds 6] [--json FILE]

Each engine has its own rank processes, which wait during the others' steps. All engines therefore run under the same
load, and the memory of each can be measured. Reports median step time, tokens per second of the job, and memory of the
largest rank, between steps and at its peak. The memory of a process that has imported everything but built nothing is
subtracted. On a CPU the values are host memory, and on GPUs torch's own count.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import platform
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import TINY, parse_arguments, write_json
from frontier_llm import log
from frontier_llm.comm import Meeting, barrier, build_mesh, connect
from frontier_llm.config import RunConfig, load_run
from frontier_llm.data.loader import open_batches
from frontier_llm.run.launchers import free_port
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import build_state
from frontier_llm.training.step import train_step
from frontier_llm.units import MIB

ENGINES = {
    "native": ["optimizer.engine=native", "parallel.zero=1"],
    "native, no ZeRO": ["optimizer.engine=native", "parallel.zero=0"],
    "zero-1": ["optimizer.engine=deepspeed", "parallel.zero=1"],
    "fsdp": ["parallel.data_mode=fsdp"],
}


def host_bytes(field: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def import_engine(config: RunConfig) -> None:
    """Import everything that the engine imports when it is built, so that this memory does not count as the model's."""
    if config.optimizer.engine == "deepspeed":
        from frontier_llm.optim.deepspeed_engine import _import

        _import(torch.device("cpu"))


def serve(rank: int, ranks: int, port: int, run: str, overrides: list[str], pipe: Connection) -> None:
    """Build the training state of one rank, then run a step for each request on the pipe."""
    torch.set_num_threads(1)
    log.set_rank(1, 2)  # log only as a rank other than 0, so that no process prints the run's messages
    config = load_run(run, overrides)
    connect(
        rank,
        ranks,
        Meeting("127.0.0.1", port, 0, ranks),
        "gloo",
        300.0,
    )
    plan = make_plan(config, ranks)
    mesh = build_mesh(
        plan.grid,
        rank,
        plan.placement,
        config.model.tied_embeddings,
        300.0,
        config.comm,
    )
    import_engine(config)
    batches = open_batches(config, mesh.dp.rank, mesh.dp.size)
    gc.collect()
    before = host_bytes("VmRSS")
    state = build_state(
        config,
        plan,
        mesh,
        torch.device("cpu"),
        batches,
    )
    for _ in range(2):
        train_step(state)
    gc.collect()
    held = host_bytes("VmRSS") - before
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    pipe.send("ready")
    while pipe.recv() == "step":
        barrier(mesh.world)
        begin_s = time.perf_counter()
        loss = train_step(state).loss
        pipe.send((time.perf_counter() - begin_s, loss))
    pipe.send((held, host_bytes("VmHWM") - before))


class Ranks:
    def __init__(self, name: str, run: str, overrides: list[str], ranks: int) -> None:
        self.name = name
        port = free_port()
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, ranks, port, run, [*overrides, *ENGINES[name]], theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def _ask(self, what: str) -> list:
        for pipe in self._pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self._pipes]

    def step(self) -> tuple[float, float]:
        """Return (seconds of the slowest rank, loss)."""
        answers = self._ask("step")
        return max(seconds for seconds, _ in answers), answers[0][1]

    def stop(self) -> tuple[int, int]:
        """Stop the processes. Returns (bytes between steps, bytes at the peak) of the largest rank."""
        answers = self._ask("stop")
        for process in self._processes:
            process.join()
        return max(held for held, _ in answers), max(peak for _, peak in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="bench")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--engines", default="native,zero-1,fsdp")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parse_arguments(parser, smoke=["bench", *TINY, "--engines", "native,fsdp", "--rounds", "1"])
    if "=" in args.run:
        args.run, args.overrides = "bench", [args.run, *args.overrides]
    config = load_run(args.run, args.overrides)
    parallel = config.parallel
    ranks = parallel.tensor * parallel.pipeline * (parallel.data or 2)
    groups = []
    for name in args.engines.split(","):
        groups.append(Ranks(name, args.run, args.overrides, ranks))
        print(f"{name} is built", file=sys.stderr, flush=True)
    seconds: dict[str, list[float]] = {group.name: [] for group in groups}
    losses: dict[str, list[float]] = {group.name: [] for group in groups}
    for number in range(args.rounds):
        for group in groups if number % 2 == 0 else groups[::-1]:
            step_s, loss = group.step()
            seconds[group.name].append(step_s)
            losses[group.name].append(loss)
    tokens = config.batch.global_batch * config.model.sequence_length
    rows: list[dict[str, Any]] = []
    for group in groups:
        held, peak = group.stop()
        step_s = statistics.median(seconds[group.name])
        rows.append(
            {
                "engine": group.name,
                "step_s": step_s,
                "tokens_per_s": tokens / step_s,
                "held_mib": held / MIB,
                "peak_mib": peak / MIB,
                "steps_s": seconds[group.name],
                "losses": losses[group.name],
            }
        )
    print(
        "| engine | step, s | tokens/s | held per rank, MiB | peak per rank, MiB | loss of the last step "
        "|\n|---|--:|--:|--:|--:|--:|"
    )
    for row in rows:
        print(
            f"| {row['engine']} | {row['step_s']:.3f} | {row['tokens_per_s']:.0f} | {row['held_mib']:.0f} | "
            f"{row['peak_mib']:.0f} "
            f"| {row['losses'][-1]:.5f} |"
        )
    if args.json:
        about = {
            "run": args.run,
            "overrides": args.overrides,
            "ranks": ranks,
            "torch": torch.__version__,
            "machine": platform.platform(),
        }
        write_json(args.json, {**about, "engines": rows})


if __name__ == "__main__":
    main()
