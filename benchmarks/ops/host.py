"""Measures the host's time per kernel launch, layer, microbatch and step. A GPU that needs less time waits for its
host.

    OMP_NUM_THREADS=1 python -m benchmarks.ops.host [--rounds 40] [--dtype fp32]
    python -m benchmarks.ops.host --limit MS    # models that the host limits, at MS per layer and microbatch
    python -m benchmarks.ops.host --launches MODEL [MODEL…]    # kernel launches of a layer, by operation

Launches go through all layers of the program to a driver that only records them (tests/harness/fake_driver.c). The
harness adds 0.1 us per argument, and a real driver adds its own time. Steps are measured on the CPU with a model that
is so small (H32, S16) that computing is a minor part. The costs of layers, microbatches and steps follow from the
differences between models of 2 and 10 layers with 2 and 10 microbatches. Times are CPU microseconds of the process,
median and best of the rounds. `--limit` is answered by the cost model.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import parse_arguments
from frontier_llm.blueprint.layout import layout_of
from frontier_llm.config import RunConfig, load_model, load_run
from frontier_llm.config.load import build
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.ops import Scores
from frontier_llm.ops.gpu import GpuOps
from frontier_llm.planner.costs.seconds import times
from frontier_llm.planner.costs.time import layer_s
from frontier_llm.training.join import joined_state
from frontier_llm.training.step import train_step
from tests.harness.fake_gpu import fake_gpu
from tests.harness.launches import of_a_layer, without_numbers

LAUNCHES = 500  # launches that are timed together
# Numbers of layers and of microbatches.
FEW = 2
MANY = 10
MODELS = (
    ("mpt-125m", 1),
    ("mpt-350m", 1),
    ("mpt-1b", 1),
    ("mpt-3b", 1),
    ("llama-2-7b", 1),
    ("llama-2-7b", 8),
    ("gpt-22b", 8),
    ("llama-2-70b", 8),
    ("gpt-175b", 8),
    ("gpt-1t", 8),
)
TINY = ("hidden=32", "heads=2", "ffn_hidden=64", "vocab_size=64", "sequence_length=16")


def microseconds(work: Callable[..., object], *arguments: Any, calls: int = 1) -> float:
    """Return the CPU time of one call in microseconds."""
    begin = time.process_time()
    for _ in range(calls):
        work(*arguments)
    return (time.process_time() - begin) / calls * 1e6


def recorded_launches(kernels: Any) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """Return the launches of a few ops' forward and backward, and the number of their arguments, by kernel."""
    calls: dict[str, Callable[[], None]] = {}
    counts: dict[str, int] = {}
    launch = kernels.launch

    def record(kernel: str, *rest: Any, **arguments: Any) -> None:
        calls[kernel], counts[kernel] = partial(launch, kernel, *rest, **arguments), len(arguments)
        calls[kernel]()

    kernels.launch, ops = record, GpuOps(kernels)
    x_SBF, q_SBaD = (
        torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((16, 2, 64), (64, 1, 2, 64))
    )
    weight = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    outputs = (
        ops.layer_norm(x_SBF, weight, weight, 1e-5),
        ops.gelu(x_SBF, weight, False),
        ops.attention(q_SBaD, q_SBaD, q_SBaD, Scores(0.1)),
    )
    for output in outputs:
        output.sum().backward()
    kernels.launch = launch
    return calls, counts


def bench_launches(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, fake_gpu("gfx90a", Path(folder)) as (kernels, _, _):
        calls, counts = recorded_launches(kernels)
        times: dict[str, list[float]] = {kernel: [] for kernel in calls}
        for _, (kernel, call) in product(range(rounds), calls.items()):
            times[kernel].append(microseconds(call, calls=LAUNCHES))
    for kernel, measured in times.items():
        print(
            f"{kernel:20} {counts[kernel]:2} arguments: {median(measured):5.1f} us per launch, best "
            f"{min(measured):5.1f}"
        )


def bench_steps(dtype: str, rounds: int) -> None:
    with ExitStack() as stack:
        states = {}
        for layers, microbatches in product((FEW, MANY), repeat=2):
            model = [f"model.{setting}" for setting in (*TINY, f"layers={layers}")]
            batch = [f"batch.global_batch={microbatches}", "batch.micro_batch=1"]
            config = load_run("bench", [f"precision.dtype={dtype}", *batch, *model])
            states[layers, microbatches] = stack.enter_context(joined_state(config, None))
        times: dict[tuple[int, int], list[float]] = {key: [] for key in states}
        for turn, (key, state) in product(range(rounds + 3), states.items()):
            measured = microseconds(train_step, state)
            if turn >= 3:
                times[key].append(measured)
    for name, statistic in (("median", median), ("best", min)):
        us = {key: statistic(measured) for key, measured in times.items()}
        more = MANY - FEW
        layer = (us[MANY, MANY] - us[FEW, MANY] - us[MANY, FEW] + us[FEW, FEW]) / more**2
        microbatch = (us[FEW, MANY] - us[FEW, FEW]) / more - FEW * layer
        step = us[FEW, FEW] - FEW * microbatch - FEW**2 * layer
        print(
            f"{name} of {dtype}: {layer:.0f} us per layer and microbatch, {microbatch:.0f} per microbatch besides, "
            f"{step:.0f} per step besides"
        )


def print_launches(models: Sequence[str]) -> None:
    """Print a table of launches with a row for each model and direction."""
    print("| model | | launches | by operation |\n|---|---|--:|---|")
    with (
        tempfile.TemporaryDirectory() as folder,
        fake_gpu("gfx90a", Path(folder)) as (kernels, _, _),
        without_numbers(kernels),
    ):
        for model in models:
            counts = of_a_layer(kernels, load_model(model))
            for phase in ("forward", "backward"):
                by_name = {launch.name: count for launch, count in counts.items() if launch.phase == phase}
                named = ", ".join(name if count == 1 else f"{count} {name}" for name, count in sorted(by_name.items()))
                print(f"| {model} | {phase} | {sum(by_name.values())} | {named} |")


def print_limit(host_ms: float) -> None:
    """Print the device's time for a layer beside the host's time.

    The device computes forward and backward of one sequence of 2,048 tokens. The host's cost is set to 0 for it.
    """
    machines = {name: replace(rates(load_machine(name)), launch_s=0.0) for name in ("frontier", "h200")}
    print(
        f"| model | TP | {' | '.join(f'{name}, ms of the device | host {host_ms} ms' for name in machines)} "
        f"|\n|---|--:|--:|--:|--:|--:|"
    )
    for model, tp in MODELS:
        settings = {
            "parallel": {"tensor": tp, "sequence_parallel": tp > 1},
            "batch": {"global_batch": 1, "micro_batch": 1},
        }
        shape = load_model(model, {"sequence_length": 2048})
        layout = layout_of(
            build(
                RunConfig,
                {
                    "model": shape.model_dump(),
                    "precision": {"dtype": "bf16"},
                    **settings,
                },
            ),
            tp,
        )
        cells = []
        for machine in machines.values():
            device_ms = 1e3 * float(sum(layer_s(times(shape, layout, machine).block, layout, machine)))
            cells += [f"{device_ms:.2f}", f"{host_ms / device_ms:.0%}{' **limit**' if host_ms > device_ms else ''}"]
        print(f"| {model} | {tp} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--dtype", default="fp32", help="dtype of the tiny model's steps; the host's work does not depend on it"
    )
    parser.add_argument(
        "--limit", type=float, metavar="MS", help="only print the table of models for this host time in milliseconds"
    )
    parser.add_argument(
        "--launches", nargs="+", metavar="MODEL", help="only print the kernel launches of a layer of these models"
    )
    args = parse_arguments(parser, smoke=["--rounds", "1"])
    torch.set_num_threads(1)
    if args.limit or args.launches:
        print_limit(args.limit) if args.limit else print_launches(args.launches)
        return
    bench_launches(args.rounds)
    bench_steps(args.dtype, args.rounds)


if __name__ == "__main__":
    main()
