"""A pipeline schedule as data: what each pipeline rank does, in order. Engine, simulator, checker and figure play this list.

Vocabulary: `stage` = pipeline rank (0 … pp-1); `chunk` = virtual stage held by a rank (0 … chunks-1); virtual stage
`chunk * pp + stage` is the position in the model, so data flows stage 0 → pp-1 of chunk 0, then wraps to stage 0 of chunk 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FORWARD_ONLY = "forward-only"  # name of a schedule that evaluates


class Kind(Enum):
    """What an action does; the value is its letter in the textual form ('F3', 'I0.1')."""

    FORWARD = "F"
    BACKWARD = "B"  # input gradient and weight gradient together
    BACKWARD_INPUT = "I"  # input gradient only; its weight gradient follows as W (zero-bubble schedules)
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SF"  # send this chunk's output activation to the next virtual stage
    RECV_FORWARD = "RF"  # post the receive of this chunk's input activation; the F of the same microbatch waits for it
    SEND_BACKWARD = "SB"  # send the gradient of this chunk's input to the previous virtual stage
    RECV_BACKWARD = "RB"  # post the receive of the gradient of this chunk's output; B or I waits for it

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call, half of a simulation's time

    @property
    def computes(self) -> bool:
        """True for the kinds that occupy the device, False for communication."""
        return self in _COMPUTES


_COMPUTES = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """`actions[stage]` is what that pipeline rank plays, communication included, for one training step."""

    name: str  # gpipe | 1f1b | interleaved | zb-h1 | forward-only
    stages: int  # pp
    microbatches: int  # m, per data-parallel replica and step
    chunks: int  # v
    actions: tuple[tuple[Action, ...], ...]

    def compute_actions(self, stage: int) -> tuple[Action, ...]:
        """The stage's list without communication."""
        return tuple(action for action in self.actions[stage] if action.kind.computes)


def virtual_stage(stage: int, chunk: int, stages: int) -> int:
    """Position in the model of a rank's chunk."""
    return chunk * stages + stage


def next_stage(stage: int, chunk: int, stages: int, chunks: int) -> tuple[int, int] | None:
    """(stage, chunk) that consumes this chunk's output, or None after the last virtual stage."""
    position = virtual_stage(stage, chunk, stages) + 1
    return None if position == stages * chunks else (position % stages, position // stages)


def previous_stage(stage: int, chunk: int, stages: int) -> tuple[int, int] | None:
    """(stage, chunk) that produces this chunk's input, or None for the first virtual stage."""
    position = virtual_stage(stage, chunk, stages) - 1
    return None if position < 0 else (position % stages, position // stages)
