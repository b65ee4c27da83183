"""Counts the GPU streams of a rank, and checks that each can have its own hardware queue.

Streams that share a hardware queue wait for each other. With many communications in flight each stream therefore needs
its own queue. Otherwise a receive that waits for a message can block another operation in its queue, although the
message's sender waits for that operation. With one communication in flight any assignment of streams to queues is safe
(docs/communication.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from frontier_llm.config import RunConfig
from frontier_llm.errors import Problem
from frontier_llm.machine.env import MOST_QUEUES
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.schedule import Placement
from frontier_llm.topology.engine_rules import in_flight
from frontier_llm.topology.expert_nodes import run_layout
from frontier_llm.topology.grid import AXES, Grid

LEVELLED = ("tp", "cp", "dp", "dp.cp", "world")  # axes whose collectives may have two stages (inside and between nodes)

# Streams that torch's FSDP creates in addition to ours: for copies before the all-gather, the all-gather, the
# reduce-scatter, and the all-reduce between copies of the weights. FSDP's two communicators are not included.
_FSDP_STREAMS = 4
_FSDP_GROUPS = 2
# DeepSpeed's ZeRO-1 reduces on a separate stream, with a separate communicator.
_DEEPSPEED_STREAMS = 2


def queue_problem(config: RunConfig, grid: Grid, placement: Placement) -> Problem | None:
    """Return a Problem if many communications may be in flight on an AMD GPU, and a rank has more streams than queues.

    Each stream then needs a hardware queue of its own.
    """
    machine = load_machine(config.machine)
    if machine.device.vendor != "amd" or in_flight(config) == "one":
        return None
    ranks_per_node = min(machine.devices_per_node, grid.world_size)
    streams = most_streams(config, grid, placement, ranks_per_node)
    if streams <= MOST_QUEUES:
        return None
    return Problem(
        where="comm.in_flight",
        what=(
            f"many in flight needs one hardware queue for each of the {streams} streams of a rank, but a device has "
            f"only {MOST_QUEUES}"
        ),
        fix="set comm.in_flight=one, or comm.algorithms=flat, which needs fewer streams",
    )


def nodes_of(ranks: Sequence[int], ranks_per_node: int | None, multiple: int) -> list[tuple[int, ...]]:
    """Return the members of `ranks`, one list for each node. Return an empty list if their collectives cannot have two
    stages.

    For two stages, the ranks must be on several nodes with the same number of ranks on each. This number must be a
    multiple of `multiple`.
    """
    if ranks_per_node is None:
        return []
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(rank // ranks_per_node, []).append(rank)
    nodes = list(by_node.values())
    is_even = len({len(members) for members in nodes}) == 1
    is_consecutive = list(chain(*nodes)) == list(ranks)
    fits = len(nodes[0]) % max(multiple, 1) == 0
    if len(nodes) > 1 and is_even and is_consecutive and fits:
        return [tuple(members) for members in nodes]
    return []


def streams_of_rank(
    grid: Grid,
    placement: Placement,
    rank: int,
    ranks_per_node: int | None,
    *,
    tied: bool,
    experts: bool,
    by_node: bool,
    in_two_stages: bool,
) -> list[str]:
    """Return the names of the streams on which a rank of this mesh computes or communicates.

    The arguments have the same meaning as for `comm.build_mesh`. If `in_two_stages` is true, collectives may run in two
    stages, which adds two communicators and a stream to an axis.
    """
    streams = ["compute"]

    def add(name: str, ranks: Sequence[int], apart: int = 0) -> None:
        if len(ranks) == 1:
            return
        streams.append(name)
        if not apart and not (in_two_stages and name in LEVELLED):
            return
        nodes = nodes_of(ranks, ranks_per_node, apart)
        if not nodes:
            return
        streams.append(f"{name}.rail")
        if len(nodes[0]) > 1:
            streams.append(f"{name}.node")
        if not apart:
            streams.append(f"{name} in two stages")

    for axis in AXES:
        if axis != "pp":  # messages of the pipeline use channels instead
            add(axis, grid.group(axis, rank))
    if grid.replicas not in AXES:
        add(grid.replicas, grid.group(grid.replicas, rank))
    add("world", range(grid.world_size))
    pipeline = grid.group("pp", rank)
    stage = pipeline.index(rank)
    ends = tuple(pipeline[end] for end in placement.ends)
    if tied and rank in ends:
        add("tied", ends)
    if experts:
        add("ep", grid.experts_group(rank), grid.etp if by_node else 0)
        add("etp", grid.split_experts_group(rank))
        add("edp", grid.replicas_group(rank))
        # a separate stream copies the numbers of rows to the host during compute (parallel/expert/plan.py)
        streams.append("numbers of rows")
    # torch makes one communicator for each pair of ranks that exchange messages in a group
    for channel, pairs in placement.streams.items():
        streams += [f"pp.{channel.value} {pair}" for pair in pairs if stage in pair]
    return streams


def most_streams(config: RunConfig, grid: Grid, placement: Placement, ranks_per_node: int) -> int:
    """Return the largest number of streams of any rank of a run with this grid and placement."""
    machine = rates(load_machine(config.machine))
    experts = config.model.moe is not None
    by_node = experts and run_layout(config, grid.world_size, machine).expert_nodes > 1
    first_of_stages = grid.group("pp", 0)
    most = max(
        len(
            streams_of_rank(
                grid,
                placement,
                rank,
                ranks_per_node,
                tied=config.model.tied_embeddings,
                experts=experts,
                by_node=by_node,
                in_two_stages=config.comm.algorithms != "flat",
            )
        )
        for rank in first_of_stages
    )
    if config.parallel.data_mode == "fsdp":
        most += _FSDP_STREAMS + _FSDP_GROUPS
    if config.optimizer.engine == "deepspeed":
        most += _DEEPSPEED_STREAMS
    return most
