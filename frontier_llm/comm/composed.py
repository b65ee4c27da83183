"""Operations that consist of collectives: sums with 16-bit summands, collectives in an autograd graph, and JSON values.

Sums of fp32 tensors whose summands travel in 16 bits move half the bytes of a reduce-scatter and are added in fp32. A
library's bf16 reduce-scatter rounds the running sum at every hop of its ring. Here each summand is rounded once, sent
to the rank that needs it (all-to-all: the same bytes), and added there in the buffer's own precision. This rank's
summand is not rounded. So the error of a sum of n is at most 2^-8 of the sum of the other summands' magnitudes,
whatever n is. The order of the additions is fixed: results are bitwise the same in every run.

Values travel as JSON in tensors of bytes, without the pickle of torch's object collectives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm.axis import Axis, Started, all_gather, all_reduce_, broadcast_, start_all_to_all_into
from frontier_llm.comm.group import DONE, Pending


class _Sum:
    """Summands under way; added in wait(). With `everywhere` every rank then gets all of it, rounded once more."""

    def __init__(self, x: Tensor, axis: Axis, wire: torch.dtype, everywhere: bool) -> None:
        self._x = x
        self._axis = axis
        self._wire = wire
        self._everywhere = everywhere
        self._outgoing = x.to(wire)
        self._arriving = torch.empty_like(self._outgoing)
        self._pending: Pending | None = start_all_to_all_into(self._arriving, self._outgoing, axis)

    def wait(self) -> None:
        """See Pending."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        own = self._x.chunk(self._axis.size)[self._axis.rank]
        for rank, summand in enumerate(self._arriving.chunk(self._axis.size)):
            if rank != self._axis.rank:
                own += summand
        del self._outgoing, self._arriving
        if self._everywhere:
            self._x.copy_(all_gather(own.to(self._wire), self._axis))


def start_narrow_sum_(x: Tensor, axis: Axis, wire: torch.dtype, *, everywhere: bool) -> Pending:
    """Begin to sum [n * size] over the axis, summands sent as `wire`; after wait() this rank's part of `x` holds its
    sum.

    `everywhere`: all of `x` does; the sums travel back as `wire` too, so that all ranks hold the same bits.
    """
    return DONE if axis.group is None else _Sum(x, axis, wire, everywhere)


Move = Callable[[Tensor, Axis], Tensor]


def moved(x: Tensor, axis: Axis, there: Move, back: Move) -> Tensor:
    """there(x, axis), a tensor of its own; its backward is back(gradient, axis)."""
    return _Moved.apply(x, axis, there, back)


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, there: Move, back: Move) -> Tensor:
        ctx.axis = axis
        ctx.back = back
        return there(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0], ctx.axis), None, None, None


def _encode(value: Any, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8).to(device)


def _decode(encoded: Tensor) -> Any:
    return json.loads(encoded.cpu().numpy().tobytes())


def all_gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Every rank's value, in axis order, on every rank. Collective."""
    if axis.size == 1:
        return [value]
    encoded = _encode(value, device)
    lengths = all_gather(torch.tensor([encoded.numel()], dtype=torch.int64, device=device), axis).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: encoded.numel()] = encoded
    rows = all_gather(padded, axis).view(axis.size, -1)
    return [_decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def broadcast_bytes(value: bytes, axis: Axis, device: torch.device) -> bytes:
    """Rank 0's bytes on every rank; the others' are ignored. Collective."""
    if axis.size == 1:
        return value
    length = broadcast_(torch.tensor([len(value)], dtype=torch.int64, device=device), axis, 0)
    buffer = torch.zeros(max(int(length), 1), dtype=torch.uint8, device=device)
    if axis.rank == 0 and value:
        buffer.copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
    return broadcast_(buffer, axis, 0).cpu().numpy().tobytes()[: int(length)]


def broadcast_json(value: Any, axis: Axis, device: torch.device) -> Any:
    """Rank 0's value on every rank; the others' are ignored. Collective."""
    if axis.size == 1:
        return value
    return json.loads(broadcast_bytes(json.dumps(value).encode(), axis, device))


def maximum(values: list[int], axis: Axis, device: torch.device) -> list[int]:
    """Element-wise maximum over the ranks. Collective."""
    return [
        int(value)
        for value in all_reduce_(torch.tensor(values, dtype=torch.int64, device=device), axis, "max").tolist()
    ]


def start_shift(x: Tensor, axis: Axis) -> tuple[Tensor, Started]:
    """Begin to hand a contiguous tensor on to the next rank of the axis, the last one's to the first; what arrives
    may be read after wait().
    """
    incoming = torch.empty_like(x)
    return incoming, start_exchange(x, (axis.rank + 1) % axis.size, incoming, (axis.rank - 1) % axis.size, axis)


def start_exchange(outgoing: Tensor, to: int, incoming: Tensor, source: int, axis: Axis) -> Started:
    """Begin to send to axis rank `to` and to receive from axis rank `source` at the same time; both contiguous,
    counted as send and recv.
    """
    group = axis.group
    assert group is not None, "an axis of one rank has no one to exchange with"
    axis.ledger.add(axis.name, "send", outgoing.nbytes).finished = True
    return Started(axis, "recv", incoming.nbytes, lambda: group.exchange(outgoing, to, incoming, source))
