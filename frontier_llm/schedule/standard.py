"""Schedules GPipe, 1F1B, interleaved 1F1B, ZB-H1 and ZB-H2: order of compute and peak number of activations.

Sources: GPipe (Huang et al. 2019), 1F1B (PipeDream-Flush, Narayanan et al. 2021), interleaved 1F1B (Narayanan et al.,
SC21, section 2.2), ZB-H1 and ZB-H2 (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product

import numpy as np

from frontier_llm.schedule.actions import Action, Kind, Placement
from frontier_llm.schedule.registry import Number, ScheduleRule, register

Order = list[Action]
MOST_CHUNKS = 1024


def _gpipe(placement: Placement, microbatches: int, rank: int) -> Order:
    """Return all forwards, then all backwards."""
    return [*_all(Kind.FORWARD, microbatches, rank), *_all(Kind.BACKWARD, microbatches, rank)]


def _one_f_one_b(placement: Placement, microbatches: int, rank: int) -> Order:
    """Return one forward for each later stage as warm-up, then alternate forwards and backwards."""
    warmup = placement.ranks - 1 - rank
    return _alternate(_all(Kind.FORWARD, microbatches, rank), _all(Kind.BACKWARD, microbatches, rank), warmup)


def interleaved(placement: Placement, microbatches: int, rank: int) -> Order:
    """Return the order of interleaved 1F1B: rounds of pp microbatches pass through a rank's chunks.

    Each rank has 2 warm-up forwards more than the next rank (1F1B: 1 more). An incomplete last round is built as a
    complete round, and the excess microbatches are dropped. A legal order remains legal if microbatches are dropped
    from it, so no number of microbatches causes a deadlock. If the last round were instead shortened to fewer than pp
    microbatches, ranks would deadlock.
    """
    stages = placement.ranks
    held = placement.positions_of(rank)
    if len(held) == 1:
        return _one_f_one_b(placement, microbatches, rank)
    rounds = range(0, microbatches, stages)

    def passes(kind: Kind, through: Sequence[int]) -> Order:
        return [
            Action(kind, first + place, position) for first, position, place in product(rounds, through, range(stages))
        ]

    warmup = 2 * (stages - 1 - rank) + (len(held) - 1) * stages
    order = _alternate(passes(Kind.FORWARD, held), passes(Kind.BACKWARD, held[::-1]), warmup)
    return [action for action in order if action.microbatch < microbatches]


@dataclass(frozen=True)
class _ZeroBubble:
    """1F1B with a split backward and `depth` times as long a warm-up (ZB-H1, ZB-H2).

    On a rank, the W of a microbatch follows `depth · rank` input gradients later than its I. The delayed W fill the
    bubbles of the drain. Rank r has `depth · r` fewer warm-up forwards than rank 0, so every rank keeps the same number
    of activations.
    """

    depth: int  # 1: ZB-H1; 2: ZB-H2, in which no rank idles between its first and its last action

    def __call__(self, placement: Placement, microbatches: int, rank: int) -> Order:
        forwards = _all(Kind.FORWARD, microbatches, rank)
        inputs = _all(Kind.BACKWARD_INPUT, microbatches, rank)
        weights = _all(Kind.BACKWARD_WEIGHT, microbatches, rank)
        delay = self.depth * rank
        order: Order = []
        for action in _alternate(forwards, inputs, warmup=self.depth * (placement.ranks - 1 - rank)):
            order.append(action)
            late = action.microbatch - delay
            if action.kind is Kind.BACKWARD_INPUT and late >= 0:
                order.append(weights[late])
        return order + weights[max(0, microbatches - delay) :]

    def peak_in_flight(self, stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
        return np.minimum(microbatches, self.depth * (stages - 1) + 1)

    def peak_waiting(self, stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
        return self.peak_in_flight(stages, microbatches, chunks, stage) - np.minimum(
            microbatches,
            self.depth * (stages - 1 - stage) + 1,
        )

    def peak_waiting_in_backward(self, stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
        return np.minimum(microbatches, self.depth * stage + 1)


def _all(kind: Kind, microbatches: int, position: int) -> Order:
    return [Action(kind, microbatch, position) for microbatch in range(microbatches)]


def _alternate(forwards: Order, backwards: Order, warmup: int) -> Order:
    """Return `warmup` forwards, then one forward and one backward alternately, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    pairs = chain.from_iterable(zip(forwards[warmup:], backwards[:steady], strict=True))
    return [*forwards[:warmup], *pairs, *backwards[steady:]]


# --------------------------------------------------------------------------------------------------- kept activations


def _peak_one_f_one_b(stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
    return np.minimum(microbatches, stages - stage)


def peak_interleaved(stages: Number, microbatches: Number, chunks: Number, stage: Number) -> Number:
    """Return the peak number of activations: Megatron's warm-up forwards plus 1.

    With an incomplete last round this is an upper bound.
    """
    rounds = np.minimum(microbatches * chunks, 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1)
    return np.where(np.asarray(chunks) > 1, rounds, _peak_one_f_one_b(stages, microbatches, chunks, stage))


register(
    "gpipe",
    ScheduleRule(
        _gpipe,
        peak_in_flight=lambda stages, microbatches, chunks, stage: microbatches,
        about="all forwards, then all backwards",
    ),
)
register(
    "1f1b", ScheduleRule(_one_f_one_b, peak_in_flight=_peak_one_f_one_b, about="one forward and one backward in turn")
)
register(
    "interleaved",
    ScheduleRule(
        interleaved,
        chunks=range(1, MOST_CHUNKS + 1),
        peak_in_flight=peak_interleaved,
        about="1f1b over several virtual stages per rank (parallel.chunks)",
    ),
)
for name, one, about in (
    ("zb-h1", _ZeroBubble(1), "1f1b with a split backward: less idle time, the same memory"),
    ("zb-h2", _ZeroBubble(2), "a split backward and twice 1f1b's warm-up forwards: more memory"),
):
    register(
        name,
        ScheduleRule(
            one,
            splits_backward=True,
            peak_in_flight=one.peak_in_flight,
            peak_waiting=one.peak_waiting,
            peak_waiting_in_backward=one.peak_waiting_in_backward,
            idle=1 / 3,
            about=about,
        ),
    )
