"""Interface of communication groups, which transfer data among the ranks of an axis, and its torch.distributed version.

Two other classes have the same interface: `ShmGroup` (shared memory), and `HierarchicalGroup` (collectives in two
stages).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from frontier_llm.errors import RankFailure

# torch 2.13 has new names for these functions, and warns at every call of the old names. torch 2.10 has only the old
# names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def listed(ranks: Sequence[int]) -> str:
    """Return a text with the ranks, and their number in brackets: for example 'global ranks 0, 8, 16 … 3064 (384)'."""
    few = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:3]))} … {ranks[-1]}"
    return f"global ranks {few} ({len(ranks)})"


def named(axis: str, ranks: Iterable[int], global_ranks: Sequence[int]) -> str:
    """Return text such as 'rank 1 of axis dp (global rank 8), rank 2 of axis dp (global rank 16)'."""
    return ", ".join(f"rank {rank} of axis {axis} (global rank {global_ranks[rank]})" for rank in ranks)


class Pending(Protocol):
    """A running collective or message.

    The object keeps its tensors alive until wait() has returned. Until then they must not be written to.
    """

    def wait(self) -> Any:
        """Wait until the result may be used. On a CPU the host waits. On a GPU only the current stream waits."""


class Sending(Pending, Protocol):
    """A message that this rank sends."""

    def is_done(self) -> bool:
        """Return True if the message's tensor may be written to or freed. Never blocks."""


class _Done:
    def wait(self) -> None:
        """Return at once, because no communication was started."""

    def is_done(self) -> bool:
        return True


DONE: Sending = _Done()


class Collectives(Protocol):
    """Collectives among two or more ranks. All tensors are contiguous, and `source` is a rank number of the axis."""

    def start_all_reduce_(self, x: Tensor, op: str) -> Pending:
        """Reduce `x` over all ranks in place. `op` is 'sum' or 'max'."""

    def start_all_gather_into(self, gathered: Tensor, x: Tensor) -> Pending:
        """Gather `x` of every rank in axis order. `x` may be this rank's part of `gathered`."""

    def start_reduce_scatter_into(self, scattered: Tensor, x: Tensor) -> Pending:
        """Sum `x` over all ranks and store this rank's part of the sum. `scattered` may be this rank's part of `x`."""

    def start_all_to_all_into(self, arriving: Tensor, x: Tensor) -> Pending:
        """Send part r of `x` to rank r, and receive part r of `arriving` from it."""

    def start_broadcast_(self, x: Tensor, source: int) -> Pending:
        """Copy `x` of rank `source` into `x` of all ranks."""

    def start_barrier(self) -> Pending:
        """Start a barrier. It ends when every rank has called this method."""


class Group(Collectives, Protocol):
    """Collectives and messages among two or more ranks."""

    def start_all_to_all_rows_into(
        self, arriving: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        """Send the next `sent[r]` rows of `x` to each rank r, and receive the next `received[r]` rows of `arriving`.

        Rows in `x` and `arriving` are in axis order of the ranks.
        """

    def send(self, x: Tensor, to: int) -> Sending:
        """Send `x` to axis rank `to`. Messages from one rank to another arrive in order."""

    def receive(self, buffer: Tensor, source: int) -> Pending:
        """Post a receive. Messages of rank `source` fill the receives in the order in which these were posted."""

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Pending:
        """Send to one rank and receive from another (or the same) rank as one operation.

        Two separate operations could deadlock, because they run one after the other on a GPU's stream.
        """


class _Watched:
    """A running operation of torch.distributed. If it fails, the error names the axis and its ranks."""

    def __init__(self, parts: Sequence[Any], explain: Callable[[Exception], RankFailure]) -> None:
        self._parts = parts
        self._explain = explain

    def wait(self) -> None:
        """Wait for all torch operations of this communication. Raises RankFailure."""
        try:
            for part in self._parts:
                part.wait()
        except RuntimeError as error:
            raise self._explain(error) from error

    def is_done(self) -> bool:
        return all(part.is_completed() for part in self._parts)


class TorchGroup:
    """A process group of torch.distributed: RCCL or NCCL on GPUs, gloo on CPUs that do not share memory.

    torch's errors ("Connection closed by peer", "Timed out") contain neither the operation nor the axis. This class
    raises RankFailure with the operation and the axis. The module training/guard/cause.py determines which rank failed
    first.
    """

    def __init__(self, process_group: Any, ranks: tuple[int, ...], name: str) -> None:
        self.process_group = process_group
        self._ranks = ranks
        self._name = name
        self._rank = ranks.index(dist.get_rank())
        # `dist.barrier` needs the GPU's number. Otherwise torch derives it from the rank and ignores the current GPU.
        self._device_ids = [torch.cuda.current_device()] if dist.get_backend(process_group) == "nccl" else None

    def _watch(self, what: str, start: Callable[[], Any], peer: int | None = None) -> _Watched:
        def explain(error: Exception) -> RankFailure:
            place = f"{what} on axis {self._name}, rank {self._rank} (global rank {self._ranks[self._rank]})"
            others = (
                f"among {listed(self._ranks)}" if peer is None else f"with {named(self._name, [peer], self._ranks)}"
            )
            fix = (
                "failure.json in the run directory names the rank that failed first; raise train.timeout_s only if "
                "that rank is only slow"
            )
            return RankFailure(f"{place} {others}, failed: {str(error).splitlines()[0]}", fix=fix)

        try:
            work = start()
        except RuntimeError as error:
            raise explain(error) from error
        return _Watched(work if isinstance(work, list) else [work], explain)

    def start_all_reduce_(self, x: Tensor, op: str) -> Pending:
        """Start `dist.all_reduce`, asynchronously."""
        return self._watch(
            "all_reduce", lambda: dist.all_reduce(x, op=_OPS[op], group=self.process_group, async_op=True)
        )

    def start_all_gather_into(self, gathered: Tensor, x: Tensor) -> Pending:
        """Start `dist.all_gather_into_tensor`, asynchronously."""
        return self._watch("all_gather", lambda: _all_gather(gathered, x, group=self.process_group, async_op=True))

    def start_reduce_scatter_into(self, scattered: Tensor, x: Tensor) -> Pending:
        """Start a sum with `dist.reduce_scatter_tensor`, asynchronously."""
        total = dist.ReduceOp.SUM
        return self._watch(
            "reduce_scatter", lambda: _reduce_scatter(scattered, x, op=total, group=self.process_group, async_op=True)
        )

    def start_all_to_all_into(self, arriving: Tensor, x: Tensor) -> Pending:
        """Start `dist.all_to_all_single` with equal parts, asynchronously."""
        return self._watch(
            "all_to_all", lambda: dist.all_to_all_single(arriving, x, group=self.process_group, async_op=True)
        )

    def start_all_to_all_rows_into(
        self, arriving: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        """Start `dist.all_to_all_single` with unequal parts, asynchronously."""
        sizes = list(received), list(sent)
        return self._watch(
            "all_to_all", lambda: dist.all_to_all_single(arriving, x, *sizes, group=self.process_group, async_op=True)
        )

    def start_broadcast_(self, x: Tensor, source: int) -> Pending:
        """Start `dist.broadcast`, asynchronously."""
        root = self._ranks[source]
        return self._watch("broadcast", lambda: dist.broadcast(x, src=root, group=self.process_group, async_op=True))

    def start_barrier(self) -> Pending:
        """Start `dist.barrier`, asynchronously."""
        return self._watch(
            "barrier", lambda: dist.barrier(group=self.process_group, async_op=True, device_ids=self._device_ids)
        )

    def send(self, x: Tensor, to: int) -> Sending:
        """Start `dist.isend`."""
        return self._watch("send", lambda: dist.isend(x, self._ranks[to], group=self.process_group), to)

    def receive(self, buffer: Tensor, source: int) -> Pending:
        """Start `dist.irecv`."""
        return self._watch("recv", lambda: dist.irecv(buffer, self._ranks[source], group=self.process_group), source)

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Pending:
        """Start both messages with `dist.batch_isend_irecv`."""
        operations = [
            dist.P2POp(dist.isend, outgoing, self._ranks[to], self.process_group),
            dist.P2POp(dist.irecv, incoming, self._ranks[source], self.process_group),
        ]
        return self._watch("exchange", lambda: dist.batch_isend_irecv(operations))


class OneInFlight:
    """Ensures that this rank has only one communication in flight. All axes of a rank share one object.

    On a CPU the host waits for each communication. On a GPU one stream issues all communication. A communication starts
    after the previous one has ended and after all compute that was queued earlier. Compute waits only for results that
    it needs.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def take(self, begin: Callable[[], Sending], staged: bool) -> Sending:
        """Begin a communication after the previous one has ended.

        A `staged` collective begins at once. It consists of other communications, and each of these begins after the
        previous one has ended.
        """
        if self._stream is None:
            begin().wait()
            return DONE
        if staged:
            return begin()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work = begin()
            work.wait()
        return work
