"""Micro-benchmarks → constants: each from the sample that shows it. `calibration_output` writes them down."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Protocol

import numpy as np

from frontier_llm.config import RunConfig
from frontier_llm.config.schema import ParallelConfig
from frontier_llm.costs.kernels import flash_s, gemm_s
from frontier_llm.costs.layer import elementwise
from frontier_llm.costs.time import step_s
from frontier_llm.costs.workload import Workload, from_config
from frontier_llm.machine import Rates
from frontier_llm.machine.rates import Table
from frontier_llm.planner.fit import minimise, soften


class Measured(Protocol):
    """What `train.calibrate.Samples` carries."""

    ranks: int
    device: str
    dtype: str
    memory_bytes: float
    gemm: list[tuple[int, int, int, float]]
    attention: list[tuple[int, int, int, int, float, float]]
    elementwise_s: float
    tensor: int
    copy: tuple[float, float]
    dispatch_s: float
    adamw: tuple[float, float]
    collectives: list[tuple[str, int, int, float]]
    contention: list[tuple[int, float]]
    steps: list[tuple[int, int, float]]
    tensor_steps: list[tuple[int, int, float]]
    sharded_steps: list[tuple[int, int, float]]


def calibrated_rates(samples: Measured, config: RunConfig, start: Rates) -> Rates:
    """`start` with every constant that the samples show.

    Products: the measured shapes themselves, and for others the best rate seen with efficiency and k-half by least squares.
    Attention, elementwise, optimizer: the efficiency that makes the formula give the measured time. Collectives: tables, and the
    latency and bandwidth of messages from the smallest and the largest all-reduce. Whole steps: see `_fit_steps`.
    """
    shapes: dict[tuple[int, int, int], list[float]] = {}
    for rows, columns, inner, seconds in samples.gemm:
        shapes.setdefault((rows, columns, inner), []).append(seconds)
    products = tuple((float(M), float(N), float(K), float(np.median(times))) for (M, N, K), times in shapes.items())
    M, N, K, seconds = np.array(products).T
    found = replace(
        start,
        peak_flops=float(np.max(2 * M * N * K / seconds)),
        hbm_bytes_s=samples.copy[0] / samples.copy[1],
        memory_bytes=samples.memory_bytes,
        hbm_efficiency=1.0,
        kernel_s=samples.dispatch_s,
        launch_s=0.0,
        host_executes=samples.device == "cpu",
        accumulate_bytes=0.0,  # the measured weight gradients include it
        node_devices=samples.ranks,
        microbatch_s=0.0,
        step_s=0.0,
        contention=_shares(samples),
    )
    found = replace(_fit_products(found, M, N, K, seconds), gemm_shapes=products)
    found = _fit_attention(found, samples)
    found = _fit_elementwise(found, samples, workload_of(config, samples.tensor, config.batch.micro_batch, 1))
    if samples.collectives:
        found = _fit_collectives(found, samples)
    elements, update_s = samples.adamw
    found = replace(found, optimizer_bytes=update_s / elements * found.hbm_bytes_s * found.hbm_efficiency)
    return _fit_waiting(_fit_steps(found, samples, config), samples, config)


def _shares(samples: Measured) -> tuple[tuple[int, float], ...]:
    """Busy ranks → time of their kernels over the time when all are busy; never shorter with more of them busy."""
    busy, seconds = zip(*sorted(samples.contention), strict=True)
    rising = np.maximum.accumulate(seconds)
    return tuple((count, float(one / rising[-1])) for count, one in zip(busy, rising, strict=True))


def _fit_products(found: Rates, M: np.ndarray, N: np.ndarray, K: np.ndarray, seconds: np.ndarray) -> Rates:
    def changed(x: np.ndarray) -> Rates:
        return replace(found, gemm_efficiency=float(min(np.exp(x[0]), 1.0)), gemm_k_half=float(64 * np.exp(x[1])))

    x = minimise(lambda x: np.concatenate([soften(np.log(gemm_s(M, N, K, changed(x)) / seconds)), 0.05 * x]), 2, 60)
    return changed(x)


def _fit_attention(found: Rates, samples: Measured) -> Rates:
    forwards, backwards = [], []
    for B, heads, S, D, forward_s, backward_s in samples.attention:
        forward, backward = flash_s(B, heads, S, D, replace(found, flash_efficiency=1.0, flash_backward=1.0, kernel_s=0.0))
        forwards.append(float(forward) / max(forward_s - found.kernel_s, 1e-9))
        backwards.append(float(backward) / max(backward_s - 2 * found.kernel_s, 1e-9))
    efficiency = float(np.median(forwards))
    return replace(found, flash_efficiency=efficiency, flash_backward=float(np.median(backwards)) / efficiency)


def _fit_elementwise(found: Rates, samples: Measured, workload: Workload) -> Rates:
    bare = float(elementwise(workload, replace(found, kernel_s=0.0))[0])
    measured = max(samples.elementwise_s - 6 * found.kernel_s, 1e-9)
    return replace(found, hbm_efficiency=float(min(bare / measured, 1.0)))


def _fit_collectives(found: Rates, samples: Measured) -> Rates:
    times = {(operation, ranks, size): seconds for operation, ranks, size, seconds in samples.collectives}
    operations, groups, sizes = (sorted({key[0] for key in times}), sorted({key[1] for key in times}), sorted({key[2] for key in times}))
    tables = {
        operation: Table(
            tuple(map(float, groups)),
            tuple(map(float, sizes)),
            tuple(tuple(times[operation, ranks, size] for size in sizes) for ranks in groups),
        )
        for operation in operations
    }
    n, latency, large = groups[0], times["all_reduce", groups[0], sizes[0]], times["all_reduce", groups[0], sizes[-1]]
    bus = 2 * (n - 1) / n * sizes[-1] / max(large - latency, 1e-9)
    return replace(
        found,
        node_tables=tables,
        fabric_size=(2, max(samples.ranks, 3)),
        fabric_bytes_s=(bus, bus),
        fabric_latency_s=latency,
        fabric_hop_s=0.0,
    )


def _fit_steps(found: Rates, samples: Measured, config: RunConfig) -> Rates:
    """What whole steps on one rank take beyond the sum of their kernels, as three constants that act differently.

    A share of the kernels' time (operands that a loop of one kernel finds in the cache, a step must fetch), the host's time per
    operation (grows with microbatches, not with their size), and a fixed time per step. Least squares, none below zero.
    """
    rows, rest = [], []
    for B, m, seconds in samples.steps:
        w = workload_of(config, 1, B, m)
        kernels = float(step_s(w, found))
        operations = (float(step_s(w, replace(found, launch_s=1e-3))) - kernels) / 1e-3
        rows.append((kernels / seconds, operations * 1e-5 / seconds, 1e-2 / seconds))
        rest.append(1 - kernels / seconds)
    share, launch, step = (float(one) for one in non_negative(np.array(rows), np.array(rest)))
    slower = 1 + share
    return replace(
        found,
        gemm_efficiency=found.gemm_efficiency / slower,
        gemm_shapes=tuple((M, N, K, seconds * slower) for M, N, K, seconds in found.gemm_shapes),
        flash_efficiency=found.flash_efficiency / slower,
        hbm_efficiency=found.hbm_efficiency / slower,
        launch_s=launch * 1e-5,
        step_s=step * 1e-2,
    )


def _fit_waiting(found: Rates, samples: Measured, config: RunConfig) -> Rates:
    """What steps of several ranks take beyond compute and collectives that were measured apart, where all start together.

    Tensor-parallel steps meet many times in a layer: a time for each meeting and a share of the compute between them (ranks that
    drift apart, and where they outnumber the cores wait for each other's time slices). Of steps with sharded weights the rest is
    their collectives, which torch carries and not the transport of the table.
    """
    if samples.tensor_steps:
        rows, rest = [], []
        for B, m, seconds in samples.tensor_steps:
            w = workload_of(config, samples.tensor, B, m)
            bare = float(step_s(w, found))
            unit = replace(found, meeting_s=1e-4), replace(found, spread=0.1)
            rows.append(tuple((float(step_s(w, numbers)) - bare) / seconds for numbers in unit))
            rest.append(1 - bare / seconds)
        meeting, spread = (float(one) for one in non_negative(np.array(rows), np.array(rest)))
        found = replace(found, meeting_s=meeting * 1e-4, spread=spread * 0.1)
    if samples.sharded_steps:
        moved, rest = [], []
        for B, m, seconds in samples.sharded_steps:
            w = sharded_workload(config, samples.ranks, B, m)
            still = float(step_s(w, replace(found, sharded_slowdown=0.0)))
            moved.append(((float(step_s(w, found)) - still) / seconds,))
            rest.append(1 - still / seconds)
        # not below 1: nothing that torch sends through sockets beats the table's transport, only a disturbed sample says so
        found = replace(found, sharded_slowdown=max(float(non_negative(np.array(moved), np.array(rest))[0]), 1.0))
    return found


def non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """argmin |a x - b| over x >= 0: the best of the least-squares solutions on every subset of columns that is non-negative."""
    columns = a.shape[1]
    best, best_error = np.zeros(columns), float(b @ b)
    for chosen in (list(some) for size in range(1, columns + 1) for some in combinations(range(columns), size)):
        x = np.zeros(columns)
        x[chosen] = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
        error = float(np.sum((a @ x - b) ** 2))
        if np.all(x >= 0) and error < best_error:
            best, best_error = x, error
    return best


def workload_of(config: RunConfig, ranks: int, B: int, m: int) -> Workload:
    """The run's model on `ranks` tensor-parallel ranks, `m` microbatches of `B` sequences per step."""
    batch = config.batch.model_copy(update={"micro_batch": B, "global_batch": B * m})
    parallel = ParallelConfig(tensor=ranks)
    return from_config(config.model_copy(update={"batch": batch, "parallel": parallel}), ranks)


def sharded_workload(config: RunConfig, ranks: int, B: int, m: int) -> Workload:
    """The run's model with weights sharded over all `ranks`, `m` microbatches of `B` sequences on each per step."""
    batch = config.batch.model_copy(update={"micro_batch": B, "global_batch": B * m * ranks})
    parallel = ParallelConfig(data=ranks, data_mode="fsdp")
    return from_config(config.model_copy(update={"batch": batch, "parallel": parallel}), ranks)
