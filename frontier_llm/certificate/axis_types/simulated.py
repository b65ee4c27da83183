"""Simulated ranks: threads of this process that exchange tensors as the ranks of a mesh do.

`SimulatedGroup` implements the interface `comm.group.Group`. A collective reads copies of its inputs, so its result
does not depend on timing. If every thread waits for another thread, all of them end with the lines at which they wait.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from frontier_llm.comm import Axis, Mesh, single
from frontier_llm.comm.ledger import Ledger
from frontier_llm.schedule import Placement
from frontier_llm.topology.grid import AXES, Grid

EventId = tuple[int, int]  # global rank, and number of the event on this rank


class RankObserver(Protocol):
    """Records the communication of one rank."""

    def sources_of(self, x: Tensor) -> tuple[EventId, ...]:
        """Return the events that have written `x`."""

    def communicated(
        self, operation: str, axis: str, buffer: Tensor, summed: bool, sources: tuple[EventId, ...], site: Any
    ) -> None:
        """Record that a communication has written `buffer`. `site` is the result of `here` at its start."""

    def quiet(self) -> Any:
        """Return a context in which tensor operations are not recorded."""

    def here(self) -> Any:
        """Return the lines of the code that runs."""

    def described(self, site: Any) -> str:
        """Return file and line of a result of `here`."""


class Aborted(Exception):
    """Ends a simulated rank after another one has failed."""


class Deadlock(Exception):
    """All simulated ranks wait for each other. The message has the place at which each one waits."""


@dataclass(frozen=True)
class Deposit:
    """Input of one rank to a communication."""

    operation: str
    tensor: Tensor
    sources: tuple[EventId, ...]


class Exchange:
    """Passes deposits between the simulated ranks of one run."""

    def __init__(self, ranks: int) -> None:
        self._changed = threading.Condition()
        self._deposits: dict[tuple[Any, ...], Deposit] = {}
        self._running = ranks
        self._waiting: dict[int, tuple[tuple[tuple[Any, ...], ...], str]] = {}
        self.failure: BaseException | None = None

    def put(self, key: tuple[Any, ...], deposit: Deposit) -> None:
        """Store a deposit. Never blocks."""
        with self._changed:
            self._deposits[key] = deposit
            self._changed.notify_all()

    def take(self, keys: tuple[tuple[Any, ...], ...], place: str) -> list[Deposit]:
        """Wait for all deposits and return them. `place` is the line that waits. Raises Aborted or Deadlock."""
        with self._changed:
            me = threading.get_ident()
            while not self._has(keys):
                if self.failure is not None:
                    raise Aborted
                self._waiting[me] = (keys, place)
                if self._is_stuck():
                    places = Counter(where for _, where in self._waiting.values())
                    listed = "; ".join(f"{count} at {where}" for where, count in places.items())
                    self.failure = Deadlock(f"the ranks wait for different communications: {listed}")
                    self._changed.notify_all()
                    raise self.failure
                self._changed.wait()
            self._waiting.pop(me, None)
            return [self._deposits[key] for key in keys]

    def leave(self, error: BaseException | None) -> None:
        """End this thread's part. With an error, all other threads are aborted."""
        with self._changed:
            self._running -= 1
            self._waiting.pop(threading.get_ident(), None)
            if error is not None and not isinstance(error, Aborted) and self.failure is None:
                self.failure = error
            if self.failure is None and self._waiting and self._is_stuck():
                places = sorted({where for _, where in self._waiting.values()})
                self.failure = Deadlock(f"some ranks have ended, and others wait at {', '.join(places)}")
            self._changed.notify_all()

    def _has(self, keys: tuple[tuple[Any, ...], ...]) -> bool:
        return all(key in self._deposits for key in keys)

    def _is_stuck(self) -> bool:
        return len(self._waiting) == self._running and not any(self._has(keys) for keys, _ in self._waiting.values())


class _Running:
    """A running communication. wait() computes the result from the deposits."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish = self._finish
        self._finish = None
        if finish is not None:
            finish()

    def is_done(self) -> bool:
        return self._finish is None


def _check(operation: str, x: Tensor, buffer: Tensor) -> None:
    """Refuse arguments that RCCL refuses or misreads, and that a copy in memory would accept. Raises ValueError."""
    if not (x.is_contiguous() and buffer.is_contiguous()):
        raise ValueError(f"{operation}: a tensor is not contiguous, so other elements would be sent")
    if x.device != buffer.device:
        raise ValueError(f"{operation}: the input is on {x.device}, and the buffer is on {buffer.device}")
    if x.dtype != buffer.dtype:
        raise ValueError(f"{operation}: the input has {x.dtype}, and the buffer has {buffer.dtype}")


class SimulatedGroup:
    """Collectives and messages among simulated ranks. Implements `comm.group.Group`."""

    def __init__(
        self, exchange: Exchange, name: str, rank: int, ranks: tuple[int, ...], observer: RankObserver
    ) -> None:
        self._exchange = exchange
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._observer = observer
        self._calls = 0
        self._messages: Counter[tuple[str, int]] = Counter()

    def _collective(
        self, operation: str, x: Tensor, buffer: Tensor, compute: Callable[[list[Tensor]], Tensor], summed: bool = False
    ) -> _Running:
        """Deposit `x`. wait() writes the result of `compute(inputs of all ranks)` into `buffer`."""
        _check(operation, x, buffer)
        key = (self._name, self._ranks, self._calls)
        self._calls += 1
        self._deposit((*key, self._rank), operation, x)
        site = self._observer.here()

        def finish() -> None:
            keys = tuple((*key, rank) for rank in range(len(self._ranks)))
            deposits = self._exchange.take(keys, self._observer.described(site))
            operations = {deposit.operation for deposit in deposits}
            if len(operations) > 1:
                raise Deadlock(f"the ranks of axis {self._name} call different collectives: {sorted(operations)}")
            self._write(operation, buffer, compute([deposit.tensor for deposit in deposits]), deposits, site, summed)

        return _Running(finish)

    def _deposit(self, key: tuple[Any, ...], operation: str, x: Tensor) -> None:
        with self._observer.quiet():
            copy = x.detach().clone()
        self._exchange.put(key, Deposit(operation, copy, self._observer.sources_of(x)))

    def _write(
        self,
        operation: str,
        buffer: Tensor,
        result: Tensor,
        deposits: Sequence[Deposit],
        site: Any,
        summed: bool = False,
    ) -> None:
        if result.dtype != buffer.dtype:
            raise ValueError(f"{operation}: the ranks pass tensors of {result.dtype} and of {buffer.dtype}")
        if result.numel() != buffer.numel():
            raise ValueError(f"{operation}: {result.numel()} elements arrive, and the buffer has {buffer.numel()}")
        with self._observer.quiet(), torch.no_grad():
            buffer.copy_(result.view(buffer.shape))
        sources = tuple(source for deposit in deposits for source in deposit.sources)
        self._observer.communicated(operation, self._name, buffer, summed, sources, site)

    def start_all_reduce_(self, x: Tensor, op: str) -> _Running:
        """Replace `x` by the sum or the maximum over the ranks."""

        def compute(inputs: list[Tensor]) -> Tensor:
            stacked = torch.stack(inputs)
            return stacked.sum(0) if op == "sum" else stacked.amax(0)

        return self._collective(f"all_reduce {op}", x, x, self._quietly(compute), summed=op == "sum")

    def start_all_gather_into(self, gathered: Tensor, x: Tensor) -> _Running:
        """Write the inputs of all ranks into `gathered`, in axis order."""
        return self._collective("all_gather", x, gathered, self._quietly(torch.cat))

    def start_reduce_scatter_into(self, scattered: Tensor, x: Tensor) -> _Running:
        """Write this rank's part of the sum into `scattered`."""

        def compute(inputs: list[Tensor]) -> Tensor:
            return torch.stack(inputs).sum(0).chunk(len(inputs))[self._rank]

        return self._collective("reduce_scatter", x, scattered, self._quietly(compute), summed=True)

    def start_all_to_all_into(self, arriving: Tensor, x: Tensor) -> _Running:
        """Start an all-to-all with equal parts."""

        def compute(inputs: list[Tensor]) -> Tensor:
            return torch.cat([one.view(len(inputs), -1)[self._rank] for one in inputs])

        return self._collective("all_to_all", x, arriving, self._quietly(compute))

    def start_broadcast_(self, x: Tensor, source: int) -> _Running:
        """Copy `x` of rank `source` to all ranks."""
        return self._collective("broadcast", x, x, lambda inputs: inputs[source])

    def start_barrier(self) -> _Running:
        """Wait until all ranks have called this method."""
        nothing = torch.zeros(1)
        return self._collective("barrier", nothing, nothing, lambda inputs: inputs[0])

    def start_all_to_all_rows_into(
        self, arriving: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> _Running:
        """Start an all-to-all with `sent[r]` rows to each rank r."""
        _check("all_to_all", x, arriving)
        key = (self._name, self._ranks, self._calls)
        self._calls += 1
        with self._observer.quiet():
            parts = x.detach().split(list(sent))
        for to, part in enumerate(parts):
            self._deposit((*key, self._rank, to), "all_to_all", part)
        site = self._observer.here()

        def finish() -> None:
            keys = tuple((*key, source, self._rank) for source in range(len(self._ranks)))
            deposits = self._exchange.take(keys, self._observer.described(site))
            with self._observer.quiet():
                rows = torch.cat([deposit.tensor for deposit in deposits])
            self._write("all_to_all", arriving, rows, deposits, site)

        return _Running(finish)

    def send(self, x: Tensor, to: int) -> _Running:
        """Send a copy of `x`. Never blocks."""
        _check("send", x, x)
        self._deposit(self._message(self._rank, to), "send", x)
        return _Running(lambda: None)

    def receive(self, buffer: Tensor, source: int) -> _Running:
        """Post a receive."""
        _check("receive", buffer, buffer)
        key = self._message(source, self._rank)
        site = self._observer.here()

        def finish() -> None:
            deposits = self._exchange.take((key,), self._observer.described(site))
            self._write("receive", buffer, deposits[0].tensor, deposits, site)

        return _Running(finish)

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> _Running:
        """Send to one rank and receive from another."""
        self.send(outgoing, to)
        return self.receive(incoming, source)

    def _message(self, source: int, to: int) -> tuple[Any, ...]:
        """Return the key of the next message from `source` to `to`."""
        direction = ("from" if to == self._rank else "to", source if to == self._rank else to)
        number = self._messages[direction]
        self._messages[direction] += 1
        return (self._name, self._ranks, "message", source, to, number)

    def _quietly(self, compute: Callable[[list[Tensor]], Tensor]) -> Callable[[list[Tensor]], Tensor]:
        def run(inputs: list[Tensor]) -> Tensor:
            with self._observer.quiet():
                return compute(inputs)

        return run


def simulated_mesh(
    grid: Grid,
    rank: int,
    placement: Placement,
    exchange: Exchange,
    observer: RankObserver,
    *,
    tied: bool,
    experts: bool,
    by_node: bool = False,
) -> Mesh:
    """Return the mesh of one simulated rank, with the axes that `comm.build_mesh` builds.

    With `by_node` each rank of ep is on a node of its own, so tokens are sent to experts in two stages.
    """
    ledger = Ledger()

    def axis(name: str, ranks: tuple[int, ...]) -> Axis:
        if len(ranks) == 1:
            return single(name, rank, ledger)
        place = ranks.index(rank)
        group = SimulatedGroup(exchange, name, place, ranks, observer)
        return Axis(name, place, len(ranks), ranks, group, ledger)

    def expert_axis() -> Axis:
        ranks = grid.experts_group(rank) if experts else (rank,)
        flat = axis("ep", ranks)
        if not by_node or flat.size == 1:
            return flat
        return replace(flat, nodes=flat.size, levels=(single("ep.node", rank, ledger), axis("ep.rail", ranks)))

    pipeline = grid.group("pp", rank)
    ends = tuple(pipeline[stage] for stage in placement.ends)
    axes = {name: axis(name, grid.group(name, rank)) for name in AXES}
    joint = grid.replicas
    return Mesh(
        **axes,
        replicas=axes[joint] if joint in axes else axis(joint, grid.group(joint, rank)),
        world=axis("world", tuple(range(grid.world_size))),
        tied=axis("tied", ends if tied and rank in ends else (rank,)),
        channels={channel.value: axis(f"pp.{channel.value}", pipeline) for channel in placement.streams},
        ledger=ledger,
        ep=expert_axis(),
        etp=axis("etp", grid.split_experts_group(rank) if experts else (rank,)),
        edp=axis("edp", grid.replicas_group(rank) if experts else (rank,)),
    )
