"""Operations built from collectives: sums with 16-bit summands, collectives in an autograd graph, and the exchange of
JSON values.

A sum of fp32 tensors with 16-bit summands moves half the bytes of an fp32 reduce-scatter. The bf16 reduce-scatter of a
library (RCCL) rounds the running sum at every hop of the ring. Here each summand is rounded once, and an all-to-all
sends it to the rank that needs it. The all-to-all moves the same number of bytes as a 16-bit reduce-scatter. The
receiving rank adds the summands in the buffer's own precision, and does not round its own summand. So the error of a
sum is at most 2^-8 of the sum of the other summands' magnitudes, for any number of summands. The order of the additions
is fixed, so results are bitwise the same in every run.

JSON values are sent as byte tensors, because torch's object collectives would use pickle.
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
    """A running sum. wait() adds the received summands. With `everywhere`, it also all-gathers the rounded sums."""

    def __init__(self, x: Tensor, axis: Axis, wire: torch.dtype, everywhere: bool) -> None:
        self._x = x
        self._axis = axis
        self._wire = wire
        self._everywhere = everywhere
        self._outgoing = x.to(wire)
        self._arriving = torch.empty_like(self._outgoing)
        self._pending: Pending | None = start_all_to_all_into(self._arriving, self._outgoing, axis)

    def wait(self) -> None:
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
    """Begin to sum `x` [n * size] over the axis. Summands are sent with dtype `wire`.

    After wait() this rank's part of `x` holds the sum. With `everywhere`, all of `x` holds the sum on every rank. The
    sums are then also sent with dtype `wire`, so that all ranks hold the same bits.
    """
    return DONE if axis.group is None else _Sum(x, axis, wire, everywhere)


Move = Callable[[Tensor, Axis], Tensor]


def moved(x: Tensor, axis: Axis, there: Move, back: Move) -> Tensor:
    """Return there(x, axis) as an autograd operation with the backward back(gradient, axis).

    `there` must return a new tensor.
    """
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
    """Return the JSON values of all ranks, in axis order. Collective over the axis."""
    if axis.size == 1:
        return [value]
    encoded = _encode(value, device)
    lengths = all_gather(torch.tensor([encoded.numel()], dtype=torch.int64, device=device), axis).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: encoded.numel()] = encoded
    rows = all_gather(padded, axis).view(axis.size, -1)
    return [_decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def broadcast_bytes(value: bytes, axis: Axis, device: torch.device) -> bytes:
    """Return rank 0's bytes on every rank. The values of the other ranks are ignored. Collective."""
    if axis.size == 1:
        return value
    length = broadcast_(torch.tensor([len(value)], dtype=torch.int64, device=device), axis, 0)
    buffer = torch.zeros(max(int(length), 1), dtype=torch.uint8, device=device)
    if axis.rank == 0 and value:
        buffer.copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
    return broadcast_(buffer, axis, 0).cpu().numpy().tobytes()[: int(length)]


def broadcast_json(value: Any, axis: Axis, device: torch.device) -> Any:
    """Return rank 0's value on every rank. The values of the other ranks are ignored. Collective."""
    if axis.size == 1:
        return value
    return json.loads(broadcast_bytes(json.dumps(value).encode(), axis, device))


def maximum(values: list[int], axis: Axis, device: torch.device) -> list[int]:
    """Return the element-wise maximum over the ranks. Collective."""
    return [
        int(value)
        for value in all_reduce_(torch.tensor(values, dtype=torch.int64, device=device), axis, "max").tolist()
    ]


def start_shift(x: Tensor, axis: Axis) -> tuple[Tensor, Started]:
    """Start to send a contiguous tensor to the next rank of the axis. The last rank sends to the first.

    Returns (incoming tensor, pending). The incoming tensor may be read after wait().
    """
    incoming = torch.empty_like(x)
    return incoming, start_exchange(x, (axis.rank + 1) % axis.size, incoming, (axis.rank - 1) % axis.size, axis)


def start_exchange(outgoing: Tensor, to: int, incoming: Tensor, source: int, axis: Axis) -> Started:
    """Begin to send to axis rank `to` and to receive from axis rank `source` at the same time.

    Both tensors are contiguous. The ledger counts one send and one recv.
    """
    group = axis.group
    assert group is not None, "an axis of one rank has no peer"
    axis.ledger.add(axis.name, "send", outgoing.nbytes).finished = True
    return Started(axis, "recv", incoming.nbytes, lambda: group.exchange(outgoing, to, incoming, source))
