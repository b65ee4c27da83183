"""The numbers of one machine and one software stack, as plain floats in SI units. `planner.costs` computes with them.

`machine.load.rates` makes a `Rates` from a machine file. The file also holds the source of each number. Fitting
replaces fields of `Rates`.
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
    """Measured times of a collective in seconds: rows by nodes or ranks, columns by message size."""

    rows: tuple[float, ...]
    sizes_bytes: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Rates(Software):
    """Rates of one device, its node and its network, and of the software stack that uses them."""

    # device
    peak_flops: float  # per second, dense 16-bit matrix
    memory_bytes: float
    hbm_bytes_s: float  # peak
    compute_units: int  # SMs or CUs: the wave size of tiled kernels
    speed_variation: float  # standard deviation of the speed of like devices, as a share
    # node and network
    node_devices: int
    nodes: int
    node_network_bytes_s: float  # all NICs of a node, one direction, peak
    fabric_size: tuple[int, ...]  # numbers of devices of a group inside the node
    fabric_bytes_s: tuple[float, ...]  # bus bandwidth for each `fabric_size`, reached by large messages
    fabric_latency_s: float  # fixed time of one collective inside the node
    fabric_hop_s: float  # time per ring step inside the node
    network_efficiency: float  # share of node_network_bytes_s that large messages reach
    network_crowding: float  # further factor if several communicators of a node share its NICs at the same time
    network_latency_s: float  # fixed time of one collective or message across nodes
    network_hop_s: float  # time per ring step across nodes (ring-only reduce-scatter and all-gather)
    all_reduce_table: Table | None  # over nodes, every device of a node in one communicator; None: ring formula
    # compute
    gemm_efficiency: float  # share of the peak that a large, well-shaped matrix product reaches
    gemm_k_half: float  # inner dimension at which a product reaches half of gemm_efficiency
    unaligned_penalty: float  # time factor if a head dimension is not a multiple of 8 elements (16 bytes)
    flash_efficiency: float  # share of the peak: flash attention forward, head dimension 128, long sequences
    flash_backward: float  # efficiency of the backward over the forward's
    hbm_efficiency: float  # share of hbm_bytes_s that memory-bound kernels reach
    kernel_s: float  # fixed device time of one kernel
    launch_s: float  # host time to dispatch one operation: a layer takes at least its number of operations x launch_s
    microbatch_s: float  # host time per microbatch and stage that nothing hides (scheduler, data, synchronisation)
    step_s: float  # fixed time per step: data, loss scale, logging
    # software
    dp_overlap: float  # share of the gradient reduction that may hide under the last backward
    gather_overlap: float  # share of the weight all-gather that may hide under the first forward
    tp_overlap: float  # share of tp communication hidden under its matrix product
    # with comm.tensor_chunks: share of the shorter of a piece's product and its collective that the other one hides
    chunk_overlap: float
    fabric_share: float  # share of the fabric's bandwidth that this stack's collectives reach
    reserve_bytes: float  # runtime context, communicator buffers and allocator slack, which no tensor accounts for
    fragmentation: float  # reserved over allocated bytes of the allocator, for activations
    # The fields below are measured on the machine itself by `calibrate`. Other machines have the defaults.
    # collectives inside a node, by operation; rows by ranks
    node_tables: Mapping[str, Table] = field(default_factory=dict)
    gemm_shapes: tuple[tuple[float, float, float, float], ...] = ()  # M, N, K, seconds
    # (busy devices of a node, time of their kernels / time when all are busy)
    contention: tuple[tuple[int, float], ...] = ()
    host_executes: bool = False  # the device is the host: dispatching an operation does not run ahead of it
    meeting_s: float = 0.0  # waiting time for the last rank at each collective inside a layer
    spread: float = 0.0  # further waiting time, as a share of the compute between two such collectives
    one_in_flight: bool = False  # each communication of a rank ends before the next begins (comm.in_flight)
    # time factor of the collectives of sharded weights, which torch issues, over the times of the tables
    sharded_slowdown: float = 1.0


def fabric_bandwidth(rates: Rates, ranks: Number) -> Number:
    """Return the bus bandwidth, bytes/s, of a group of `ranks` neighbours inside a node."""
    return np.interp(np.asarray(ranks, dtype=float), rates.fabric_size, rates.fabric_bytes_s) * rates.fabric_share
