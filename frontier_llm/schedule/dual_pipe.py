"""DualPipeV: a V-shaped pipeline schedule whose steady state consists of forward-backward pairs.

In a V each rank holds two virtual stages (positions). A pair is a forward through one position and the backward of
another microbatch through the other position.

Neither half of a pair depends on the other, so the communication of one half overlaps with the compute of the other.
The forward is executed first. Its message is sent during the backward, and the gradient for the backward arrives during
the forward. The kernels of the backward are issued after those of the forward. Collectives inside layers therefore do
not overlap with the other half. The exception is the all-to-all to experts: in models with experts a pair can be
executed as one unit (schedule/actions.py).

If a rank may have only one communication in flight, neighbouring ranks must begin their pairs at the same time. The
order of communication is therefore computed as if forward and backward had equal length
(`ScheduleRule.backward_length`). With a backward of twice the length, a forward's message would reach the neighbour in
the middle of a backward. Such a step takes 28 to 37 % longer with 4 to 16 ranks, if compute waits for messages
(simulated with F : I : W = 50 : 62 : 44 and a message of 4 % of a forward). With the order for equal lengths a step
takes 3 to 5 % less time than with ZB-V.

Source: DeepSeek-AI 2024 (arXiv:2412.19437, section 3.2.1) in the V form of its authors' repository
(deepseek-ai/DualPipe).
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from frontier_llm.schedule.actions import Action, Kind, Placement
from frontier_llm.schedule.registry import Number, ScheduleRule, register
from frontier_llm.schedule.zero_bubble import v_shape

# The two directions through the ranks: DOWN is a rank's first position, UP its second.
DOWN = 0
UP = 1


class _Rank:
    """One rank's order while it is built. Microbatches of each kind and direction run in ascending order."""

    def __init__(self, positions: tuple[int, ...]) -> None:
        self.order: list[Action] = []
        self._positions = positions
        self._done = Counter[tuple[bool, int]]()
        self._late = deque[Action]()

    def forward(self, way: int) -> None:
        self._add(Kind.FORWARD, way)

    def backward(self, way: int, split: bool = False) -> None:
        """Append a backward.

        With `split`, append only its input gradient; `weights` appends its weight gradient later.
        """
        self._add(Kind.BACKWARD_INPUT if split else Kind.BACKWARD, way)
        if split:
            self._late.append(self.order[-1]._replace(kind=Kind.BACKWARD_WEIGHT))

    def pair(self, forward: int) -> None:
        """Append a forward in one direction and a backward in the other."""
        self.forward(forward)
        self.backward(1 - forward)

    def weights(self) -> None:
        """Append the weight gradient of the oldest split backward."""
        self.order.append(self._late.popleft())

    def _add(self, kind: Kind, way: int) -> None:
        turn = kind is Kind.FORWARD, way
        self.order.append(Action(kind, self._done[turn], self._positions[way]))
        self._done[turn] += 1


def _dual_pipe_v(placement: Placement, microbatches: int, rank: int) -> list[Action]:
    """Return the compute order. With fewer than 2p microbatches, build the order for 2p and drop the excess
    microbatches.
    """
    behind = placement.ranks - 1 - rank
    before = rank + 1  # number of ranks up to and including this rank
    program = _Rank(placement.positions_of(rank))
    for _ in range(2 * behind):
        program.forward(DOWN)
    for _ in range(before):
        program.forward(DOWN)
        program.forward(UP)
    for _ in range(behind):  # gradients arrive with gaps at first, and weight gradients fill the gaps
        program.backward(UP, split=True)
        program.weights()
        program.forward(UP)
    for _ in range(max(microbatches, 2 * placement.ranks) - 2 * placement.ranks + before):
        program.pair(DOWN)
        program.pair(UP)
    for _ in range(behind):
        program.backward(UP)
        program.pair(UP)
    for turn in range(2 * before):  # the second half of these backwards leaves its weight gradients to the drain
        program.backward(UP if turn % 2 == 0 else DOWN, split=turn >= before)
    for _ in range(behind):
        program.weights()
        program.backward(DOWN, split=True)
    for _ in range(before):
        program.weights()
    return [action for action in program.order if action.microbatch < microbatches]


def _peak_in_flight(stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
    """Return the peak number of activations, summed over a rank's two positions.

    With enough microbatches it is 2p + 1 on every rank: one for each position of the model, and one more for the pair.
    """
    return np.minimum(microbatches, 2 * stages - stage) + np.minimum(microbatches, stage + 1)


def _peak_waiting(stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
    """Return 0, because until the last forward each weight gradient directly follows its input gradient."""
    return 0 * microbatches


def _peak_waiting_in_backward(stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
    """Return the number of weight gradients that rank r leaves to the drain, r, and one more for the input gradient."""
    return np.minimum(microbatches, stage + 1)


def _split_share(stages: Number, microbatches: Number) -> Number:
    """Return the fraction of backwards that are split, as a mean over the ranks. Rank r splits 2p - 1 - r of its 2m
    backwards.

    With fewer microbatches than positions the result is an estimate with an error of at most a quarter.
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
        peak_waiting_in_backward=_peak_waiting_in_backward,
        idle=1 / 6,
        pairs=True,
        backward_length=1.0,
        about="a V that runs a forward and another microbatch's backward in pairs",
    ),
)
