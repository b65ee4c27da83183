"""Measures the host's time per kernel launch, layer, microbatch and step. A GPU that needs less time waits for its
host.

    OMP_NUM_THREADS=1 python -m benchmarks.ops.host [--rounds 40] [--dtype fp32]
    python -m benchmarks.ops.host --gpu-path [--rounds 40]    # the code that a GPU run executes, in five layouts
    python -m benchmarks.ops.host --limit MS    # models that the host limits, at MS per layer and microbatch
    python -m benchmarks.ops.host --launches MODEL [MODEL…]    # kernel launches of a layer, by operation

Launches go through the package's complete launch code to a driver that only records them (tests/harness/fake_driver.c).
The harness adds 0.1 us per argument, and a real driver adds its own time. Steps are measured on the CPU with a model
that is so small (H32, S16) that computing is a minor part. The costs of layers, microbatches and steps follow from the
differences between models of 2 and 10 layers with 2 and 10 microbatches. Times are CPU microseconds of the process,
median and best of the rounds. `--limit` measures nothing and uses the cost model.

`--gpu-path` runs steps with the launcher and the fake driver instead of the CPU's ops. Its layouts are dense layers at
TP1, at TP8 with sequence parallelism, and at CP4 with ring attention. Two further layouts have 8 experts (2 per token),
on one rank and at EP4. Collectives and messages go to torch's process group `fake`, which transfers nothing. Each
expert gets the same number of rows. Matrix products run on the CPU, with 16 tokens (4 at CP4). The paths are timed in
turn, so that their ratios do not depend on other load.
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

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness import parse_arguments
from frontier_llm.blueprint.layout import layout_of
from frontier_llm.comm import build_mesh, serial_mesh
from frontier_llm.config import RunConfig, load_model, load_run
from frontier_llm.config.load import build
from frontier_llm.data.loader import SampleBatch
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.ops import Ops, Scores, reference, torch_linear
from frontier_llm.ops.gpu import GpuOps
from frontier_llm.ops.prebuilt import Kernels
from frontier_llm.ops.providers import functions_of
from frontier_llm.planner.costs.seconds import times
from frontier_llm.planner.costs.time import layer_s
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import TrainState, build_state
from frontier_llm.training.join import joined_state
from frontier_llm.training.step import train_step
from tests.harness.fake_gpu import fake_gpu
from tests.harness.launches import of_a_layer

LAUNCHES = 500  # launches that are timed together
# Numbers of layers and of microbatches.
FEW = 2
MANY = 10
TP8 = {"tensor": 8, "sequence_parallel": True}
# Models and layouts of `--limit`.
MODELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("mpt-125m", "TP1", {}),
    ("mpt-350m", "TP1", {}),
    ("mpt-1b", "TP1", {}),
    ("mpt-3b", "TP1", {}),
    ("llama-2-7b", "TP1", {}),
    ("llama-2-7b", "TP8", TP8),
    ("llama-2-7b", "ring CP4", {"context": 4, "context_attention": "ring"}),
    ("mixtral-8x7b", "experts", {}),
    ("mixtral-8x7b", "experts EP4", {"data": 4, "expert": 4}),
    ("gpt-22b", "TP8", TP8),
    ("llama-2-70b", "TP8", TP8),
    ("gpt-175b", "TP8", TP8),
    ("gpt-1t", "TP8", TP8),
)
# Sizes that attention's kernels support, with eight heads for TP8.
GPU_TINY = ("hidden=128", "heads=8", "ffn_hidden=256", "vocab_size=128", "sequence_length=16")
GPU_WORLD = 8
EXPERTS = 8
MOE = (f"model.moe={{experts: {EXPERTS}, top_k: 2}}", "model.bias=false")
# Settings of the layouts whose GPU path is timed.
GPU_PATHS = {
    "GPU path, TP1": (),
    "GPU path, TP8": ("parallel.tensor=8", "parallel.sequence_parallel=true", "parallel.data=1"),
    "GPU path, ring CP4": ("parallel.context=4", "parallel.context_attention=ring", "parallel.data=1"),
    "GPU path, experts": MOE,
    "GPU path, experts EP4": (*MOE, "parallel.data=4", "parallel.expert=4"),
}
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


Case = tuple[str, int, int]  # path, layers, microbatches


def settings(path: str, dtype: str, shape: Sequence[str], more: Sequence[str] = ()) -> dict[Case, RunConfig]:
    """Return the runs of a tiny model whose step times give the costs of a layer, a microbatch and a step."""
    runs = {}
    replicas = 4 if "parallel.data=4" in more else 1
    for layers, microbatches in product((FEW, MANY), repeat=2):
        model = [f"model.{setting}" for setting in (*shape, f"layers={layers}")]
        batch = [f"batch.global_batch={microbatches * replicas}", "batch.micro_batch=1"]
        runs[path, layers, microbatches] = load_run("bench", [f"precision.dtype={dtype}", *batch, *model, *more])
    return runs


def print_costs(states: dict[Case, TrainState], rounds: int) -> None:
    """Time steps of all states in turn, and print the costs of each path."""
    times: dict[Case, list[float]] = {key: [] for key in states}
    for turn, (key, state) in product(range(rounds + 3), states.items()):
        measured = microseconds(train_step, state)
        if turn >= 3:
            times[key].append(measured)
    paths = dict.fromkeys(path for path, _, _ in states)
    for (name, statistic), path in product((("median", median), ("best", min)), paths):
        us = {key[1:]: statistic(measured) for key, measured in times.items() if key[0] == path}
        more = MANY - FEW
        layer = (us[MANY, MANY] - us[FEW, MANY] - us[MANY, FEW] + us[FEW, FEW]) / more**2
        microbatch = (us[FEW, MANY] - us[FEW, FEW]) / more - FEW * layer
        step = us[FEW, FEW] - FEW * microbatch - FEW**2 * layer
        print(
            f"{name} of {path}: {layer:.0f} us per layer and microbatch, {microbatch:.0f} per microbatch besides, "
            f"{step:.0f} per step besides"
        )


def bench_steps(dtype: str, rounds: int) -> None:
    with ExitStack() as stack:
        runs = settings(dtype, dtype, TINY)
        print_costs({key: stack.enter_context(joined_state(config, None)) for key, config in runs.items()}, rounds)


def fill_outputs_that_the_host_reads(kernels: Any) -> None:
    """Fill two outputs: the router's choices, so that each expert is chosen equally often, and the gradients' sums of
    squares.

    The fake driver leaves the outputs of kernels uninitialised.
    """
    launch = kernels.launch

    def launch_and_fill(kernel: str, *rest: Any, **arguments: Any) -> None:
        launch(kernel, *rest, **arguments)
        if kernel == "squares":
            arguments["partial"].fill_(1.0)
        if kernel == "route_forward":
            experts_Nk = arguments["experts"]
            experts_Nk.copy_(torch.arange(experts_Nk.numel()).view(experts_Nk.shape) % EXPERTS)

    kernels.launch = launch_and_fill


def bench_gpu_path(rounds: int) -> None:
    """Time the host's work of a GPU run in several layouts, and of a CPU run of the same model."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=GPU_WORLD)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        states: dict[Case, TrainState] = {}
        for key, config in settings("CPU ops, TP1", "bf16", GPU_TINY).items():
            states[key] = stack.enter_context(joined_state(config, None))
        kernels, _, _ = stack.enter_context(fake_gpu("gfx90a", folder))
        fill_outputs_that_the_host_reads(kernels)
        ops = gpu_ops(kernels)
        for path, layout in GPU_PATHS.items():
            for key, config in settings(path, "bf16", GPU_TINY, layout).items():
                states[key] = gpu_state(config, ops, microbatches=key[2])
        print_costs(states, rounds)


def gpu_ops(kernels: Kernels) -> Ops:
    """Return the ops of a GPU run, with this project's kernels where it has one."""
    functions = dict(functions_of(reference))
    functions.update(functions_of(torch_linear))
    functions.update(functions_of(GpuOps(kernels)))
    return Ops(**functions)


class Source:
    """Data source whose microbatches have one sequence, in which all tokens are equal."""

    reset_at_documents = False
    masks_targets = False

    def __init__(self, sequence: int, microbatches: int) -> None:
        self.microbatches = microbatches
        self._tokens = np.zeros((1, sequence + 1), np.int64)

    def microbatch(self, _step: int, _index: int) -> SampleBatch:
        return SampleBatch(self._tokens)

    def sample_ids(self, _step: int, _index: int) -> range:
        return range(1)


def gpu_state(config: RunConfig, ops: Ops, microbatches: int) -> TrainState:
    """Return the state of rank 0 of a run."""
    parallel = config.parallel
    world = max(parallel.tensor, parallel.context, parallel.expert)
    plan = make_plan(config, world)
    experts = config.model.moe is not None
    mesh = build_mesh(plan.grid, 0, plan.placement, experts=experts) if world > 1 else serial_mesh()
    source = Source(config.model.sequence_length, microbatches)
    return build_state(
        config,
        plan,
        mesh,
        torch.device("cpu"),
        source,
        ops=ops,
    )


def print_launches(models: Sequence[str]) -> None:
    """Print a table of launches with a row for each model and direction."""
    print("| model | | launches | by operation |\n|---|---|--:|---|")
    with (
        tempfile.TemporaryDirectory() as folder,
        fake_gpu("gfx90a", Path(folder)) as (kernels, _, _),
    ):
        for model in models:
            counts = of_a_layer(kernels, load_model(model))
            for phase in ("forward", "backward"):
                by_name = {name: count for (found, name), count in counts.items() if found == phase}
                named = ", ".join(name if count == 1 else f"{count} {name}" for name, count in sorted(by_name.items()))
                print(f"| {model} | {phase} | {sum(by_name.values())} | {named} |")


def print_limit(host_ms: float) -> None:
    """Print the device's time for a layer beside the host's time.

    The device computes forward and backward of one sequence of 2,048 tokens (8,192 tokens at CP4, so that each rank has
    2,048). In this prediction the host's time per launch is set to 0.
    """
    machines = {name: replace(rates(load_machine(name)), launch_s=0.0) for name in ("frontier", "h200")}
    print(
        f"| model | layout | {' | '.join(f'{name}, ms of the device | host {host_ms} ms' for name in machines)} "
        f"|\n|---|---|--:|--:|--:|--:|"
    )
    for model, name, parallel in MODELS:
        shape = load_model(model, {"sequence_length": 2048 * parallel.get("context", 1)})
        content = {
            "model": shape.model_dump(),
            "precision": {"dtype": "bf16"},
            "parallel": parallel,
            "batch": {"global_batch": parallel.get("data", 1), "micro_batch": 1},
        }
        degrees = (parallel.get(axis, 1) for axis in ("tensor", "context", "expert"))
        layout = layout_of(build(RunConfig, content), max(degrees))
        cells = []
        for machine in machines.values():
            device_ms = 1e3 * float(sum(layer_s(times(shape, layout, machine).block, layout, machine)))
            cells += [f"{device_ms:.2f}", f"{host_ms / device_ms:.0%}{' **limit**' if host_ms > device_ms else ''}"]
        print(f"| {model} | {name} | {' | '.join(cells)} |")


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
    parser.add_argument("--gpu-path", action="store_true", help="only time the code that a GPU run executes")
    args = parse_arguments(parser, smoke=["--rounds", "1"])
    torch.set_num_threads(1)
    if args.gpu_path:
        bench_gpu_path(args.rounds)
        return
    if args.limit or args.launches:
        print_limit(args.limit) if args.limit else print_launches(args.launches)
        return
    bench_launches(args.rounds)
    bench_steps(args.dtype, args.rounds)


if __name__ == "__main__":
    main()
