"""Which FIFO stream a message takes, who its peer is, and what a compute action must receive before and send after.

A rank has at most four streams. Data flows forward from stage i to i + 1 and wraps from the last stage to stage 0 of the next
chunk; gradients flow the other way. Each of the four carries its messages in one order that both sides share, so the engine
needs no tags, and no stream ever waits for another: a receive that is posted early cannot hold up a send of another kind.
"""

from __future__ import annotations

from enum import Enum

from frontier_llm.schedule.actions import Action, Kind, next_stage, previous_stage


class Channel(Enum):
    """The independent FIFO streams of a pipeline rank."""

    FORWARD = "forward"  # activations, stage i -> i + 1, same chunk
    FORWARD_WRAP = "forward-wrap"  # activations, stage pp - 1 -> 0, next chunk
    BACKWARD = "backward"  # gradients, stage i -> i - 1, same chunk
    BACKWARD_WRAP = "backward-wrap"  # gradients, stage 0 -> pp - 1, previous chunk


def channel_of(kind: Kind, stage: int, stages: int) -> Channel:
    """The stream that a SEND or RECV of this kind uses on this stage."""
    last = stages - 1
    if kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD):
        wraps = stage == (last if kind is Kind.SEND_FORWARD else 0)
        return Channel.FORWARD_WRAP if wraps else Channel.FORWARD
    assert kind in (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD), f"{kind} is not communication"
    wraps = stage == (0 if kind is Kind.SEND_BACKWARD else last)
    return Channel.BACKWARD_WRAP if wraps else Channel.BACKWARD


def peer_of(kind: Kind, stage: int, stages: int) -> int:
    """The stage at the other end of a SEND or RECV."""
    onward = kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
    return (stage + (1 if onward else -1)) % stages


def received_by(action: Action, stage: int, stages: int, chunks: int) -> Kind | None:
    """The receive that a compute action waits for, or None (first or last virtual stage, W, or a neighbour on this rank)."""
    if stages == 1 or action.kind is Kind.BACKWARD_WEIGHT:
        return None
    if action.kind is Kind.FORWARD:
        return Kind.RECV_FORWARD if previous_stage(stage, action.chunk, stages) is not None else None
    return Kind.RECV_BACKWARD if next_stage(stage, action.chunk, stages, chunks) is not None else None


def sent_by(action: Action, stage: int, stages: int, chunks: int) -> Kind | None:
    """The send that follows a compute action, or None (last or first virtual stage, W, or a neighbour on this rank)."""
    if stages == 1 or action.kind is Kind.BACKWARD_WEIGHT:
        return None
    if action.kind is Kind.FORWARD:
        return Kind.SEND_FORWARD if next_stage(stage, action.chunk, stages, chunks) is not None else None
    return Kind.SEND_BACKWARD if previous_stage(stage, action.chunk, stages) is not None else None


def chunk_at_peer(kind: Kind, stage: int, chunk: int, stages: int) -> int:
    """The chunk number that the other end of a SEND or RECV gives the same message."""
    if channel_of(kind, stage, stages) in (Channel.FORWARD, Channel.BACKWARD):
        return chunk
    return chunk + (1 if kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD) else -1)
