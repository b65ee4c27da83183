"""Benchmark of all collectives and messages of a mesh: time, and algorithm and bus bandwidth as in rccl-tests.

Algorithm bandwidth is bytes / time, with the bytes of the complete tensor (the gathered result, the full input of a
reduce-scatter). Bus bandwidth multiplies it by the share of the tensor that every rank must send at least. The share is
2(n-1)/n for an all-reduce, (n-1)/n for a reduce-scatter, all-gather or all-to-all, and 1 for a broadcast or a message.
Bus bandwidth can therefore be compared with a link's speed for any number of ranks n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations, count, pairwise, product, takewhile
from typing import Any

import torch

from frontier_llm.comm.algorithms import FLAT, HIERARCHICAL
from frontier_llm.comm.axis import (
    Axis,
    Mesh,
    all_reduce_,
    barrier,
    broadcast_,
    start_all_gather_into,
    start_all_to_all_into,
    start_reduce_scatter_into,
)
from frontier_llm.comm.composed import start_exchange
from frontier_llm.comm.p2p import Sends, post_receive
from frontier_llm.experiments.measure.timing import median_s, wall_s
from frontier_llm.planner.costs.collectives import PASSES

ELEMENT_BYTES = 4  # fp32
PAIR_SECONDS = 5e-3  # duration of the measurement of a pair
PAIR_BYTES = 4 << 20  # size of a message; latency is negligible at this size, and all pairs can still be measured
MAX_PAIR_RANKS = 64  # 2,016 pairs; with more ranks, only neighbours in rank order are measured
OPERATIONS = [*PASSES, "broadcast", "message"]


@dataclass(frozen=True)
class LinkTime:
    """Time of one operation at one message size on one kind of group."""

    axis: str
    operation: str
    ranks: int  # ranks of the group
    algorithm: str  # flat | hierarchical
    mode: str  # "alone": only the first group of the axis communicates; "together": all groups do, as in training
    bytes: int  # bytes of the complete tensor
    seconds: float  # maximum over ranks of the median over repetitions

    @property
    def algorithm_gbps(self) -> float:
        """Algorithm bandwidth in GB/s (10^9)."""
        return self.bytes / self.seconds / 1e9

    @property
    def bus_gbps(self) -> float:
        """Bus bandwidth in GB/s (10^9)."""
        share = PASSES[self.operation] * (self.ranks - 1) / self.ranks if self.operation in PASSES else 1.0
        return self.algorithm_gbps * share

    def as_json(self) -> dict[str, Any]:
        """Return the fields and both bandwidths."""
        return {**asdict(self), "algbw_gbps": self.algorithm_gbps, "busbw_gbps": self.bus_gbps}


@dataclass(frozen=True)
class Pair:
    """One-way time and bandwidth of a message between two ranks, measured as half of a round trip."""

    a: int  # global ranks
    b: int
    seconds: float
    gbps: float


@dataclass(frozen=True)
class CommunicatorMemory:
    """Device memory outside torch's allocator: the maximum over the ranks, in bytes."""

    before_bytes: int  # memory before the first use of a group
    warm_bytes: int  # memory after the first use of every group
    measured_bytes: int  # memory after the measurements, whose larger messages need more memory
    communicators: int  # number of groups of the rank with the most groups

    @property
    def per_communicator_bytes(self) -> float:
        """Additional bytes of one communicator after the measurements."""
        return (self.measured_bytes - self.before_bytes) / max(self.communicators, 1)


def communicator_memory(mesh: Mesh, device: torch.device) -> CommunicatorMemory | None:
    """Return the memory of this mesh's communicators, after measurements; None on CPUs. Collective over the world."""
    memory = mesh.ledger.memory
    if device.type != "cuda" or memory is None:
        return None
    warm = memory.before_bytes + sum(memory.by_group.values())
    numbers = [memory.before_bytes, warm, memory.now_bytes(), len(memory.by_group)]
    own = torch.tensor(numbers, device=device)
    return CommunicatorMemory(*(int(number) for number in all_reduce_(own, mesh.world, "max").tolist()))


def sizes_between(smallest: int, largest: int) -> list[int]:
    """Return smallest, 4 × smallest, 16 × smallest, … up to `largest`. `largest` is always included."""
    growing = (smallest * 4**power for power in count())
    return [*takewhile(lambda size: size < largest, growing), largest]


def bench_comm(mesh: Mesh, device: torch.device, sizes: list[int], seconds_per_size: float = 0.2) -> list[LinkTime]:
    """Measure every operation on every axis that has more than one rank, with one group of the axis active, and with
    all groups active.

    All ranks must call the function. A message is sent from every rank of an axis to the next rank, as between pipeline
    stages.
    """
    axes = [axis for axis in (mesh.tp, mesh.cp, mesh.dp, mesh.pp, mesh.world) if axis.size > 1]
    cases = [(axis, algorithm, variant) for axis in axes for algorithm, variant in variants(axis)]
    measurements = []
    for (axis, algorithm, variant), operation, size in product(cases, OPERATIONS, sizes):
        if operation == "message" and algorithm != "flat":
            continue
        modes = ["together"] if axis.size == mesh.world.size else ["alone", "together"]
        for mode in modes:
            takes_part = mode == "together" or mesh.world.ranks[0] in axis.ranks
            run, whole_bytes = operation_on(variant, operation, size, device)
            seconds = slowest_s(run if takes_part else _nothing, mesh.world, device, seconds_per_size)
            measurements.append(
                LinkTime(
                    axis=axis.name,
                    operation=operation,
                    ranks=axis.size,
                    algorithm=algorithm,
                    mode=mode,
                    bytes=whole_bytes,
                    seconds=seconds,
                )
            )
    return measurements


def variants(axis: Axis) -> Iterator[tuple[str, Axis]]:
    """Yield ('flat', axis), and ('hierarchical', axis) if the axis supports it."""
    yield "flat", replace(axis, algorithms=FLAT)
    if axis.hierarchical is not None:
        yield "hierarchical", replace(axis, algorithms=HIERARCHICAL)


def operation_on(axis: Axis, operation: str, size_bytes: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """Return a call of the operation on newly allocated buffers, and the bytes of the complete tensor.

    The size is rounded up so that the tensor splits into equal parts.
    """
    part = max(1, -(-size_bytes // (ELEMENT_BYTES * axis.size)))
    whole = torch.zeros(part * axis.size, device=device)
    mine = torch.zeros(part, device=device)
    arriving = torch.empty_like(whole)
    after = (axis.rank + 1) % axis.size
    before = (axis.rank - 1) % axis.size
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce_(whole, axis),
        "all_gather": lambda: start_all_gather_into(whole, mine, axis).wait(),
        "reduce_scatter": lambda: start_reduce_scatter_into(mine, whole, axis).wait(),
        "all_to_all": lambda: start_all_to_all_into(arriving, whole, axis).wait(),
        "broadcast": lambda: broadcast_(whole, axis, 0),
        "message": lambda: start_exchange(whole, after, arriving, before, axis).wait(),
    }
    return calls[operation], whole.numel() * ELEMENT_BYTES


def _nothing() -> None:
    """Do nothing. Ranks that are not measured call this function instead of the operation."""


def slowest_s(run: Callable[[], object], world: Axis, device: torch.device, budget_s: float) -> float:
    """Return the seconds of a call: the maximum over ranks of the median over repetitions.

    All ranks run the same number of repetitions, 3 to 50. The slowest rank needs about `budget_s` seconds for them.
    """

    def agreed(value: float) -> float:
        return float(all_reduce_(torch.tensor([value], dtype=torch.float64, device=device), world, "max"))

    run()  # warm-up: the first call opens connections and allocates memory
    barrier(world)
    repetitions = int(min(50, max(3, budget_s / max(agreed(wall_s(run, device)), 1e-6))))
    return agreed(median_s(run, repetitions, partial(wall_s, device=device), before=lambda: barrier(world)))


def bench_pairs(mesh: Mesh, device: torch.device) -> list[Pair]:
    """Measure the bandwidth between pairs of ranks with large messages, one pair at a time. Collective over the world.

    Up to MAX_PAIR_RANKS ranks, all pairs are measured. With more ranks, each rank is measured with the next rank.
    """
    world = mesh.world
    pairs = []
    everyone = range(world.size)
    wanted = combinations(everyone, 2) if world.size <= MAX_PAIR_RANKS else pairwise(everyone)
    x = torch.zeros(PAIR_BYTES // ELEMENT_BYTES, device=device)
    for a, b in wanted:
        if world.rank not in (a, b):
            run: Callable[[], object] = _nothing
        else:
            peer = b if world.rank == a else a
            run = _ping_pong(x, world, peer, first=world.rank == a)
        seconds = slowest_s(run, world, device, PAIR_SECONDS) / 2
        pairs.append(Pair(world.ranks[a], world.ranks[b], seconds, PAIR_BYTES / seconds / 1e9))
    return pairs


def _ping_pong(x: torch.Tensor, world: Axis, peer: int, first: bool) -> Callable[[], object]:
    """Return a call that sends a message to `peer` and back.

    RCCL runs a pair's messages in the order of the calls. If both ranks first posted their receives, both would wait
    forever.
    """

    def receive() -> torch.Tensor:
        return post_receive(tuple(x.shape), x.dtype, x.device, world, peer).wait()

    def run() -> None:
        sends = Sends(limit=2)
        sends.start(x if first else receive(), world, peer)
        if first:
            receive()
        sends.wait_all()

    return run
