"""Group: what moves bytes among the ranks of an axis. One face, three ways: torch.distributed, shared memory,
hierarchical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from frontier_llm.errors import RankFailure

# torch 2.13 renames these and warns at every call of the old names; 2.10 has only those
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def listed(ranks: Sequence[int]) -> str:
    """'global ranks 0, 8, 16 … 3064 (384)'."""
    few = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:3]))} … {ranks[-1]}"
    return f"global ranks {few} ({len(ranks)})"


def named(axis: str, ranks: Iterable[int], global_ranks: Sequence[int]) -> str:
    """'rank 1 of axis dp (global rank 8), rank 2 of axis dp (global rank 16)'."""
    return ", ".join(f"rank {rank} of axis {axis} (global rank {global_ranks[rank]})" for rank in ranks)


class Pending(Protocol):
    """A collective or message under way. Its tensors stay alive and must not be written to until wait() has
    returned.
    """

    def wait(self) -> Any:
        """Block (on CPU) or make the current stream wait (on a GPU) until the result may be used."""


class Sending(Pending, Protocol):
    """A message under way."""

    def is_done(self) -> bool:
        """True when its tensor may be written to or freed; never blocks."""


class _Done:
    def wait(self) -> None:
        """Nothing was started."""

    def is_done(self) -> bool:
        """Yes."""
        return True


DONE: Sending = _Done()


class Collectives(Protocol):
    """Collectives among `size` > 1 ranks; all tensors contiguous, sources are ranks of the axis."""

    def start_all_reduce_(self, x: Tensor, op: str) -> Pending:
        """'sum' or 'max' over all ranks, in place."""

    def start_all_gather_into(self, gathered: Tensor, x: Tensor) -> Pending:
        """`x` of every rank, in axis order; `x` may be this rank's part of `gathered`."""

    def start_reduce_scatter_into(self, scattered: Tensor, x: Tensor) -> Pending:
        """This rank's part of the sum; `scattered` may be this rank's part of `x`."""

    def start_all_to_all_into(self, arriving: Tensor, x: Tensor) -> Pending:
        """Part r of this rank's `x` goes to rank r; part r of `arriving` comes from it."""

    def start_broadcast_(self, x: Tensor, source: int) -> Pending:
        """`x` of rank `source`, in place."""

    def start_barrier(self) -> Pending:
        """Ends when every rank is here."""


class Group(Collectives, Protocol):
    """Collectives and messages among `size` > 1 ranks."""

    def start_all_to_all_rows_into(
        self, arriving: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        """The next `sent[r]` rows of this rank's `x` go to rank r; the next `received[r]` of `arriving` come from
        it.
        """

    def send(self, x: Tensor, to: int) -> Sending:
        """A message; messages to one rank arrive in order."""

    def receive(self, buffer: Tensor, source: int) -> Pending:
        """Post a receive; those from one rank are filled in the order in which they were posted."""

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Pending:
        """Send to one rank and receive from another (or the same) as one operation: two would wait for each other on
        a GPU's stream.
        """


class _Watched:
    """Work of torch.distributed whose failure names its axis and ranks."""

    def __init__(self, parts: Sequence[Any], explain: Callable[[Exception], RankFailure]) -> None:
        self._parts = parts
        self._explain = explain

    def wait(self) -> None:
        """See Pending. Raises RankFailure."""
        try:
            for part in self._parts:
                part.wait()
        except RuntimeError as error:
            raise self._explain(error) from error

    def is_done(self) -> bool:
        """See Sending."""
        return all(part.is_completed() for part in self._parts)


class TorchGroup:
    """A process group of torch.distributed: RCCL or NCCL on GPUs, gloo on CPUs that do not share a host.

    Its errors say neither operation nor axis ("Connection closed by peer", "Timed out"): ours do. Who failed first is
    not decided here (training/guard/cause.py).
    """

    def __init__(self, process_group: Any, ranks: tuple[int, ...], name: str) -> None:
        self.process_group = process_group
        self._ranks = ranks
        self._name = name
        self._rank = ranks.index(dist.get_rank())
        # else torch takes the GPU of this number among the node's, whichever the rank has chosen
        self._device_ids = [torch.cuda.current_device()] if dist.get_backend(process_group) == "nccl" else None

    def _watch(self, what: str, start: Callable[[], Any], peer: int | None = None) -> _Watched:
        def explain(error: Exception) -> RankFailure:
            place = f"{what} on axis {self._name}, rank {self._rank} (global rank {self._ranks[self._rank]})"
            others = (
                f"among {listed(self._ranks)}" if peer is None else f"with {named(self._name, [peer], self._ranks)}"
            )
            fix = (
                "failure.json in the run directory names the rank that failed first; raise train.timeout_s only if "
                "it is merely slow"
            )
            return RankFailure(f"{place} {others}, failed: {str(error).splitlines()[0]}", fix=fix)

        try:
            work = start()
        except RuntimeError as error:
            raise explain(error) from error
        return _Watched(work if isinstance(work, list) else [work], explain)

    def start_all_reduce_(self, x: Tensor, op: str) -> Pending:
        """See Group."""
        return self._watch(
            "all_reduce", lambda: dist.all_reduce(x, op=_OPS[op], group=self.process_group, async_op=True)
        )

    def start_all_gather_into(self, gathered: Tensor, x: Tensor) -> Pending:
        """See Group."""
        return self._watch("all_gather", lambda: _all_gather(gathered, x, group=self.process_group, async_op=True))

    def start_reduce_scatter_into(self, scattered: Tensor, x: Tensor) -> Pending:
        """See Group."""
        total = dist.ReduceOp.SUM
        return self._watch(
            "reduce_scatter", lambda: _reduce_scatter(scattered, x, op=total, group=self.process_group, async_op=True)
        )

    def start_all_to_all_into(self, arriving: Tensor, x: Tensor) -> Pending:
        """See Group."""
        return self._watch(
            "all_to_all", lambda: dist.all_to_all_single(arriving, x, group=self.process_group, async_op=True)
        )

    def start_all_to_all_rows_into(
        self, arriving: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Pending:
        """See Group."""
        sizes = list(received), list(sent)
        return self._watch(
            "all_to_all", lambda: dist.all_to_all_single(arriving, x, *sizes, group=self.process_group, async_op=True)
        )

    def start_broadcast_(self, x: Tensor, source: int) -> Pending:
        """See Group."""
        root = self._ranks[source]
        return self._watch("broadcast", lambda: dist.broadcast(x, src=root, group=self.process_group, async_op=True))

    def start_barrier(self) -> Pending:
        """See Group."""
        return self._watch(
            "barrier", lambda: dist.barrier(group=self.process_group, async_op=True, device_ids=self._device_ids)
        )

    def send(self, x: Tensor, to: int) -> Sending:
        """See Group."""
        return self._watch("send", lambda: dist.isend(x, self._ranks[to], group=self.process_group), to)

    def receive(self, buffer: Tensor, source: int) -> Pending:
        """See Group."""
        return self._watch("recv", lambda: dist.irecv(buffer, self._ranks[source], group=self.process_group), source)

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Pending:
        """See Group."""
        operations = [
            dist.P2POp(dist.isend, outgoing, self._ranks[to], self.process_group),
            dist.P2POp(dist.irecv, incoming, self._ranks[source], self.process_group),
        ]
        return self._watch("exchange", lambda: dist.batch_isend_irecv(operations))


class Turns:
    """One per rank. On a CPU the host waits; on a GPU the device does, on a stream through which all communication is
    issued.

    There each call is enqueued behind the compute so far and behind the end of the call before it; compute waits only
    for what it needs.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def take(self, begin: Callable[[], Sending], staged: bool) -> Sending:
        """Begin a communication in its turn. What is `staged` consists of others, which take their own turns."""
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
