"""Fits the constants of a machine file to micro-benchmarks of this computer (`measure.samples`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from frontier_llm.blueprint.items import FlashCore, Product, WeightGradients
from frontier_llm.blueprint.layout import Layout, layout_of
from frontier_llm.blueprint.work import elementwise
from frontier_llm.config import ModelConfig, RunConfig
from frontier_llm.config.schema import ParallelConfig
from frontier_llm.experiments.measure.fit import Measurements, fit_two
from frontier_llm.machine.rates import Rates, Table
from frontier_llm.planner.costs.kernels import flash_s, memory_s, product_s
from frontier_llm.planner.costs.time import step_s

# log error of a sample beyond which its cost in the least-squares fit grows linearly instead of quadratically
KNEE = 0.03
PRIOR = 0.05**2  # weight in the fit of (log constant - log start)², relative to the squared log error of a sample


@dataclass
class Samples:
    """Results of the micro-benchmarks. The last entries of each tuple are times in seconds.

    Kernels are timed while all ranks are busy.
    """

    ranks: int
    device: str
    dtype: str
    memory_bytes: float  # memory of the device; on a CPU this rank's part of the computer's memory.
    # M, N, K, time; weight gradients include their accumulation
    gemm: list[tuple[int, int, int, float]] = field(default_factory=list)
    # B, heads, S, D, forward time, backward time
    attention: list[tuple[int, int, int, int, float, float]] = field(default_factory=list)
    elementwise_s: float = 0.0  # forward norms, activation and residual of one layer, with tp = `tensor`
    tensor: int = 1
    copy: tuple[float, float] = (1.0, 1.0)  # bytes read and written, time
    dispatch_s: float = 0.0  # time of one tiny operation, which is mostly dispatch
    adamw: tuple[float, float] = (1.0, 1.0)  # elements, time.
    # Operation, ranks, bytes of the complete tensor, time
    collectives: list[tuple[str, int, int, float]] = field(default_factory=list)
    contention: list[tuple[int, float]] = field(default_factory=list)  # busy ranks, time of one fixed set of products.
    # Sequences per microbatch, microbatches, time: a training step on one rank; all ranks run it independently
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    # the same as `steps`, but with tensor parallelism over `tensor` ranks
    tensor_steps: list[tuple[int, int, float]] = field(default_factory=list)
    # the same as `steps`, but on all ranks with sharded weights (FSDP)
    sharded_steps: list[tuple[int, int, float]] = field(default_factory=list)
    # memory that belongs to no tensor, on the rank with the most of it: runtime, communicators, and on a GPU the slack
    # of the allocator
    surplus_bytes: float = 0.0
    # rows per expert, N, K, experts, time: the grouped products of experts; empty for a model without experts
    grouped: list[tuple[int, int, int, int, float]] = field(default_factory=list)
    weight_gradients: WeightGradients | None = None  # how the samples in `gemm` were added to their buffer


def calibrated_rates(samples: Samples, config: RunConfig, start: Rates) -> Rates:
    """Return `start` with each constant that the samples determine replaced by its fitted value.

    Products: measured shapes keep their measured times. For other shapes, the best measured rate is the peak, and
    efficiency and k-half are fitted by least squares.

    Grouped products of experts: one factor relative to the rate of other products, fitted to the sum of all samples.

    Attention, elementwise ops and optimizer: the efficiency is chosen so that the planner's formula gives the measured
    time.

    Collectives: tables of the measured times. Latency and bandwidth of messages come from the smallest and the largest
    all-reduce.

    Training steps: `_fit_steps` and `_fit_waiting`.
    """
    shapes: dict[tuple[int, int, int], list[float]] = {}
    for rows, columns, inner, seconds in samples.gemm:
        shapes.setdefault((rows, columns, inner), []).append(seconds)
    measured = tuple((float(M), float(N), float(K), float(np.median(times))) for (M, N, K), times in shapes.items())
    M, N, K, seconds = np.array(measured).T
    fitted = replace(
        start,
        peak_flops=float(np.max(2 * M * N * K / seconds)),
        hbm_bytes_s=samples.copy[0] / samples.copy[1],
        memory_bytes=samples.memory_bytes,
        reserve_bytes=samples.surplus_bytes,
        hbm_efficiency=1.0,
        kernel_s=samples.dispatch_s,
        launch_s=0.0,
        host_executes=samples.device == "cpu",
        accumulate_bytes=0.0,  # measured weight gradients include the accumulation
        weight_gradients=samples.weight_gradients,
        node_devices=samples.ranks,
        microbatch_s=0.0,
        step_s=0.0,
        contention=_shares(samples),
    )
    fitted = replace(_fit_products(fitted, M, N, K, seconds), gemm_shapes=measured)
    fitted = _fit_attention(fitted, samples)
    layout = steps_layout(config, ParallelConfig(tensor=samples.tensor), config.batch.micro_batch, 1)
    fitted = _fit_elementwise(fitted, samples, config.model, layout)
    if samples.grouped:
        fitted = _fit_grouped(fitted, samples)
    if samples.collectives:
        fitted = _fit_collectives(fitted, samples)
    elements, update_s = samples.adamw
    fitted = replace(fitted, optimizer_bytes=update_s / elements * fitted.hbm_bytes_s * fitted.hbm_efficiency)
    return _fit_waiting(_fit_steps(fitted, samples, config), samples, config)


def _shares(samples: Samples) -> tuple[tuple[int, float], ...]:
    """Return (busy ranks, kernel time / kernel time with all ranks busy), made monotonic in the busy ranks."""
    busy, seconds = zip(*sorted(samples.contention), strict=True)
    rising = np.maximum.accumulate(seconds)
    return tuple((count, float(one / rising[-1])) for count, one in zip(busy, rising, strict=True))


def _fit_products(start: Rates, M: np.ndarray, N: np.ndarray, K: np.ndarray, seconds: np.ndarray) -> Rates:
    """Fit gemm_efficiency and gemm_k_half. The cost of a sample is quadratic in its log error, for outliers linear."""
    products = [Product(int(m), int(n), int(k)) for m, n, k in zip(M, N, K, strict=True)]
    measurements = Measurements(
        start=replace(start, gemm_efficiency=1.0, gemm_k_half=64.0),
        constants=("gemm_efficiency", "gemm_k_half"),
        predicted_s=lambda numbers: np.array([product_s(product, numbers) for product in products]),
        measured_s=seconds,
        prior=PRIOR,
        knee=KNEE,
    )
    return fit_two(measurements)


def _fit_grouped(fitted: Rates, samples: Samples) -> Rates:
    """Fit grouped_share. A step has each measured product equally often, so the sums of their times are compared."""
    separate = replace(fitted, grouped_share=1.0)
    separate_s = sum(product_s(Product(M, N, K, experts), separate) for M, N, K, experts, _ in samples.grouped)
    return replace(fitted, grouped_share=separate_s / sum(seconds for *_, seconds in samples.grouped))


def _fit_attention(fitted: Rates, samples: Samples) -> Rates:
    forwards = []
    backwards = []
    for B, heads, S, D, forward_s, backward_s in samples.attention:
        ideal = replace(fitted, flash_efficiency=1.0, flash_backward=1.0, kernel_s=0.0)
        forward, backward = (flash_s(FlashCore(B, heads, S, S, D, backward), ideal) for backward in (False, True))
        forwards.append(forward / max(forward_s - fitted.kernel_s, 1e-9))
        backwards.append(backward / max(backward_s - 2 * fitted.kernel_s, 1e-9))
    efficiency = float(np.median(forwards))
    return replace(fitted, flash_efficiency=efficiency, flash_backward=float(np.median(backwards)) / efficiency)


def _fit_elementwise(fitted: Rates, samples: Samples, model: ModelConfig, layout: Layout) -> Rates:
    bare = memory_s(elementwise(model, layout, fitted, model.ffn_hidden)[0].moved_bytes, 0, fitted)
    measured = max(samples.elementwise_s - 6 * fitted.kernel_s, 1e-9)
    return replace(fitted, hbm_efficiency=float(min(bare / measured, 1.0)))


def _fit_collectives(fitted: Rates, samples: Samples) -> Rates:
    tables = tables_of(samples.collectives)
    sums = tables["all_reduce"]
    n = sums.rows[0]
    latency = sums.seconds[0][0]
    large = sums.seconds[0][-1]
    bus = 2 * (n - 1) / n * sums.sizes_bytes[-1] / max(large - latency, 1e-9)
    return replace(
        fitted,
        node_tables=tables,
        fabric_size=(2, max(samples.ranks, 3)),
        fabric_bytes_s=(bus, bus),
        fabric_latency_s=latency,
        fabric_hop_s=0.0,
    )


def tables_of(collectives: Sequence[tuple[str, int, int, float]]) -> dict[str, Table]:
    """Return operation → table of times, with those message sizes that were measured for every group size.

    If a case was measured twice, the first time counts.
    """
    times = {(operation, ranks, size): seconds for operation, ranks, size, seconds in reversed(collectives)}
    groups = sorted({ranks for _, ranks, _ in times})
    sizes = sorted(set.intersection(*({size for _, ranks, size in times if ranks == group} for group in groups)))
    return {
        operation: Table(
            tuple(map(float, groups)),
            tuple(map(float, sizes)),
            tuple(tuple(times[operation, ranks, size] for size in sizes) for ranks in groups),
        )
        for operation in sorted({operation for operation, _, _ in times})
    }


def _fit_steps(fitted: Rates, samples: Samples, config: RunConfig) -> Rates:
    """Fit the time of one-rank steps beyond the sum of their kernels with three non-negative constants.

    The first constant is a share of the kernels' time: a benchmark loop finds its operands in the cache, but a step
    must fetch them. The second constant is the host's time per operation, which grows with the number of microbatches
    but not with their size. The third constant is a fixed time per step.
    """
    columns = (lambda layout, bare: bare, _more(config.model, fitted, launch_s=1e-5), lambda layout, bare: 1e-2)
    share, launch, step = _fill(config.model, whole_steps(samples, config)[0], fitted, columns)
    slower = 1 + share
    return replace(
        fitted,
        gemm_efficiency=fitted.gemm_efficiency / slower,
        gemm_shapes=tuple((M, N, K, seconds * slower) for M, N, K, seconds in fitted.gemm_shapes),
        flash_efficiency=fitted.flash_efficiency / slower,
        hbm_efficiency=fitted.hbm_efficiency / slower,
        launch_s=launch * 1e-5,
        step_s=step * 1e-2,
    )


def _fit_waiting(fitted: Rates, samples: Samples, config: RunConfig) -> Rates:
    """Fit the waiting of ranks for each other: the time of multi-rank steps beyond compute and collectives.

    Collectives were measured with a common start, so their times contain no waiting. Ranks of a tensor-parallel step
    wait for each other many times in a layer. Two constants describe the waiting: a time per synchronisation, and a
    share of the compute between two synchronisations. The share is needed because ranks compute at unequal speed. If
    there are more ranks than cores, they also wait for each other's time slices.

    In steps with sharded weights, the remaining time is attributed to the collectives of the weights. Torch executes
    these collectives, and the table was measured with another transport.
    """
    _, tensor_steps, sharded_steps = whole_steps(samples, config)
    if tensor_steps:
        meeting, spread = _fill(
            config.model,
            tensor_steps,
            fitted,
            (_more(config.model, fitted, meeting_s=1e-4), _more(config.model, fitted, spread=0.1)),
        )
        fitted = replace(fitted, meeting_s=meeting * 1e-4, spread=spread * 0.1)
    if sharded_steps:
        (slowdown,) = _fill(
            config.model, sharded_steps, replace(fitted, sharded_slowdown=0.0), (_more(config.model, fitted),)
        )
        # The slowdown is at least 1, because torch's sockets are never faster than the transport of the table. A
        # disturbed sample can cause a lower fitted value.
        fitted = replace(fitted, sharded_slowdown=max(slowdown, 1.0))
    return fitted


Step = tuple[str, Layout, float]  # description, layout, measured seconds.
# (layout, step time in seconds without one cost) → seconds that one unit of this cost adds to the step
Extra = Callable[[Layout, float], float]


def _more(model: ModelConfig, numbers: Rates, **change: float) -> Extra:
    """Return a function that gives the increase of a step's time if `change` is applied to `numbers`."""
    changed = replace(numbers, **change)  # type: ignore[arg-type]
    return lambda layout, bare: float(step_s(model, layout, changed)) - bare


def _fill(model: ModelConfig, steps: Sequence[Step], known: Rates, extras: Sequence[Extra]) -> tuple[float, ...]:
    """Return the number of units of each cost in `extras` that best explains the measured time minus the time predicted
    with `known`.

    The result is the non-negative least-squares solution for relative errors.
    """
    bare = [float(step_s(model, layout, known)) for _, layout, _ in steps]
    columns = [
        [extra(layout, known_s) / seconds for extra in extras]
        for (_, layout, seconds), known_s in zip(steps, bare, strict=True)
    ]
    rest = [1 - known_s / seconds for (_, _, seconds), known_s in zip(steps, bare, strict=True)]
    return tuple(map(float, non_negative(np.array(columns), np.array(rest))))


def non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return argmin |a x - b| over x >= 0.

    Computes the least-squares solution of every subset of columns and returns the best non-negative one.
    """
    columns = a.shape[1]
    best = np.zeros(columns)
    best_error = float(b @ b)
    for chosen in (list(some) for size in range(1, columns + 1) for some in combinations(range(columns), size)):
        x = np.zeros(columns)
        x[chosen] = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
        error = float(np.sum((a @ x - b) ** 2))
        if np.all(x >= 0) and error < best_error:
            best = x
            best_error = error
    return best


def whole_steps(samples: Samples, config: RunConfig) -> tuple[list[Step], list[Step], list[Step]]:
    """Return the steps measured on one rank, on tensor-parallel groups, and on all ranks with sharded weights."""
    tensor = ParallelConfig(tensor=samples.tensor)
    sharded = ParallelConfig(data=samples.ranks, data_mode="fsdp")
    return (
        [
            (f"{m} x {B} sequences on one rank", steps_layout(config, ParallelConfig(), B, m), s)
            for B, m, s in samples.steps
        ],
        [
            (f"{m} x {B} over TP{samples.tensor}", steps_layout(config, tensor, B, m), s)
            for B, m, s in samples.tensor_steps
        ],
        [
            (
                f"{m} x {B} on each of {samples.ranks} ranks, with sharded weights",
                steps_layout(config, sharded, B, m),
                s,
            )
            for B, m, s in samples.sharded_steps
        ],
    )


def steps_config(config: RunConfig, parallel: ParallelConfig, B: int, m: int) -> RunConfig:
    """Return the configuration of a benchmark step on one tensor-parallel group or on `parallel.data` ranks.

    Each replica processes `m` microbatches of `B` sequences per step.
    """
    batch = config.batch.model_copy(update={"micro_batch": B, "global_batch": B * m * (parallel.data or 1)})
    return config.model_copy(update={"batch": batch, "parallel": parallel})


def steps_layout(config: RunConfig, parallel: ParallelConfig, B: int, m: int) -> Layout:
    """Return the layout of `steps_config`'s run."""
    return layout_of(steps_config(config, parallel, B, m), parallel.tensor * (parallel.data or 1))
