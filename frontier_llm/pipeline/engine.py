"""The engine plays a schedule's action list over the virtual stages that this rank holds.

It knows nothing of layers or losses: a stage is anything that maps (input activation, microbatch number) to an output tensor,
which on the last stage is the microbatch's share of the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from frontier_llm.comm import Axis, Receive, Sends, post_receive
from frontier_llm.schedule import Action, Kind, Schedule, channel_of, next_stage, peer_of, previous_stage

StageFunction = Callable[[Tensor | None, int], Tensor]


class Deferral(Protocol):
    """Where weight gradients wait between the I and the W of a split backward (tensor_parallel.WeightGradients)."""

    def defer(self) -> None:
        """Start keeping."""

    def take_deferred(self) -> list:
        """Stop, and hand over what was kept."""

    def run(self, work: list) -> None:
        """Do it."""


@dataclass(frozen=True)
class Activation:
    """The message between stages; static, so that no shapes are ever exchanged."""

    shape: tuple[int, ...]  # (S or s, B, H)
    dtype: torch.dtype
    device: torch.device


@dataclass
class _Flight:
    """What lives between actions, by (chunk, microbatch)."""

    unposted: deque[Action] = field(default_factory=deque)  # receives, in the order in which the peers send
    receives: dict[tuple[Kind, int, int], Receive] = field(default_factory=dict)
    inputs: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    deferred: dict[tuple[int, int], list] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)


class Engine:
    """Plays one training step after another; owns no parameters."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageFunction],
        pp: Axis,
        channels: Mapping[str, Axis],
        deferral: Deferral,
        activation: Activation,
        post_ahead: bool = True,
        on_action: Callable[[Action | None], object] = lambda action: None,
    ) -> None:
        """`stages[chunk]` are this rank's virtual stages; `post_ahead` posts receives where the schedule has them, otherwise only at
        their use; `on_action` is told each action before it is played, and None after the last (timelines)."""
        assert len(stages) == schedule.chunks and pp.size == schedule.stages
        self._schedule, self._stages, self._pp, self._channels = schedule, stages, pp, channels
        self._deferral, self._activation, self._post_ahead = deferral, activation, post_ahead
        self.on_action = on_action
        self._play = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECV_FORWARD: self._receive,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECV_BACKWARD: self._receive,
        }
        self._flight = _Flight()
        # warm-up lets a receiver lag by at most one message per virtual stage and microbatch in flight
        self._sends = Sends(limit=2 * schedule.virtual_stages + 2)
        self._loss_scale = 1.0

    def run(self, loss_scale: float = 1.0) -> list[Tensor]:
        """Play one step: every microbatch forward and backward.

        Returns the losses of this rank's last-stage microbatches, unscaled and detached; empty on other pipeline ranks.
        """
        self._flight, self._loss_scale = _Flight(), loss_scale
        for action in self._schedule.actions[self._pp.rank]:
            self.on_action(action)
            self._play[action.kind](action)
        self._sends.wait_all()
        self.on_action(None)
        losses, self._flight = self._flight.losses, _Flight()
        return losses

    def _forward(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        x = None
        if previous_stage(self._pp.rank, action.chunk, self._pp.size) is not None:
            x = self._arrived(Kind.RECV_FORWARD, *key).requires_grad_()
        y = self._stages[action.chunk](x, action.microbatch)
        if self._is_last(action.chunk):
            self._flight.losses.append(y.detach())
        self._flight.inputs[key], self._flight.outputs[key] = x, y

    def _backward(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        x, y = self._flight.inputs.pop(key), self._flight.outputs.pop(key)
        grad_y = torch.full_like(y, self._loss_scale) if self._is_last(action.chunk) else self._arrived(Kind.RECV_BACKWARD, *key)
        torch.autograd.backward(y, grad_y)
        if x is not None:
            assert x.grad is not None
            self._flight.gradients[key] = x.grad

    def _backward_input(self, action: Action) -> None:
        self._deferral.defer()
        self._backward(action)
        self._flight.deferred[action.chunk, action.microbatch] = self._deferral.take_deferred()

    def _backward_weight(self, action: Action) -> None:
        self._deferral.run(self._flight.deferred.pop((action.chunk, action.microbatch)))

    def _send_forward(self, action: Action) -> None:
        self._send(action.kind, self._flight.outputs[action.chunk, action.microbatch].detach())

    def _send_backward(self, action: Action) -> None:
        self._send(action.kind, self._flight.gradients.pop((action.chunk, action.microbatch)))

    def _send(self, kind: Kind, message: Tensor) -> None:
        self._sends.start(message.contiguous(), self._channel(kind), peer_of(kind, self._pp.rank, self._pp.size))

    def _receive(self, action: Action) -> None:
        """The F, B or I that needs the message waits for it."""
        self._flight.unposted.append(action)
        if self._post_ahead:
            self._post(self._flight.unposted.popleft())

    def _arrived(self, kind: Kind, chunk: int, microbatch: int) -> Tensor:
        while (kind, chunk, microbatch) not in self._flight.receives:
            self._post(self._flight.unposted.popleft())
        return self._flight.receives.pop((kind, chunk, microbatch)).wait()

    def _post(self, action: Action) -> None:
        shape, dtype, device = self._activation.shape, self._activation.dtype, self._activation.device
        peer = peer_of(action.kind, self._pp.rank, self._pp.size)
        receive = post_receive(shape, dtype, device, self._channel(action.kind), peer)
        self._flight.receives[action.kind, action.chunk, action.microbatch] = receive

    def _channel(self, kind: Kind) -> Axis:
        return self._channels[channel_of(kind, self._pp.rank, self._pp.size).value]

    def _is_last(self, chunk: int) -> bool:
        return next_stage(self._pp.rank, chunk, self._pp.size, self._schedule.chunks) is None
