"""Sums of fp32 tensors whose summands travel in 16 bits: half the bytes of a reduce-scatter, added in fp32.

A library's bf16 reduce-scatter rounds the running sum at every hop of its ring. Here each summand is rounded once, sent
to the rank that needs it (all-to-all: the same bytes), and added there in the buffer's own precision, this rank's
summand unrounded. So the error of a sum of n is at most 2^-8 of the sum of the other summands' magnitudes, whatever n
is. The order of the additions is fixed: results are bitwise the same in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frontier_llm.comm.axis import Axis
from frontier_llm.comm.collectives import all_gather, start_all_to_all_into
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
