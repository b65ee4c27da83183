"""`Rates`: the performance numbers of one machine with one software stack, from which `planner.costs` computes times.

All values are plain floats in SI units. `machine.load.rates` makes a `Rates` from a machine file, which also has the
source of each number. A fit to measurements replaces fields of `Rates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from frontier_llm.blueprint.items import Software

Number = Any  # int, float or a numpy array of them; arrays broadcast against each other


@dataclass(frozen=True)
class Table:
    """Measured seconds of a collective: one row per number of nodes or ranks, one column per message size."""

    rows: tuple[float, ...]
    sizes_bytes: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Rates(Software):
    """Performance numbers of one device, its node and its network, and of the software stack that uses them."""

    # device
    peak_flops: float  # FLOP/s of dense 16-bit matrix products
    memory_bytes: float
    safe_bytes: float  # predicted memory up to which a plan is expected to run (`safe_gib` of the machine file)
    hbm_bytes_s: float  # peak
    compute_units: int  # number of SMs or CUs, which is the number of tiles that a kernel computes at the same time
    speed_variation: float  # standard deviation of the speed of devices of one type, relative to their mean speed.
    # Node and network
    node_devices: int
    nodes: int
    node_network_bytes_s: float  # all NICs of a node, one direction, peak
    fabric_size: tuple[int, ...]  # group sizes (numbers of devices) inside the node
    fabric_bytes_s: tuple[float, ...]  # bus bandwidth for each `fabric_size`, reached by large messages
    fabric_latency_s: float  # fixed time of one collective inside the node
    fabric_hop_s: float  # time per ring step inside the node
    network_efficiency: float  # share of node_network_bytes_s that large messages reach.
    # Bandwidth is also multiplied by this factor if several communicators of a node share its NICs
    network_crowding: float
    network_latency_s: float  # fixed time of one collective or message across nodes
    network_hop_s: float  # time per ring step across nodes (ring-only reduce-scatter and all-gather)
    all_reduce_table: Table | None  # over nodes, every device of a node in one communicator; None: ring formula.
    # compute
    gemm_efficiency: float  # share of the peak that a large, well-shaped matrix product reaches
    gemm_k_half: float  # inner dimension at which a product reaches half of gemm_efficiency
    grouped_share: float  # rate of the experts' grouped products / rate of one product per expert
    unaligned_penalty: float  # time factor if a head dimension is not a multiple of 8 elements (16 bytes)
    flash_efficiency: float  # share of the peak: flash attention forward, head dimension 128, long sequences
    flash_backward: float  # efficiency of flash attention backward / forward
    hbm_efficiency: float  # share of hbm_bytes_s that memory-bound kernels reach
    kernel_s: float  # fixed device time of one kernel
    launch_s: float  # host time to dispatch one operation: a layer takes at least its number of operations x launch_s
    microbatch_s: float  # host time per microbatch and stage without overlap (scheduler, data, synchronisation)
    step_s: float  # fixed time per step: data, loss scale, logging.
    # software
    dp_overlap: float  # share of the gradient reduction that the last backward may hide
    gather_overlap: float  # share of the weight all-gather that the first forward may hide
    tp_overlap: float  # share of tp communication that its matrix product hides.
    # With comm.tensor_chunks, the product of a piece overlaps with a collective: share of the shorter of the two that
    # is hidden
    chunk_overlap: float
    fabric_share: float  # share of the fabric's bandwidth that this stack's collectives reach.
    # Share of the rate between nodes, after efficiency and crowding, that this stack's communication reaches
    network_share: float
    reserve_bytes: float  # runtime context, communicator buffers and allocator slack, which no tensor accounts for
    fragmentation: float  # bytes that the allocator reserves / bytes that it allocates, for activations.
    # The fields below are measured on the machine itself by `calibrate`. Other machines have the defaults.
    # collectives inside a node, by operation; rows by ranks
    node_tables: Mapping[str, Table] = field(default_factory=dict)
    gemm_shapes: tuple[tuple[float, float, float, float], ...] = ()  # M, N, K, seconds.
    # (busy devices of a node, time of their kernels / time when all are busy)
    contention: tuple[tuple[int, float], ...] = ()
    host_executes: bool = False  # the device is a CPU: the host cannot dispatch operations while earlier ones run
    meeting_s: float = 0.0  # seconds that ranks wait for the slowest rank at each collective in a layer
    spread: float = 0.0  # additional waiting time, as a fraction of the compute between two collectives in a layer
    one_in_flight: bool = False  # each communication of a rank ends before the next begins (comm.in_flight).
    # Time of the collectives of sharded weights, which torch executes, relative to the times in the tables
    sharded_slowdown: float = 1.0
    # Field → value of the stack `slow_as`, for estimated shares of a peak and of overlap that are lower in that stack.
    # The search checks its choice with these values too (planner/choice.py).
    slow: Mapping[str, float] = field(default_factory=dict)


def fabric_bandwidth(rates: Rates, ranks: Number) -> Number:
    """Return the bus bandwidth, bytes/s, of a group of `ranks` neighbours inside a node."""
    return np.interp(np.asarray(ranks, dtype=float), rates.fabric_size, rates.fabric_bytes_s) * rates.fabric_share
