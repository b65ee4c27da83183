"""DualPipeV: a V whose steady state is pairs, a forward beside the backward of another microbatch through the rank's
other position.

Neither half of a pair needs the other, so what one sends and waits for goes on under the other's compute: the forward
comes first, its message leaves under the backward, and the gradient that the backward needs arrives under the forward.
Kernels of the two are issued one after the other, so of the collectives inside layers only rows to experts go under the
other half's products: there the pair is played as one (schedule/actions.py). Where a rank has one communication in
flight, neighbours must keep step: the order of communication is made for halves of one length (`beat`). Made for a
backward of twice a forward, a forward's message meets the neighbour in the middle of a backward: with F : I : W = 50 :
62 : 44 and a message of 4 % of a forward a step of 4 to 16 ranks takes 28 to 37 % longer where compute waits for
messages (simulated); so it takes 3 to 5 % less than ZB-V.

Source: DeepSeek-AI 2024 (arXiv:2412.19437, section 3.2.1) in the V form of its authors' repository
(deepseek-ai/DualPipe).
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from frontier_llm.schedule.actions import Action, Kind, Placement
from frontier_llm.schedule.registry import Number, ScheduleRule, register
from frontier_llm.schedule.zero_bubble import v_shape

# the two ways through the ranks: a rank's first position and its second
DOWN = 0
UP = 1


class _Rank:
    """One rank's order as it grows; microbatches of each kind and way run in turn."""

    def __init__(self, positions: tuple[int, ...]) -> None:
        self.order: list[Action] = []
        self._positions = positions
        self._done = Counter[tuple[bool, int]]()
        self._late = deque[Action]()

    def forward(self, way: int) -> None:
        self._add(Kind.FORWARD, way)

    def backward(self, way: int, split: bool = False) -> None:
        """Both gradients; with `split` the weights' follow later, by `weights`."""
        self._add(Kind.BACKWARD_INPUT if split else Kind.BACKWARD, way)
        if split:
            self._late.append(self.order[-1]._replace(kind=Kind.BACKWARD_WEIGHT))

    def pair(self, forward: int) -> None:
        """A forward one way, a backward the other way."""
        self.forward(forward)
        self.backward(1 - forward)

    def weights(self) -> None:
        """Of the split backward that has waited longest."""
        self.order.append(self._late.popleft())

    def _add(self, kind: Kind, way: int) -> None:
        turn = kind is Kind.FORWARD, way
        self.order.append(Action(kind, self._done[turn], self._positions[way]))
        self._done[turn] += 1


def _dual_pipe_v(placement: Placement, microbatches: int, rank: int) -> list[Action]:
    """Fewer microbatches than positions are played as that many, of which the missing are skipped: what is left of a
    legal order is legal.
    """
    # ranks behind this one; this one and those before
    behind = placement.ranks - 1 - rank
    before = rank + 1
    played = _Rank(placement.positions_of(rank))
    for _ in range(2 * behind):
        played.forward(DOWN)
    for _ in range(before):
        played.forward(DOWN)
        played.forward(UP)
    for _ in range(behind):  # the first gradients come up one at a time: weight gradients fill the time between
        played.backward(UP, split=True)
        played.weights()
        played.forward(UP)
    for _ in range(max(microbatches, 2 * placement.ranks) - 2 * placement.ranks + before):
        played.pair(DOWN)
        played.pair(UP)
    for _ in range(behind):
        played.backward(UP)
        played.pair(UP)
    for turn in range(2 * before):  # from the middle on the weights' gradients wait, for the drain
        played.backward(UP if turn % 2 == 0 else DOWN, split=turn >= before)
    for _ in range(behind):
        played.weights()
        played.backward(DOWN, split=True)
    for _ in range(before):
        played.weights()
    return [action for action in played.order if action.microbatch < microbatches]


def _peak_in_flight(stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
    """Of its first position and of its second; with microbatches enough as many on every rank, one for each position
    of the model and one for the pair.
    """
    return np.minimum(microbatches, 2 * stages - stage) + np.minimum(microbatches, stage + 1)


def _peak_waiting(stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
    """None: while there are forwards, weight gradients follow at once."""
    return 0 * microbatches


def _split_share(stages: Number, microbatches: Number) -> Number:
    """On each rank 2p - 1 - rank of 2m, before the pairs and behind them. Of fewer microbatches than positions it is
    a guess, at most a quarter off.
    """
    return (3 * stages - 1) / (4 * np.maximum(microbatches, 2 * stages))


register(
    "dualpipe-v",
    ScheduleRule(
        order=_dual_pipe_v,
        placement=v_shape,
        chunks=(2,),
        splits_backward=True,
        split_share=_split_share,
        peak_in_flight=_peak_in_flight,
        peak_waiting=_peak_waiting,
        idle=1 / 6,
        pairs=True,
        beat=1.0,
    ),
)
