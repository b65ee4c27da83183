"""Measures how much accuracy is lost by sending gradients in 16 bits.

Runs one model with precision.gradient_wire full and bf16 side by side.

    python -m benchmarks.comm.gradient_wire [--ranks 2] [--steps 30] [key=value …]

Prints the relative error of the first step's summed gradient (L2, over all elements), both loss curves and their
difference. For comparison, a third run starts with weights that differ from the first run's by one rounding of fp32
(relative 6e-8).
"""

from __future__ import annotations

import argparse
import multiprocessing

import torch

from benchmarks.harness import TINY, parse_arguments, run_ranks
from frontier_llm.comm import Meeting, all_reduce_, barrier, build_mesh, connect, disconnect
from frontier_llm.config import load_run
from frontier_llm.data.loader import open_batches
from frontier_llm.optim import Zero
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import TrainState, build_state
from frontier_llm.training.step import train_step

RUNS = {
    "full": "full",
    "bf16": "bf16",
    "nudged": "full",
}


def build(arguments: argparse.Namespace, rank: int, wire: str) -> TrainState:
    config = load_run(
        arguments.run, [f"parallel.data={arguments.ranks}", f"precision.gradient_wire={wire}", *arguments.overrides]
    )
    plan = make_plan(config, arguments.ranks)
    mesh = build_mesh(
        plan.grid,
        rank,
        plan.placement,
        config.model.tied_embeddings,
        120.0,
        config.comm,
    )
    batches = open_batches(config, mesh.dp.rank, mesh.dp.size)
    return build_state(
        config,
        plan,
        mesh,
        torch.device("cpu"),
        batches,
    )


def own_gradients(state: TrainState) -> torch.Tensor:
    assert isinstance(state.optimizer, Zero)
    return torch.cat([bucket.own(bucket.gradients) for bucket in state.optimizer.buckets]).double()


def serve(rank: int, port: int, arguments: argparse.Namespace, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    connect(
        rank,
        arguments.ranks,
        Meeting("127.0.0.1", port, 0, arguments.ranks),
        "gloo",
        120.0,
    )
    states = {name: build(arguments, rank, wire) for name, wire in RUNS.items()}
    nudged = states["nudged"].optimizer
    assert isinstance(nudged, Zero)
    for kept in nudged.states:
        kept["master"] *= 1 + 2.0**-24 * torch.empty_like(kept["master"]).uniform_(
            -2, 2, generator=torch.Generator().manual_seed(rank)
        )
    losses: dict[str, list[float]] = {name: [] for name in states}
    gradients: dict[str, torch.Tensor] = {}
    for step in range(arguments.steps):
        for name, state in states.items():
            losses[name].append(train_step(state).loss)
            if step == 0:
                gradients[name] = own_gradients(state)  # the update reads the gradients and does not change them
    world = states["full"].mesh.world
    squares = torch.stack([(gradients["bf16"] - gradients["full"]).square().sum(), gradients["full"].square().sum()])
    error, whole = all_reduce_(squares, world).sqrt().tolist()
    if rank == 0:
        results.put((error / whole, losses))
    barrier(world)
    disconnect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--run", default="bench")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parse_arguments(parser, smoke=["--steps", "2", *TINY])
    [(error, losses)] = run_ranks(arguments.ranks, serve, arguments, timeout_s=3600)
    print(f"first gradient: relative error {error:.2e} (L2); bf16 rounds each summand but this rank's by up to 3.9e-3")
    print(f"{'step':>5}{'full':>10}{'bf16':>10}{'difference':>12}{'nudged':>12}")
    rows = list(zip(losses["full"], losses["bf16"], losses["nudged"], strict=True))
    for step, (full, narrow, nudged) in enumerate(rows, start=1):
        if step % max(1, arguments.steps // 10) == 0:
            print(f"{step:>5}{full:>10.4f}{narrow:>10.4f}{narrow - full:>12.1e}{nudged - full:>12.1e}")
    largest = [max(abs(row[index] - row[0]) for row in rows) for index in (1, 2)]
    print(
        f"largest difference of the loss in {arguments.steps} steps: {largest[0]:.1e} (bf16), {largest[1]:.1e} (nudged)"
    )


if __name__ == "__main__":
    main()
