"""Collectives and messages between CPU ranks of one host through shared memory (csrc/shm/, loaded with ctypes).

gloo sends every byte through a loopback socket, and its threads occupy cores that should compute. With shared memory, a
rank copies its data into its own slot, and reads the slots of its peers. docs/benchmarks/communication.md compares both
transports. If a peer dies or stops responding, the error names the axis and the rank. The memory has no name, and the
kernel frees it after its last process has ended.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from frontier_llm.comm.group import DONE, Pending, Sending, listed, named
from frontier_llm.comm.host_memory import MEMORY_DIR, library
from frontier_llm.errors import BackendError, RankFailure

# Size of a slot: the bytes that one step of a collective moves. The four slots of a rank fit into a core's share of the
# cache.
SLOT_BYTES = 512 * 1024
# Address space for messages in flight between two ranks. Memory is committed only when it is used.
ARENA_BYTES = 1 << 30
PIECE_BYTES = ARENA_BYTES // 8
# Time that a waiting rank polls before it sleeps, because a wake-up takes about 50 us. Polling yields the core to other
# threads.
SPIN_NS = 50_000
SLICE_NS = 200_000_000  # a call of the C++ library returns after this time, so that Python can handle signals

_KINDS = {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 2, "broadcast": 3, "all_to_all": 4}
_TYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.uint8: 6,
}
_PENDING = 1
_DEAD = -1
_MISMATCH = -2
_NO_SPACE = -3


class _Collective:
    """A running collective, which keeps its tensors alive."""

    def __init__(self, group: ShmGroup, number: int, what: str, tensors: tuple[Tensor, ...]) -> None:
        self._group = group
        self._number = number
        self._what = what
        self._tensors = tensors

    def wait(self) -> None:
        """Complete the part of this rank in this collective, and in all collectives that were started earlier."""
        self._group.finish(self._number, self._what)


class _Message:
    """A posted receive."""

    def __init__(self, group: ShmGroup, source: int, buffer: Tensor) -> None:
        self._group = group
        self._source = source
        self._buffer = buffer
        self.arrived = False

    def take(self) -> None:
        """Copy the next message of the source into this receive's buffer."""
        self._group.take(self._buffer, self._source)
        self.arrived = True

    def wait(self) -> None:
        """Take messages for all receives that were posted earlier, and then for this receive."""
        posted = self._group.posted[self._source]
        while not self.arrived:
            posted.popleft().take()


class _Together:
    """Several messages with one `wait`."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


class ShmGroup:
    """Communication group (interface `Group`) of an axis whose ranks are on one host.

    A `start_…` method copies this rank's data into the shared memory and returns. `wait` reads the data of the peers.
    If a peer dies, does not respond within `timeout_s`, or calls another operation, RankFailure with axis and rank is
    raised. A dead peer is detected within about 20 ms. Raises BackendError if /dev/shm is full or if the dtype is not
    one of _TYPES.
    """

    def __init__(self, name: str, rank: int, ranks: tuple[int, ...], descriptor: int, timeout_s: float) -> None:
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._timeout_s = timeout_s
        self.posted: dict[int, deque[_Message]] = defaultdict(deque)
        self._started: deque[_Collective] = deque()  # keeps started collectives alive if the caller drops the Pending
        self._done = -1
        status = ctypes.c_int64(0)
        slot_bytes = max(SLOT_BYTES, 4096 * len(ranks))
        self._region = library().fl_shm_open(
            descriptor,
            rank,
            len(ranks),
            slot_bytes,
            ARENA_BYTES,
            SPIN_NS,
            ctypes.byref(status),
        )
        if not self._region:
            raise BackendError(
                f"cannot map shared memory for axis {name}: status {status.value}",
                self._room_fix(),
                "comm",
            )

    def __del__(self) -> None:
        if getattr(self, "_region", None):
            library().fl_shm_close(self._region)
            self._region = None

    def start_all_reduce_(self, x: Tensor, op: str) -> Pending:
        """Start an all-reduce in the order of the ranks, so that all ranks get the same bits."""
        return self._start("all_reduce", x, x, x.numel(), take_max=op == "max")

    def start_all_gather_into(self, gathered: Tensor, x: Tensor) -> Pending:
        """Start an all-gather through the slots of the ranks."""
        assert gathered.numel() == len(self._ranks) * x.numel() and gathered.dtype == x.dtype
        return self._start("all_gather", x, gathered, x.numel())

    def start_reduce_scatter_into(self, scattered: Tensor, x: Tensor) -> Pending:
        """Start a reduce-scatter, which sums in the order of the ranks."""
        assert x.numel() == len(self._ranks) * scattered.numel() and scattered.dtype == x.dtype
        return self._start("reduce_scatter", x, scattered, scattered.numel())

    def start_all_to_all_into(self, arriving: Tensor, x: Tensor) -> Pending:
        """Start an exchange of equal parts through the slots of the ranks."""
        assert arriving.shape == x.shape and arriving.dtype == x.dtype and x.numel() % len(self._ranks) == 0
        return self._start("all_to_all", x, arriving, x.numel() // len(self._ranks))

    def start_all_to_all_rows_into(
        self,
        arriving: Tensor,
        x: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> Pending:
        """Send the rows as messages.

        This call copies the rows to the shared memory. The receiver's `wait` copies them from there.
        """
        outgoing = x.split(list(sent))
        incoming = arriving.split(list(received))
        others = [(self._rank + step) % len(self._ranks) for step in range(1, len(self._ranks))]
        for peer in others:
            self.send(outgoing[peer], peer)
        incoming[self._rank].copy_(outgoing[self._rank])
        return _Together([self.receive(incoming[peer], peer) for peer in others])

    def start_broadcast_(self, x: Tensor, source: int) -> Pending:
        """Start a broadcast through the slot of rank `source`."""
        return self._start("broadcast", x, x, x.numel(), root=source)

    def start_barrier(self) -> Pending:
        """Start an all-reduce without elements."""
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._start("all_reduce", nothing, nothing, 0)

    def send(self, x: Tensor, to: int) -> Sending:
        """Copy the message into the shared memory. Waits only if the peer has ARENA_BYTES of messages not yet taken."""
        for start, size in _pieces(x):
            self._until_done("send", library().fl_shm_send, to, x.data_ptr() + start, size)
        return DONE

    def receive(self, buffer: Tensor, source: int) -> Pending:
        """Post a receive. `wait` copies the message into `buffer`."""
        message = _Message(self, source, buffer)
        self.posted[source].append(message)
        return message

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Pending:
        """Send, then post the receive. The send does not wait for the peer, unless ARENA_BYTES are full."""
        self.send(outgoing, to)
        return self.receive(incoming, source)

    def take(self, buffer: Tensor, source: int) -> None:
        """Wait for the next message from `source` and copy it into `buffer`."""
        for start, size in _pieces(buffer):
            self._until_done("receive", library().fl_shm_receive, source, buffer.data_ptr() + start, size)

    def finish(self, number: int, what: str) -> None:
        """Complete the collectives up to `number`."""
        if number <= self._done:
            return
        self._until_done(what, library().fl_shm_finish, number)
        self._done = number
        while self._started and self._started[0]._number <= number:
            self._started.popleft()

    def _start(
        self,
        what: str,
        x: Tensor,
        out: Tensor,
        elements: int,
        take_max: bool = False,
        root: int = 0,
    ) -> Pending:
        if x.dtype not in _TYPES:
            raise BackendError(
                f"shared memory cannot {what} {x.dtype}",
                "use one of " + ", ".join(map(str, _TYPES)),
                f"axis {self._name}",
            )
        assert x.is_contiguous() and out.is_contiguous() and x.device.type == "cpu"
        number = library().fl_shm_start(
            self._region,
            _KINDS[what],
            _TYPES[x.dtype],
            take_max,
            root,
            x.data_ptr(),
            out.data_ptr(),
            elements,
        )
        if number < 0:
            self._raise(number, what, 0.0)
        self._started.append(_Collective(self, number, what, (x, out)))
        return self._started[-1]

    def _until_done(self, what: str, function: Callable[..., int], *arguments: int) -> None:
        """Repeat a call of the C++ library until it reports that the operation has ended, or until the time-out.

        Each call returns after at most SLICE_NS, so that Python can handle signals.
        """
        status = function(self._region, *arguments, SLICE_NS)
        started_s = time.monotonic()
        while status == _PENDING and time.monotonic() - started_s < self._timeout_s:
            status = function(self._region, *arguments, SLICE_NS)
        if status:
            self._raise(status, what, self._timeout_s)

    def _raise(self, status: int, what: str, waited_s: float) -> None:
        culprit = library().fl_shm_culprit(self._region)
        peer = named(self._name, [culprit], self._ranks) if culprit >= 0 else "a rank"
        us = (
            f"{what} on axis {self._name}, rank {self._rank} (global rank {self._ranks[self._rank]}) among "
            f"{listed(self._ranks)}"
        )
        if status == _DEAD:
            raise RankFailure(
                f"{us}: {peer} has died or left",
                fix="read the log of this rank, and find the rank that failed first",
            )
        if status == _PENDING:
            everyone = range(len(self._ranks))
            steps = [library().fl_shm_progress(self._region, rank) for rank in everyone]
            if what not in ("send", "receive"):
                missing = [rank for rank in everyone if library().fl_shm_is_missing(self._region, rank)]
                peer = named(self._name, missing, self._ranks) or peer
            raise RankFailure(
                f"{us}: no answer from {peer} within {waited_s:g} s; last step that each rank of the axis has "
                f"published: {steps}",
                fix=f"see what {peer} is doing (py-spy dump); raise train.timeout_s if it is only slow",
            )
        if status == _MISMATCH:
            raise RankFailure(
                f"{us}: {peer} calls another operation, or passes another shape or dtype",
                fix="all ranks of an axis must make the same calls in the same order",
            )
        if status == _NO_SPACE:
            raise BackendError(f"{us}: not enough free space in {MEMORY_DIR}", self._room_fix(), "comm")
        raise AssertionError(f"{us}: status {status}")

    @staticmethod
    def _room_fix() -> str:
        free_mib = os.statvfs(MEMORY_DIR).f_bavail * os.statvfs(MEMORY_DIR).f_frsize >> 20
        return f"{MEMORY_DIR} has {free_mib} MiB free: enlarge it (docker: --shm-size=2g), or set comm.transport=torch"


def _pieces(x: Tensor) -> list[tuple[int, int]]:
    """Split a tensor into messages of at most PIECE_BYTES. Returns their (byte offset, number of bytes).

    An empty tensor is one message.
    """
    total = x.nbytes
    return [(start, min(PIECE_BYTES, total - start)) for start in range(0, max(total, 1), PIECE_BYTES)]
