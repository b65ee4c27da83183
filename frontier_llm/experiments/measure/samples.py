"""Micro-benchmarks of this computer with a model's shapes and a run's ops, to which `calibration` fits constants.

All ranks measure at the same time, because ranks of one computer share its cores, caches and memory. A single-threaded
rank on a CPU times its kernels by its own CPU clock. If there are more ranks than cores, wall times of short samples
would contain random waiting for a core. This waiting is measured once, with loops longer than the scheduler's time
slices (`contention`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from frontier_llm.blueprint.items import WeightGradients
from frontier_llm.comm import Mesh, all_reduce_, barrier, maximum, serial_mesh
from frontier_llm.config import RunConfig
from frontier_llm.config.schema import ParallelConfig
from frontier_llm.data.loader import open_batches
from frontier_llm.experiments.measure.calibration import Samples, steps_config
from frontier_llm.experiments.measure.link_tables import PLANNED
from frontier_llm.experiments.measure.links import operation_on
from frontier_llm.experiments.measure.op_cases import (
    CASES,
    Shapes,
    gemm_shapes,
    grouped_calls,
    grouped_shapes,
    operands,
    product_calls,
)
from frontier_llm.experiments.measure.timing import cpu_s, kernel_s, median_s, wall_s
from frontier_llm.ops import AdamWUpdate, select_run_ops, working_dtype
from frontier_llm.ops.torch_linear import weight_gradient_method
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import build_state
from frontier_llm.training.memory import peak_resident_bytes, rank_bytes
from frontier_llm.training.step import train_step

MESSAGE_BYTES = tuple(2**power for power in range(10, 25, 2))  # 1 KiB … 16 MiB.
# Elements of the measured copy. The optimizer's update has a quarter of them. Both need more memory than the caches
# have. On a GPU both also take longer than a launch: an H200 copies 32 MiB while its host launches two kernels.
COPY_ELEMENTS = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
# Number of tiny operations in the call that measures dispatch. On a GPU timing.kernel_s queues this call ten times.
TINY_OPERATIONS = {"cpu": 2000, "cuda": 200}
# benchmark steps: (size relative to the run's microbatch, number of microbatches); from these three the times per
# token, per microbatch and per step can be separated
STEPS = ((1.0, 1), (1.0, 3), (0.25, 3))
# the same for steps over several ranks; the two steps have different compute times between synchronisations
JOINT_STEPS = ((1.0, 1), (0.25, 2))
LONG_S = 0.06  # seconds of a loop for `contention`, long enough that time slices of 3 ms are equal for all ranks


def measure(config: RunConfig, mesh: Mesh, device: torch.device, memory_bytes: float, repeats: int = 5) -> Samples:
    """Return all samples of this rank. Collective over the world."""
    bench = _Bench(config, mesh, device, repeats)
    on_cpu = device.type == "cpu"
    bench.surplus_bytes = peak_resident_bytes() if on_cpu else 0  # measured before any tensor of a model exists
    samples = Samples(mesh.world.size, device.type, config.precision.dtype, memory_bytes, tensor=mesh.tp.size)
    samples.weight_gradients = bench.weight_gradients()
    samples.contention, bench.stretch = bench.contention()
    for tp in sorted({1, mesh.tp.size}):
        for B in sorted({bench.microbatch(share) for share, _ in STEPS}):
            samples.gemm += bench.products(B, tp)
            samples.grouped += bench.grouped_products(B, tp)
            samples.attention.append(bench.attention(B, tp))
    samples.elementwise_s = bench.elementwise_s(mesh.tp.size)
    samples.copy = bench.copy()
    one = torch.ones(1, device=device)
    tiny = TINY_OPERATIONS[device.type]
    samples.dispatch_s = bench.kernel_s(lambda: [one.add_(0.0) for _ in range(tiny)]) / tiny
    samples.adamw = bench.adamw()
    samples.collectives = list(bench.collectives())
    samples.steps = [bench.step(ParallelConfig(), serial_mesh(), share, m) for share, m in STEPS]
    if mesh.tp.size > 1:
        together = replace(serial_mesh(), tp=mesh.tp, world=replace(mesh.tp, name="world"))
        parallel = ParallelConfig(tensor=mesh.tp.size)
        samples.tensor_steps = [bench.step(parallel, together, share, m) for share, m in JOINT_STEPS]
    if mesh.world.size > 1:
        replicas = replace(mesh.world, name="dp")
        together = replace(serial_mesh(), dp=replicas, replicas=replicas, world=mesh.world)
        parallel = ParallelConfig(data=mesh.world.size, data_mode="fsdp")
        samples.sharded_steps = [bench.step(parallel, together, share, m) for share, m in JOINT_STEPS]
    samples.surplus_bytes = float(maximum([bench.surplus_bytes], mesh.world, device)[0])
    return samples


class _Bench:
    """Measurements of one rank. `stretch` is wall time / CPU time of a kernel while all ranks are busy."""

    def __init__(self, config: RunConfig, mesh: Mesh, device: torch.device, repeats: int) -> None:
        self.config = config
        self.model = config.model
        self.mesh = mesh
        self.device = device
        self.repeats = repeats
        self.stretch = 1.0
        self.dtype = working_dtype(config.precision.dtype)
        self.ops = select_run_ops(config, device.type, attends_in_parts=False)
        self.surplus_bytes = 0  # largest measured memory that belongs to no tensor
        self.by_cpu_time = device.type == "cpu" and torch.get_num_threads() == 1

    def microbatch(self, share: float) -> int:
        return max(1, round(self.config.batch.micro_batch * share))

    def wall_s(self, run: Callable[[], object]) -> float:
        """Return the median seconds of work that all ranks begin together."""
        return median_s(run, self.repeats, partial(wall_s, device=self.device), before=lambda: barrier(self.mesh.world))

    def kernel_s(self, run: Callable[[], object]) -> float:
        """Return the median seconds of work that needs no other rank. On a GPU, launches are not included."""
        barrier(self.mesh.world)
        if self.device.type == "cuda":
            return median_s(run, self.repeats, partial(kernel_s, device="cuda"))
        if not self.by_cpu_time:
            return self.wall_s(run)
        return median_s(run, self.repeats, cpu_s) * self.stretch

    def weight_gradients(self) -> WeightGradients:
        """Return how weight gradients are added. This package's kernel for CPUs adds them in the product."""
        if self.device.type == "cpu":
            return "in-product"
        return weight_gradient_method(self.dtype, self.device)

    def contention(self) -> tuple[list[tuple[int, float]], float]:
        """Return [(busy ranks, seconds of the same products)], and wall time over CPU time with all ranks busy."""
        world = self.mesh.world
        tokens = self.config.batch.micro_batch * self.model.sequence_length
        x, w, _ = operands(tokens, self.model.ffn_hidden, self.model.hidden, self.dtype, self.device)
        once_s = max(median_s(lambda: self.ops.linear(x, w, None), 3, partial(wall_s, device=self.device)), 1e-6)
        repeats = torch.tensor([LONG_S / once_s], dtype=torch.float64, device=self.device)
        if world.size > 1:
            all_reduce_(repeats, world)  # all ranks run the mean of the ranks' numbers of repetitions
        count = max(1, round(float(repeats) / world.size))

        def busy() -> None:
            for _ in range(count):
                self.ops.linear(x, w, None)

        counts = [2**power for power in range(world.size.bit_length()) if 2**power < world.size]
        seconds = [(k, self.wall_s(busy if world.rank < k else lambda: None)) for k in [*counts, world.size]]
        stretch = seconds[-1][1] / self.kernel_s(busy) if self.by_cpu_time else 1.0
        return seconds, max(stretch, 1.0)

    def products(self, B: int, tp: int) -> list[tuple[int, int, int, float]]:
        """Return (M, N, K, seconds) of every product of a layer and of the head.

        The products are forward, input gradient, and weight gradient added to an fp32 buffer.
        """
        rows = []
        for _, M, N, K, _ in gemm_shapes(self.model, B * self.model.sequence_length, tp):
            calls = product_calls(self.ops, *operands(M, N, K, self.dtype, self.device)).values()
            shapes = (M, N, K), (M, K, N), (N, K, M)
            with torch.no_grad():
                for (rows_out, columns, depth), (ours, _) in zip(shapes, calls, strict=True):
                    rows.append((rows_out, columns, depth, self.kernel_s(ours)))
        return rows

    def grouped_products(self, B: int, tp: int) -> list[tuple[int, int, int, int, float]]:
        """Return (rows per expert, N, K, experts, seconds) of the experts' products: forward and both gradients."""
        rows = []
        for shape in grouped_shapes(self.model, B * self.model.sequence_length, tp):
            with torch.no_grad():
                for product_shape, call in grouped_calls(self.ops, shape, self.dtype, self.device):
                    rows.append((*product_shape, self.kernel_s(call)))
        return rows

    def attention(self, B: int, tp: int) -> tuple[int, int, int, int, float, float]:
        case = CASES["attention"](self.ops, Shapes(self.model, B, self.dtype, self.device, tp))
        S = self.model.sequence_length
        D = self.model.dim_per_head
        a = self.model.heads // tp
        forward_s = self.kernel_s(partial(case.ours, *case.inputs))
        both_s = self.kernel_s(case.ways()["ours"])
        return B, a, S, D, forward_s, max(both_s - forward_s, 0.5 * forward_s)

    def elementwise_s(self, tp: int) -> float:
        """Return the seconds of one layer's forward norms, activation and residual."""
        model = self.model
        shapes = Shapes(self.model, self.config.batch.micro_batch, self.dtype, self.device, tp)
        norm = "rms_norm" if model.norm == "rmsnorm" else "layer_norm"
        activation = "swiglu" if model.gated else model.activation
        cases = [CASES[name](self.ops, shapes) for name in (norm, "add_norm", activation)]
        x = torch.randn(shapes.rows, model.hidden, dtype=self.dtype, device=self.device)

        @torch.no_grad()
        def layer() -> None:
            for case in cases:
                case.ours(*case.inputs)
            x.add(x)

        return self.kernel_s(layer)

    def copy(self) -> tuple[float, float]:
        """Return (bytes read and written, seconds) of a copy in memory."""
        source, target = (torch.zeros(COPY_ELEMENTS[self.device.type], device=self.device) for _ in range(2))
        return 2.0 * source.numel() * 4, self.kernel_s(lambda: target.copy_(source))

    def adamw(self) -> tuple[float, float]:
        """Return (elements, seconds) of an AdamW update."""
        size = COPY_ELEMENTS[self.device.type] // 4
        master, gradient, first, second = (torch.zeros(size, device=self.device) for _ in range(4))
        weight = torch.zeros(size, dtype=self.dtype, device=self.device)
        update = AdamWUpdate(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
        return float(size), self.kernel_s(lambda: self.ops.adamw_(master, gradient, first, second, weight, update))

    def collectives(self) -> Iterator[tuple[str, int, int, float]]:
        """Yield (operation, ranks, bytes, seconds), on all tensor-parallel groups at the same time and on all ranks."""
        axes = {axis.size: axis for axis in (self.mesh.tp, self.mesh.world) if axis.size > 1}
        for size, axis in sorted(axes.items()):
            for size_bytes, operation in product(MESSAGE_BYTES, PLANNED):
                call, _ = operation_on(axis, operation, size_bytes, self.device)
                yield operation, size, size_bytes, self.wall_s(call)

    def step(self, parallel: ParallelConfig, mesh: Mesh, share: float, m: int) -> tuple[int, int, float]:
        """Return (sequences per microbatch, microbatches, seconds) of a training step over the ranks of `mesh`.

        Each replica processes `m` microbatches. A microbatch has `share` times the sequences of the run's microbatch.
        All ranks train at the same time.
        """
        config = steps_config(self.config, parallel, self.microbatch(share), m)
        batches = open_batches(config, mesh.dp.rank, mesh.dp.size)
        if self.device.type == "cuda":  # the peak of memory then contains the allocator's slack of only this step
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        state = build_state(config, make_plan(config, mesh.world.size), mesh, self.device, batches)
        # On a GPU, `kernel_s` cannot time a training step: it queues ten calls, and in a step the host waits for the
        # GPU.
        clock = self.kernel_s if mesh.world.size == 1 and self.device.type == "cpu" else self.wall_s
        seconds = clock(lambda: train_step(state))
        if self.device.type == "cuda":
            used, allocated, _ = rank_bytes(self.device)
            self.surplus_bytes = max(self.surplus_bytes, used - allocated)
        return config.batch.micro_batch, m, seconds
