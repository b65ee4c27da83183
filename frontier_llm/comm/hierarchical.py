"""Collectives in two stages for axes that span nodes: inside each node first, then between nodes along each rail.

RCCL's all-gather and reduce-scatter are rings: n - 1 dependent hops, which at 2,048 GCDs costs 33 and 168 times what a
hierarchical scheme does (PCCL, arXiv:2504.18658). Here the ranks of an axis stand on N nodes with k on each. Rank (node
i, place l) reduces inside its node, then exchanges with the ranks of the same place on other nodes, its *rail*: every
GCD speaks through the NIC nearest to it, all NICs work at once, and only 1/k of the data of a node crosses each.

Between nodes: recursive halving and doubling over the circulant graph (Träff 2024, arXiv:2410.14234): ceil(log2 N)
rounds and N - 1 blocks for *any* N. Sums are made in an order that depends only on N and the rank: bitwise the same in
every run, and an all-reduce gives every rank the same bits. Large tensors go in chunks, so that one is between nodes
while the next is inside them.
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

CHUNK_BYTES = 8 << 20  # per rank and stage; estimated: far into the flat part of a Slingshot NIC's bandwidth curve


def halving_skips(size: int) -> list[tuple[int, int]]:
    """[(blocks held before, distance of the peer), …] of the reduce-scatter's rounds; the all-gather takes them
    backwards.
    """
    rounds = []
    while size > 1:
        rounds.append((size, (size + 1) // 2))
        size = (size + 1) // 2
    return rounds


def halve(blocks_Np: Tensor, rail: Axis) -> Tensor:
    """Reduce-scatter between nodes: [N, p] partial sums → this rail rank's summed [p]."""
    held = blocks_Np.roll(-rail.rank, 0)  # held[j] is the block of rank (rank + j) % N
    for before, skip in halving_skips(rail.size):
        incoming = torch.empty_like(held[: before - skip])
        start_exchange(
            held[skip:before], (rail.rank + skip) % rail.size, incoming, (rail.rank - skip) % rail.size, rail
        ).wait()
        held[: before - skip] += incoming
    return held[0]


def double(block_p: Tensor, rail: Axis) -> Tensor:
    """All-gather between nodes: this rail rank's [p] → [N, p]."""
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
    """Chunks that pass through two stages; the first chunk's first stage is under way when this exists.

    On CPU the rest happens in wait(). On a GPU all of it is queued at once on the group's `stream`, and wait() makes
    the current stream wait for this much of it: the host never blocks.
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
        self._end: torch.cuda.Event | None = None  # of what was queued on the stream
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
        """See Pending."""
        if not self._finished:
            self._run()
        if self._end is not None:
            self._end.wait()


class HierarchicalGroup:
    """Collectives over N nodes × k ranks, in axis order: rank = node * k + place. Both stages are counted in the
    axes' ledger.
    """

    def __init__(self, node: Axis, rail: Axis, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._node = node
        self._rail = rail
        self._chunk_bytes = chunk_bytes
        self._rank = rail.rank * node.size + node.rank
        self._size = node.size * rail.size
        self._side: torch.cuda.Stream | None = None

    def _stream(self, x: Tensor) -> torch.cuda.Stream | None:
        """One for the group, of the communicators' priority: a stream for each call would spread over all hardware
        queues, compute's too.
        """
        if x.is_cuda and self._side is None:
            self._side = torch.cuda.Stream(x.device, priority=-1)
        return self._side

    def _chunks(self, elements: int, width: int) -> list[slice]:
        """Parts of one rank's share, so that a chunk of a node's traffic per rank has about `chunk_bytes`."""
        step = max(1, self._chunk_bytes // width // max(1, self._rail.size))
        return [slice(start, min(start + step, elements)) for start in range(0, max(elements, 1), step)]

    def start_reduce_scatter_into(self, scattered: Tensor, x: Tensor) -> Pending:
        """See Group."""
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
        """See Group."""
        nodes = self._rail.size
        places = self._node.size
        flat = x.view(-1)
        gathered_Nkp = gathered.view(nodes, places, flat.numel())
        cuts = self._chunks(flat.numel(), x.element_size())

        def between(chunk: int) -> tuple[Tensor, Tensor, Pending]:
            x_Nc = double(flat[cuts[chunk]], self._rail)
            gathered_kNc = torch.empty((places, *x_Nc.shape), dtype=x.dtype, device=x.device)
            stacked = gathered_kNc.flatten(0, 1)  # as gloo wants it: along the dim of the input
            return x_Nc, gathered_kNc, start_all_gather_into(stacked, x_Nc, self._node)

        def inside(chunk: int, started: tuple[Tensor, Tensor, Pending]) -> None:
            x_Nc, gathered_kNc, pending = started
            pending.wait()
            gathered_Nkp[:, :, cuts[chunk]] = (gathered_kNc if places > 1 else x_Nc[None]).transpose(0, 1)

        return _Staged(between, inside, len(cuts), self._stream(x))

    def start_all_reduce_(self, x: Tensor, op: str) -> Pending:
        """See Group. A sum is a reduce-scatter and an all-gather; a maximum, which is of scalars and vectors only,
        one of gathered copies.
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
        """See Group. Inside the node first, so that each rank holds what its rail is to get from the node; then
        between nodes.
        """
        nodes = self._rail.size
        places = self._node.size
        x_kNp = x.view(nodes, places, -1).transpose(0, 1).contiguous()  # [to place, to node, …]
        from_node_kNp = x_kNp
        if places > 1:
            from_node_kNp = torch.empty_like(x_kNp)
            start_all_to_all_into(from_node_kNp, x_kNp, self._node).wait()
        to_rail_Nkp = from_node_kNp.transpose(0, 1).contiguous()  # [to node, from place, …]
        return start_all_to_all_into(arriving.view_as(to_rail_Nkp), to_rail_Nkp, self._rail)

    def start_broadcast_(self, x: Tensor, source: int) -> Pending:
        """See Group. Along the source's rail first."""
        node, place = divmod(source, self._node.size)
        if self._node.rank == place:
            broadcast_(x, self._rail, node)
        broadcast_(x, self._node, place)
        return DONE

    def start_barrier(self) -> Pending:
        """See Group. Inside, between, and inside again: no rank leaves before the last has come."""
        barrier(self._node)
        barrier(self._rail)
        barrier(self._node)
        return DONE
