"""Simulated ranks: threads of this process that exchange tensors as the ranks of a mesh do.

`SimulatedGroup` implements the interface `comm.group.Group`. A collective reads copies of its inputs, so its result
does not depend on timing. If every thread waits for another thread, all of them end with the lines at which they wait.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from frontier_llm.certificate.axis_types.trace import EventId, Recorder, Site, stack, waiting_line
from frontier_llm.comm import Axis, Ledger, Mesh, mesh_of, single
from frontier_llm.schedule import Placement
from frontier_llm.topology.grid import Grid


class Aborted(Exception):
    """Ends a simulated rank after another rank has failed."""


class Deadlock(Exception):
    """All simulated ranks wait for each other. The message has the place at which each rank waits."""


@dataclass(frozen=True)
class Deposit:
    """Input of one rank to a communication."""

    operation: str
    tensor: Tensor
    sources: tuple[EventId, ...]
    sent: tuple[int, ...] = ()  # all_to_all: rows of `tensor` for each rank


class Exchange:
    """Passes deposits between the simulated ranks of one run, and lets one rank run at a time.

    Each rank is a thread. It runs until it waits for a deposit. Then the rank runs that has been ready for longest, so
    the order is the same in each run. Threads that ran together would take the interpreter's lock from each other at
    every operation of torch.
    """

    def __init__(self, ranks: int) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(ranks)]  # released when the rank may run
        self._ready = deque(range(ranks))
        self._deposits: dict[tuple[Any, ...], Deposit] = {}
        self._waiting: dict[int, tuple[tuple[tuple[Any, ...], ...], str]] = {}
        self.failure: BaseException | None = None

    def run(self, ranks: Sequence[Callable[[], None]]) -> None:
        """Call each function of `ranks` in a thread of its own, and wait until all have ended.

        `failure` is then the first error that a function raised, or None. After an error, each other function gets
        Aborted when it next waits.
        """
        threads = [
            threading.Thread(target=self._run_one, args=(rank, function), daemon=True)
            for rank, function in enumerate(ranks)
        ]
        for thread in threads:
            thread.start()
        self._pass_turn()
        for thread in threads:
            thread.join()

    def put(self, key: tuple[Any, ...], deposit: Deposit) -> None:
        """Store a deposit. Never blocks."""
        self._deposits[key] = deposit
        complete = [rank for rank, (keys, _) in self._waiting.items() if key in keys and self._has(keys)]
        self._make_ready(complete)

    def take(self, rank: int, keys: tuple[tuple[Any, ...], ...], place: str) -> list[Deposit]:
        """Wait for the deposits with these keys and return them.

        `place` is the line at which `rank` waits. Raises Aborted or Deadlock.
        """
        if not self._has(keys):
            if self.failure is not None:
                raise Aborted
            self._waiting[rank] = (keys, place)
            if not self._ready:
                places = Counter(where for _, where in self._waiting.values())
                listed = "; ".join(f"{count} at {where}" for where, count in places.items())
                del self._waiting[rank]
                raise Deadlock(f"the ranks wait for different communications: {listed}")
            self._pass_turn()
            self._turns[rank].acquire()
            if not self._has(keys):
                raise Aborted
        return [self._deposits[key] for key in keys]

    def _run_one(self, rank: int, function: Callable[[], None]) -> None:
        self._turns[rank].acquire()
        try:
            function()
        except Aborted:
            pass
        except BaseException as error:  # the caller of `run` finds the error in `failure`
            self.failure = self.failure or error
        if self.failure is None and self._waiting and not self._ready:
            places = sorted({where for _, where in self._waiting.values()})
            self.failure = Deadlock(f"some ranks have ended, and others wait at {', '.join(places)}")
        if self.failure is not None:
            self._make_ready(list(self._waiting))
        self._pass_turn()

    def _make_ready(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            del self._waiting[rank]
        self._ready.extend(ranks)

    def _pass_turn(self) -> None:
        if self._ready:
            self._turns[self._ready.popleft()].release()

    def _has(self, keys: tuple[tuple[Any, ...], ...]) -> bool:
        return all(key in self._deposits for key in keys)


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
    """Refuse arguments that RCCL refuses or misreads, although a copy in memory would accept them. Raises
    ValueError.
    """
    if not (x.is_contiguous() and buffer.is_contiguous()):
        raise ValueError(f"{operation}: a tensor is not contiguous, so other elements would be sent")
    if x.device != buffer.device:
        raise ValueError(f"{operation}: the input is on {x.device}, and the buffer is on {buffer.device}")
    if x.dtype != buffer.dtype:
        raise ValueError(f"{operation}: the input has {x.dtype}, and the buffer has {buffer.dtype}")


def _stacked(inputs: Sequence[Deposit]) -> Tensor:
    return torch.stack([deposit.tensor for deposit in inputs])


class SimulatedGroup:
    """Collectives and messages among simulated ranks. Implements `comm.group.Group`."""

    def __init__(self, exchange: Exchange, name: str, rank: int, ranks: tuple[int, ...], recorder: Recorder) -> None:
        self._exchange = exchange
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._recorder = recorder
        self._calls = 0
        self._messages: Counter[tuple[str, int]] = Counter()

    def _collective(
        self,
        operation: str,
        x: Tensor,
        buffer: Tensor,
        compute: Callable[[Sequence[Deposit]], Tensor],
        *,
        summed: bool = False,
        sent: tuple[int, ...] = (),
    ) -> _Running:
        """Deposit `x`. wait() writes the result of `compute(inputs of all ranks)` into `buffer`."""
        _check(operation, x, buffer)
        key = (self._name, self._ranks, self._calls)
        self._calls += 1
        self._deposit((*key, self._rank), operation, x, sent)
        site = stack()

        def finish() -> None:
            keys = tuple((*key, rank) for rank in range(len(self._ranks)))
            deposits = self._exchange.take(self._recorder.rank, keys, waiting_line(site))
            operations = {deposit.operation for deposit in deposits}
            if len(operations) > 1:
                raise Deadlock(f"the ranks of axis {self._name} call different collectives: {sorted(operations)}")
            with self._recorder.quiet():
                result = compute(deposits)
            self._write(operation, buffer, result, deposits, site, summed)

        return _Running(finish)

    def _deposit(self, key: tuple[Any, ...], operation: str, x: Tensor, sent: tuple[int, ...] = ()) -> None:
        with self._recorder.quiet():
            copy = x.detach().clone()
        self._exchange.put(key, Deposit(operation, copy, self._recorder.sources_of(x), sent))

    def _write(
        self,
        operation: str,
        buffer: Tensor,
        result: Tensor,
        deposits: Sequence[Deposit],
        site: Site,
        summed: bool = False,
    ) -> None:
        if result.dtype != buffer.dtype:
            raise ValueError(f"{operation}: the ranks pass tensors of {result.dtype} and of {buffer.dtype}")
        if result.numel() != buffer.numel():
            raise ValueError(f"{operation}: {result.numel()} elements arrive, and the buffer has {buffer.numel()}")
        with self._recorder.quiet(), torch.no_grad():
            buffer.copy_(result.view(buffer.shape))
        sources = tuple(source for deposit in deposits for source in deposit.sources)
        self._recorder.communicated(operation, self._name, buffer, summed, sources, site)

    def start_all_reduce_(self, x: Tensor, op: str) -> _Running:
        """Replace `x` by the sum or the maximum over the ranks."""
        join = torch.sum if op == "sum" else torch.amax
        return self._collective(f"all_reduce {op}", x, x, lambda inputs: join(_stacked(inputs), 0), summed=op == "sum")

    def start_all_gather_into(self, gathered: Tensor, x: Tensor) -> _Running:
        """Write the inputs of all ranks into `gathered`, in axis order."""
        return self._collective("all_gather", x, gathered, _stacked)

    def start_reduce_scatter_into(self, scattered: Tensor, x: Tensor) -> _Running:
        """Write this rank's part of the sum into `scattered`."""

        def compute(inputs: Sequence[Deposit]) -> Tensor:
            return _stacked(inputs).sum(0).chunk(len(inputs))[self._rank]

        return self._collective("reduce_scatter", x, scattered, compute, summed=True)

    def start_all_to_all_into(self, arriving: Tensor, x: Tensor) -> _Running:
        """Start an all-to-all with equal parts."""
        ones = [1] * len(self._ranks)
        return self.start_all_to_all_rows_into(arriving, x.view(len(ones), -1), ones, ones)

    def start_all_to_all_rows_into(
        self, arriving: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> _Running:
        """Start an all-to-all with `sent[r]` rows to each rank r."""

        def compute(inputs: Sequence[Deposit]) -> Tensor:
            return torch.cat([one.tensor.split(list(one.sent))[self._rank] for one in inputs])

        return self._collective("all_to_all", x, arriving, compute, sent=tuple(sent))

    def start_broadcast_(self, x: Tensor, source: int) -> _Running:
        """Copy `x` of rank `source` to all ranks."""
        return self._collective("broadcast", x, x, lambda inputs: inputs[source].tensor)

    def start_barrier(self) -> _Running:
        """Wait until all ranks have called this method."""
        nothing = torch.zeros(1)
        return self._collective("barrier", nothing, nothing, lambda inputs: inputs[0].tensor)

    def send(self, x: Tensor, to: int) -> _Running:
        """Send a copy of `x`. Never blocks."""
        _check("send", x, x)
        self._deposit(self._message(self._rank, to), "send", x)
        return _Running(lambda: None)

    def receive(self, buffer: Tensor, source: int) -> _Running:
        """Post a receive."""
        _check("receive", buffer, buffer)
        key = self._message(source, self._rank)
        site = stack()

        def finish() -> None:
            deposits = self._exchange.take(self._recorder.rank, (key,), waiting_line(site))
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


def simulated_mesh(
    grid: Grid,
    placement: Placement,
    exchange: Exchange,
    recorder: Recorder,
    *,
    tied_embeddings: bool,
    experts: bool,
    by_node: bool = False,
) -> Mesh:
    """Return the mesh of the simulated rank that `recorder` observes.

    With `by_node` each rank of ep is on a node of its own, so tokens are sent to experts in two stages.
    """
    ledger = Ledger()

    def new_axis(name: str, ranks: tuple[int, ...]) -> Axis:
        if len(ranks) == 1:
            return single(name, recorder.rank, ledger)
        place = ranks.index(recorder.rank)
        group = SimulatedGroup(exchange, name, place, ranks, recorder)
        axis = Axis(name, place, len(ranks), ranks, group, ledger)
        if name == "ep" and by_node:
            return replace(axis, nodes=axis.size, levels=(single("ep.node", recorder.rank), new_axis("ep.rail", ranks)))
        return axis

    return mesh_of(
        grid,
        recorder.rank,
        placement,
        new_axis,
        ledger,
        tied_embeddings=tied_embeddings,
        experts=experts,
    )
