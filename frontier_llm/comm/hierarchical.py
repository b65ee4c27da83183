"""Collectives in two stages for axes that span nodes: inside each node first, then between nodes along each rail.

RCCL's all-gather and reduce-scatter are rings with n - 1 dependent hops. At 2,048 GCDs (half an MI250X each) they take
33 and 168 times as long as a hierarchical algorithm (PCCL, arXiv:2504.18658). In this module an axis has k ranks on
each of N nodes. A rank first reduces inside its node. Then it exchanges data with the ranks at the same position on
other nodes, which form its *rail*. Every GCD uses the NIC nearest to it, and all NICs work at the same time. Each NIC
transfers only 1/k of a node's data.

Between nodes the algorithm is recursive halving and doubling over the circulant graph (Träff 2024, arXiv:2410.14234).
It needs ceil(log2 N) rounds and sends N - 1 blocks for *any* N. The order of the additions depends only on N and the
rank. So results are bitwise the same in every run, and an all-reduce returns the same bits on every rank. Large tensors
are divided into chunks, so that one chunk is sent between nodes while the next is sent inside nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from frontier_llm.comm.axis import (
    Axis,
    barrier,
    broadcast_,
    start_all_gather_into,
    start_all_to_all_into,
    start_reduce_scatter,
)
from frontier_llm.comm.composed import start_exchange
from frontier_llm.comm.group import DONE, Pending

# Bytes that a rank sends per chunk and stage. Much smaller messages already reach a Slingshot NIC's full speed
# (estimated).
CHUNK_BYTES = 8 << 20


def halving_skips(size: int) -> list[tuple[int, int]]:
    """Return [(blocks held before the round, distance of the peer), …] for the rounds of a reduce-scatter.

    An all-gather runs the same rounds in reverse order.
    """
    rounds = []
    while size > 1:
        rounds.append((size, (size + 1) // 2))
        size = (size + 1) // 2
    return rounds


def halve(blocks_Np: Tensor, rail: Axis) -> Tensor:
    """Reduce-scatter along the rail: [N, p] partial sums → this rail rank's block of the sum, [p]."""
    held = blocks_Np.roll(-rail.rank, 0)  # held[j] is the block of rank (rank + j) % N
    for before, skip in halving_skips(rail.size):
        incoming = torch.empty_like(held[: before - skip])
        start_exchange(
            held[skip:before], (rail.rank + skip) % rail.size, incoming, (rail.rank - skip) % rail.size, rail
        ).wait()
        held[: before - skip] += incoming
    return held[0]


def double(block_p: Tensor, rail: Axis) -> Tensor:
    """All-gather along the rail: this rail rank's block [p] → the blocks of all rail ranks, [N, p]."""
    held = torch.empty((rail.size, *block_p.shape), dtype=block_p.dtype, device=block_p.device)
    held[0] = block_p
    for before, skip in reversed(halving_skips(rail.size)):
        start_exchange(
            held[: before - skip],
            (rail.rank - skip) % rail.size,
            held[skip:before],
            (rail.rank + skip) % rail.size,
            rail,
        ).wait()
    return held.roll(rail.rank, 0)


class _Staged:
    """A running collective whose chunks pass through two stages.

    On a CPU, the constructor starts the first stage of the first chunk, and wait() runs everything else. On a GPU, the
    constructor queues all stages on the group's `stream`. wait() then makes the current stream wait for the end of the
    last stage, so the host never blocks.
    """

    def __init__(
        self,
        first: Callable[[int], Any],
        second: Callable[[int, Any], None],
        chunks: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._first = first
        self._second = second
        self._chunks = chunks
        self._finished = False
        self._end: torch.cuda.Event | None = None  # end of the last stage, on a GPU
        if stream is None:
            self._ahead = first(0)
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._ahead = first(0)
            self._run()
            self._end = stream.record_event()

    def _run(self) -> None:
        for chunk in range(self._chunks):
            current = self._ahead
            self._ahead = self._first(chunk + 1) if chunk + 1 < self._chunks else None
            self._second(chunk, current)
        self._finished = True

    def wait(self) -> None:
        if not self._finished:
            self._run()
        if self._end is not None:
            self._end.wait()


class HierarchicalGroup:
    """Collectives over N nodes × k ranks, in axis order: rank = node * k + place.

    The ledger counts the collectives of both stages, under the names of the node axis and the rail axis.
    """

    def __init__(self, node: Axis, rail: Axis) -> None:
        self._node = node
        self._rail = rail
        self._chunk_bytes = CHUNK_BYTES
        self._rank = rail.rank * node.size + node.rank
        self._size = node.size * rail.size
        self._side: torch.cuda.Stream | None = None

    def _stream(self, x: Tensor) -> torch.cuda.Stream | None:
        """Return the group's side stream, which has the communicators' priority, or None on a CPU.

        One stream per call would use all hardware queues, including the queue of compute.
        """
        if x.is_cuda and self._side is None:
            self._side = torch.cuda.Stream(x.device, priority=-1)
        return self._side

    def _chunks(self, elements: int, width: int) -> list[slice]:
        """Divide the `elements` of one rank into chunks, so that a rank transfers about `chunk_bytes` per chunk.

        A rank exchanges each chunk with every node of the rail. `width` is the size of an element in bytes.
        """
        step = max(1, self._chunk_bytes // width // max(1, self._rail.size))
        return [slice(start, min(start + step, elements)) for start in range(0, max(elements, 1), step)]

    def start_reduce_scatter_into(self, scattered: Tensor, x: Tensor) -> Pending:
        """Reduce each chunk inside the node, then along the rail."""
        nodes = self._rail.size
        places = self._node.size
        out = scattered.view(-1)
        x_Nkp = x.view(nodes, places, out.numel())
        cuts = self._chunks(out.numel(), x.element_size())

        def inside(chunk: int) -> tuple[Tensor, Pending]:
            x_kNc = x_Nkp[:, :, cuts[chunk]].transpose(0, 1).contiguous()
            return start_reduce_scatter(x_kNc, self._node)

        def between(chunk: int, started: tuple[Tensor, Pending]) -> None:
            started[1].wait()
            out[cuts[chunk]] = halve(started[0].view(nodes, -1), self._rail)

        return _Staged(inside, between, len(cuts), self._stream(x))

    def start_all_gather_into(self, gathered: Tensor, x: Tensor) -> Pending:
        """Gather each chunk along the rail, then inside the node."""
        nodes = self._rail.size
        places = self._node.size
        flat = x.view(-1)
        gathered_Nkp = gathered.view(nodes, places, flat.numel())
        cuts = self._chunks(flat.numel(), x.element_size())

        def between(chunk: int) -> tuple[Tensor, Tensor, Pending]:
            x_Nc = double(flat[cuts[chunk]], self._rail)
            gathered_kNc = torch.empty((places, *x_Nc.shape), dtype=x.dtype, device=x.device)
            stacked = gathered_kNc.flatten(0, 1)  # gloo needs the result concatenated along the input's first dim
            return x_Nc, gathered_kNc, start_all_gather_into(stacked, x_Nc, self._node)

        def inside(chunk: int, started: tuple[Tensor, Tensor, Pending]) -> None:
            x_Nc, gathered_kNc, pending = started
            pending.wait()
            gathered_Nkp[:, :, cuts[chunk]] = (gathered_kNc if places > 1 else x_Nc[None]).transpose(0, 1)

        return _Staged(between, inside, len(cuts), self._stream(x))

    def start_all_reduce_(self, x: Tensor, op: str) -> Pending:
        """Sum with a reduce-scatter and an all-gather, or take the maximum of gathered copies.

        Only scalars and vectors are reduced with 'max', so the copies are small.
        """
        if op != "sum":
            everyone = torch.empty((self._size, *x.shape), dtype=x.dtype, device=x.device)
            self.start_all_gather_into(everyone, x).wait()
            x.copy_(everyone.amax(0))
            return DONE
        share = -(-x.numel() // self._size)
        whole = x.view(-1)
        padded = whole
        if share * self._size != x.numel():
            padded = torch.zeros(share * self._size, dtype=x.dtype, device=x.device)
            padded[: x.numel()] = whole
        mine = torch.empty(share, dtype=x.dtype, device=x.device)
        reducing = self.start_reduce_scatter_into(mine, padded)

        def gather(_: int, started: Pending) -> None:
            started.wait()
            self.start_all_gather_into(padded, mine).wait()
            if padded is not whole:
                whole.copy_(padded[: x.numel()])

        return _Staged(lambda _: reducing, gather, 1, self._stream(x))

    def start_all_to_all_into(self, arriving: Tensor, x: Tensor) -> Pending:
        """Exchange inside the node, and then along the rail.

        After the first exchange, each rank holds all data of its node for the ranks of its rail.
        """
        nodes = self._rail.size
        places = self._node.size
        # dims: (place of the target rank inside its node, node of the target rank, data)
        x_kNp = x.view(nodes, places, -1).transpose(0, 1).contiguous()
        from_node_kNp = x_kNp
        if places > 1:
            from_node_kNp = torch.empty_like(x_kNp)
            start_all_to_all_into(from_node_kNp, x_kNp, self._node).wait()
        # dims: (node of the target rank, place of the source rank inside its node, data)
        to_rail_Nkp = from_node_kNp.transpose(0, 1).contiguous()
        return start_all_to_all_into(arriving.view_as(to_rail_Nkp), to_rail_Nkp, self._rail)

    def start_broadcast_(self, x: Tensor, source: int) -> Pending:
        """Broadcast along the rail of the source first, and then inside each node."""
        node, place = divmod(source, self._node.size)
        if self._node.rank == place:
            broadcast_(x, self._rail, node)
        broadcast_(x, self._node, place)
        return DONE

    def start_barrier(self) -> Pending:
        """Run a barrier inside the node, along the rail, and inside the node again.

        Without the second barrier inside the node, a rank could leave before all ranks on other rails have arrived.
        """
        barrier(self._node)
        barrier(self._rail)
        barrier(self._node)
        return DONE
