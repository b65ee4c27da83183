"""Micro-benchmarks of this machine with the model's own shapes and the run's own ops: what `planner.calibration` fits a machine file to.

Every rank measures at the same time, because ranks of one computer share its cores, caches and memory. A rank of one thread times
its kernels by its own CPU clock: where ranks outnumber cores, how long one waits for a core is measured once, by loops that are
long for the scheduler (`contention`), and not by chance in each short sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from frontier_llm.comm import Mesh, all_reduce_, barrier, serial_mesh, start_all_gather_into, start_reduce_scatter_into
from frontier_llm.comm.axis import Axis
from frontier_llm.config import RunConfig
from frontier_llm.config.schema import ParallelConfig
from frontier_llm.data.loader import open_batches
from frontier_llm.ops import AdamWUpdate, Ops, Scores, select_ops, working_dtype
from frontier_llm.topology import make_plan
from frontier_llm.train.bench import gemm_shapes
from frontier_llm.train.build import build_state
from frontier_llm.train.clock import median_s
from frontier_llm.train.step import train_step

MESSAGE_BYTES = tuple(2**power for power in range(10, 25, 2))  # 1 KiB … 16 MiB
COPY_ELEMENTS = 8 * 2**20
STEPS = ((1.0, 1), (1.0, 3), (0.25, 3))  # (share of the run's microbatch, microbatches): apart by tokens, by microbatches and by step
JOINT_STEPS = ((1.0, 1), (0.25, 2))  # the same, for steps over several ranks: apart by compute between two meetings
LONG_S = 0.06  # a loop that a scheduler's time slices (3 ms) share fairly


@dataclass
class Samples:
    """What was measured, in seconds; the fields' tuples end with the time. Kernel times are as when all ranks are busy."""

    ranks: int
    device: str
    dtype: str
    memory_bytes: float  # of the device, or this rank's part of the computer's memory
    gemm: list[tuple[int, int, int, float]] = field(default_factory=list)  # M, N, K; weight gradients include their accumulation
    attention: list[tuple[int, int, int, int, float, float]] = field(default_factory=list)  # B, heads, S, D, forward, backward
    elementwise_s: float = 0.0  # forward norms, activation and residual of one layer, tp = `tensor`
    tensor: int = 1
    copy: tuple[float, float] = (1.0, 1.0)  # bytes read and written
    dispatch_s: float = 0.0  # one tiny operation
    adamw: tuple[float, float] = (1.0, 1.0)  # elements
    collectives: list[tuple[str, int, int, float]] = field(default_factory=list)  # operation, ranks, bytes of the whole tensor
    contention: list[tuple[int, float]] = field(default_factory=list)  # busy ranks → seconds of the same products
    steps: list[tuple[int, int, float]] = field(default_factory=list)  # microbatch, microbatches: a training step, every rank for itself
    tensor_steps: list[tuple[int, int, float]] = field(default_factory=list)  # the same, by groups of `tensor` ranks
    sharded_steps: list[tuple[int, int, float]] = field(default_factory=list)  # the same, by all ranks with sharded weights


class _Timer:
    """Medians of `repeats`, begun together by all ranks; `stretch` turns CPU time into what a busy machine needs for it."""

    def __init__(self, mesh: Mesh, device: torch.device, repeats: int) -> None:
        self.mesh, self.device, self.repeats, self.stretch = mesh, device, repeats, 1.0
        self.by_cpu_time = device.type == "cpu" and torch.get_num_threads() == 1

    def wall(self, run: Callable[[], object]) -> float:
        return median_s(run, self.repeats, self.device, before=lambda: barrier(self.mesh.world))

    def kernel(self, run: Callable[[], object]) -> float:
        """Seconds of work that needs no other rank."""
        if not self.by_cpu_time:
            return self.wall(run)
        barrier(self.mesh.world)
        run()
        return median(self._cpu_s(run) for _ in range(self.repeats)) * self.stretch

    @staticmethod
    def _cpu_s(run: Callable[[], object]) -> float:
        begin = time.process_time()
        run()
        return time.process_time() - begin


def measure(config: RunConfig, mesh: Mesh, device: torch.device, memory_bytes: float, repeats: int = 5) -> Samples:
    """All samples of one rank; collective over the world."""
    dtype = working_dtype(config.precision.dtype)
    ops = select_ops(config.ops, device.type, dtype)
    samples = Samples(mesh.world.size, device.type, config.precision.dtype, memory_bytes, tensor=mesh.tp.size)
    timer = _Timer(mesh, device, repeats)
    samples.contention, timer.stretch = _contention(config, ops, timer, dtype)
    for tp in sorted({1, mesh.tp.size}):
        for B in sorted({_microbatch(config, share) for share, _ in STEPS}):
            samples.gemm += _products(config, ops, B, tp, dtype, timer)
            samples.attention.append(_attention(config, ops, B, tp, dtype, timer))
    samples.elementwise_s = _elementwise(config, ops, mesh.tp.size, dtype, timer)
    source = torch.zeros(COPY_ELEMENTS, device=device)
    target = torch.empty_like(source)
    samples.copy = (2.0 * source.numel() * 4, timer.kernel(lambda: target.copy_(source)))
    one = torch.ones(1, device=device)
    samples.dispatch_s = timer.kernel(lambda: [one.add_(0.0) for _ in range(2000)]) / 2000
    samples.adamw = _adamw(ops, dtype, timer)
    samples.collectives = list(_collectives(mesh, timer))
    samples.steps = [_step(config, ParallelConfig(), serial_mesh(), device, share, m, timer) for share, m in STEPS]
    if mesh.tp.size > 1:
        together = replace(serial_mesh(), tp=mesh.tp, world=replace(mesh.tp, name="world"))
        parallel = ParallelConfig(tensor=mesh.tp.size)
        samples.tensor_steps = [_step(config, parallel, together, device, share, m, timer) for share, m in JOINT_STEPS]
    if mesh.world.size > 1:
        together = replace(serial_mesh(), dp=replace(mesh.world, name="dp"), world=mesh.world)
        parallel = ParallelConfig(data=mesh.world.size, data_mode="fsdp")
        samples.sharded_steps = [_step(config, parallel, together, device, share, m, timer) for share, m in JOINT_STEPS]
    return samples


def _microbatch(config: RunConfig, share: float) -> int:
    return max(1, round(config.batch.micro_batch * share))


def _contention(config: RunConfig, ops: Ops, timer: _Timer, dtype: torch.dtype) -> tuple[list[tuple[int, float]], float]:
    """(busy ranks → seconds of the same loop of products, wall time over CPU time when all are busy)."""
    model, mesh, device = config.model, timer.mesh, timer.device
    tokens = config.batch.micro_batch * model.sequence_length
    x, w = (torch.randn(rows, model.hidden, dtype=dtype, device=device) for rows in (tokens, model.ffn_hidden))
    once = max(median_s(lambda: ops.linear(x, w, None), 3, device), 1e-6)
    repeats = torch.tensor([LONG_S / once], dtype=torch.float64, device=device)
    if mesh.world.size > 1:
        all_reduce_(repeats, mesh.world)  # the same amount of work everywhere
    count = max(1, round(float(repeats) / mesh.world.size))

    def busy() -> None:
        for _ in range(count):
            ops.linear(x, w, None)

    counts = [2**power for power in range(mesh.world.size.bit_length()) if 2**power < mesh.world.size]
    found = [(k, timer.wall(busy if mesh.world.rank < k else lambda: None)) for k in [*counts, mesh.world.size]]
    stretch = found[-1][1] / timer.kernel(busy) if timer.by_cpu_time else 1.0
    return found, max(stretch, 1.0)


def _products(config: RunConfig, ops: Ops, B: int, tp: int, dtype: torch.dtype, timer: _Timer) -> list[tuple[int, int, int, float]]:
    """Every product of a layer and of the head: forward, input gradient, and weight gradient added to an fp32 buffer."""
    found = []
    for _, M, N, K, _ in gemm_shapes(config.model, B * config.model.sequence_length, tp):
        x, w, g = (torch.randn(shape, dtype=dtype, device=timer.device) for shape in ((M, K), (N, K), (M, N)))
        total = torch.zeros(N, K, device=timer.device)
        products: tuple[tuple[int, int, int, Callable[[], object]], ...] = (
            (M, N, K, lambda: ops.linear(x, w, None)),  # noqa: B023
            (M, K, N, lambda: ops.linear_input_gradient(g, w)),  # noqa: B023
            (N, K, M, lambda: ops.accumulate_weight_gradient_(total, g, x)),  # noqa: B023
        )
        with torch.no_grad():
            found += [(rows, columns, inner, timer.kernel(product)) for rows, columns, inner, product in products]
    return found


def _attention(config: RunConfig, ops: Ops, B: int, tp: int, dtype: torch.dtype, timer: _Timer) -> tuple[int, int, int, int, float, float]:
    model = config.model
    S, D, a, g = model.sequence_length, model.dim_per_head, model.heads // tp, model.num_kv_heads // tp
    q, k, v = (torch.randn(S, B, heads, D, dtype=dtype, device=timer.device, requires_grad=True) for heads in (a, g, g))

    def forward() -> Any:
        return ops.attention(q, k, v, Scores(D**-0.5))

    grad = torch.randn_like(forward())
    forward_s = timer.kernel(forward)
    both_s = timer.kernel(lambda: torch.autograd.backward(forward(), grad))
    return B, a, S, D, forward_s, max(both_s - forward_s, 0.5 * forward_s)


def _elementwise(config: RunConfig, ops: Ops, tp: int, dtype: torch.dtype, timer: _Timer) -> float:
    model, device = config.model, timer.device
    tokens = (model.sequence_length, config.batch.micro_batch)
    x, residual = (torch.randn(*tokens, model.hidden, dtype=dtype, device=device) for _ in range(2))
    weight = torch.ones(model.hidden, dtype=dtype, device=device)
    inner = torch.randn(*tokens, (2 if model.gated else 1) * model.ffn_hidden // tp, dtype=dtype, device=device)

    def layer() -> None:
        if model.norm == "rmsnorm":
            ops.rms_norm(x, weight, model.norm_eps)
        else:
            ops.layer_norm(x, weight, None, model.norm_eps)
        ops.add_norm(x, residual, weight, None, model.norm_eps, model.norm)
        if model.gated:
            ops.swiglu(inner.unflatten(-1, (2, -1)))
        else:
            ops.gelu(inner, None, model.activation == "gelu_tanh")
        x.add(residual)

    return timer.kernel(layer)


def _adamw(ops: Ops, dtype: torch.dtype, timer: _Timer) -> tuple[float, float]:
    size = COPY_ELEMENTS // 4
    master, gradient, first, second = (torch.zeros(size, device=timer.device) for _ in range(4))
    weight = torch.zeros(size, dtype=dtype, device=timer.device)
    update = AdamWUpdate(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
    return float(size), timer.kernel(lambda: ops.adamw_(master, gradient, first, second, weight, update))


def _collectives(mesh: Mesh, timer: _Timer) -> Iterator[tuple[str, int, int, float]]:
    """Each operation on all groups of tp at once, and on the whole world."""
    axes: dict[int, Axis] = {axis.size: axis for axis in (mesh.tp, mesh.world) if axis.size > 1}
    for size, axis in sorted(axes.items()):
        for whole_bytes in MESSAGE_BYTES:
            part = torch.zeros(whole_bytes // 4 // size, device=timer.device)
            whole = torch.zeros(part.numel() * size, device=timer.device)
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": lambda: all_reduce_(whole, axis),  # noqa: B023
                "reduce_scatter": lambda: start_reduce_scatter_into(part, whole, axis).wait(),  # noqa: B023
                "all_gather": lambda: start_all_gather_into(whole, part, axis).wait(),  # noqa: B023
            }
            for operation, call in calls.items():
                yield operation, size, whole_bytes, timer.wall(call)


def _step(
    config: RunConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    device: torch.device,
    share: float,
    m: int,
    timer: _Timer,
) -> tuple[int, int, float]:
    """A training step of `m` microbatches per replica, of the run's sequences times `share`, over the ranks of `mesh`; all ranks work."""
    B = _microbatch(config, share)
    batch = config.batch.model_copy(update={"micro_batch": B, "global_batch": B * m * mesh.dp.size})
    config = config.model_copy(update={"batch": batch, "parallel": parallel})
    batches = open_batches(config, mesh.dp.rank, mesh.dp.size)
    assert batches is not None
    state = build_state(config, make_plan(config, mesh.world.size), mesh, device, batches)
    return B, m, (timer.wall if mesh.world.size > 1 else timer.kernel)(lambda: train_step(state))
