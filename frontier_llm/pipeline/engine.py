"""The engine plays a schedule's action list over the virtual stages that this rank holds.

It knows nothing of layers, data or losses: a stage is anything that maps (input activation, a microbatch's data) to an output tensor,
which on the last stage is the microbatch's share of the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from frontier_llm.comm import Axis, Mesh, Receive, Sends, post_receive
from frontier_llm.schedule import Action, Kind, Schedule, channel_of, next_stage, peer_of, previous_stage

StageFunction = Callable[[Tensor | None, Any], Tensor]

# Messages of one channel that may wait for their receiver before the sender waits for it. One is enough for every schedule to end;
# each more is an activation kept, and lets a rank that computes faster run ahead of its neighbour.
SENDS_AHEAD = 4


class Deferral(Protocol):
    """Where weight gradients wait between the I and the W of a split backward (tensor_parallel.WeightGradients)."""

    def defer(self) -> None:
        """Start keeping."""

    def take_deferred(self) -> list:
        """Stop, and hand over what was kept."""

    def run(self, work: list) -> None:
        """Do it."""


@dataclass(frozen=True)
class ActivationSpec:
    """Every message between stages is like this; static, so that no shapes are ever exchanged."""

    shape: tuple[int, ...]  # (S or s, B, H)
    dtype: torch.dtype
    device: torch.device


@dataclass
class _Flight:
    """What lives between the actions of a step, by (chunk, microbatch); messages by (kind, chunk, microbatch)."""

    batch: Callable[[int], Any]
    loss_scale: float
    loss: Tensor  # 0-dim fp64
    unposted: deque[Action] = field(default_factory=deque)  # receives, in the order in which the peers send
    incoming: dict[tuple[Kind, int, int], Receive] = field(default_factory=dict)
    outgoing: dict[tuple[Kind, int, int], Tensor] = field(default_factory=dict)
    graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]] = field(default_factory=dict)  # (input, output)
    deferred: dict[tuple[int, int], list] = field(default_factory=dict)


class Engine:
    """Plays one training step after another; owns no parameters."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageFunction],
        mesh: Mesh,
        deferral: Deferral,
        activation: ActivationSpec,
        post_ahead: bool = True,
    ) -> None:
        """`stages[chunk]` are this rank's virtual stages. Receives are posted where the schedule has them; without `post_ahead` at their use."""
        assert len(stages) == schedule.chunks and mesh.pp.size == schedule.stages
        self._schedule, self._stages, self._pp, self._channels = schedule, stages, mesh.pp, mesh.channels
        self._deferral, self._activation, self._post_ahead = deferral, activation, post_ahead
        self.on_action: Callable[[Action | None], object] = lambda action: None  # told of each before it is played; None: the end
        self._play = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_FORWARD: self._send,
            Kind.RECV_FORWARD: self._receive,
            Kind.SEND_BACKWARD: self._send,
            Kind.RECV_BACKWARD: self._receive,
        }
        self._flight: _Flight
        self._sends = Sends(SENDS_AHEAD)

    def run(self, batch: Callable[[int], Any], loss_scale: float = 1.0) -> dict[str, Tensor]:
        """Play one step: every microbatch forward and backward; `batch(n)` is what stages are given for microbatch n.

        Returns by name, "loss" first and the same names on every rank, the sums of the losses of this rank's last-stage microbatches,
        0-dim fp64, unscaled; zero on other pipeline ranks.
        """
        self._flight = _Flight(batch, loss_scale, torch.zeros((), dtype=torch.float64, device=self._activation.device))
        for action in self._schedule.actions[self._pp.rank]:
            self.on_action(action)
            self._play[action.kind](action)
        self._sends.wait_all()
        self.on_action(None)
        return {"loss": self._flight.loss}

    def _forward(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        x = None
        if previous_stage(self._pp.rank, action.chunk, self._pp.size) is not None:
            x = self._arrived(Kind.RECV_FORWARD, *key).requires_grad_()
        y = self._stages[action.chunk](x, self._flight.batch(action.microbatch))
        if self._is_last(action.chunk):
            self._flight.loss += y.detach()
        else:
            self._flight.outgoing[Kind.SEND_FORWARD, *key] = y.detach()
        if y.requires_grad:  # an evaluation keeps nothing
            # backward needs the graph, not the values: those are free once the message is taken
            self._flight.graphs[key] = x, y if self._is_last(action.chunk) else get_gradient_edge(y)

    def _backward(self, action: Action) -> None:
        key = (action.chunk, action.microbatch)
        x, y = self._flight.graphs.pop(key)
        grad_y = torch.full_like(y, self._flight.loss_scale) if isinstance(y, Tensor) else self._arrived(Kind.RECV_BACKWARD, *key)
        torch.autograd.backward(y, grad_y)
        if x is not None:
            assert x.grad is not None
            self._flight.outgoing[Kind.SEND_BACKWARD, *key] = x.grad

    def _backward_input(self, action: Action) -> None:
        self._deferral.defer()
        self._backward(action)
        self._flight.deferred[action.chunk, action.microbatch] = self._deferral.take_deferred()

    def _backward_weight(self, action: Action) -> None:
        self._deferral.run(self._flight.deferred.pop((action.chunk, action.microbatch)))

    def _send(self, action: Action) -> None:
        message = self._flight.outgoing.pop((action.kind, action.chunk, action.microbatch))
        self._sends.start(message.contiguous(), self._channel(action.kind), peer_of(action.kind, self._pp.rank, self._pp.size))

    def _receive(self, action: Action) -> None:
        """The F, B or I that needs the message waits for it."""
        self._flight.unposted.append(action)
        if self._post_ahead:
            self._post(self._flight.unposted.popleft())

    def _arrived(self, kind: Kind, chunk: int, microbatch: int) -> Tensor:
        while (kind, chunk, microbatch) not in self._flight.incoming:
            self._post(self._flight.unposted.popleft())
        return self._flight.incoming.pop((kind, chunk, microbatch)).wait()

    def _post(self, action: Action) -> None:
        shape, dtype, device = self._activation.shape, self._activation.dtype, self._activation.device
        peer = peer_of(action.kind, self._pp.rank, self._pp.size)
        receive = post_receive(shape, dtype, device, self._channel(action.kind), peer)
        self._flight.incoming[action.kind, action.chunk, action.microbatch] = receive

    def _channel(self, kind: Kind) -> Axis:
        return self._channels[channel_of(kind, self._pp.rank, self._pp.size).value]

    def _is_last(self, chunk: int) -> bool:
        return next_stage(self._pp.rank, chunk, self._pp.size, self._schedule.chunks) is None
