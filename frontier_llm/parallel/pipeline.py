"""Pipeline engine, which executes a schedule's list of actions with the virtual stages that this rank holds.

The engine does not depend on the model or the data. A stage is a function of the input activation and the data of a
microbatch. It returns an output tensor. The output of the last stage is the microbatch's contribution to the loss. Any
stage may return further named losses in addition to its output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from frontier_llm.comm import Mesh, Receive, Sends, post_receive
from frontier_llm.comm.ranges import in_ranges
from frontier_llm.parallel.stages import LOSS, ActivationSpec, Deferral, StageFunction
from frontier_llm.schedule import Action, Kind, Schedule, check, posted_ahead, units

# Number of messages of one channel (one kind in one direction) that may be in flight before the sender waits for the
# receiver. With 1, every schedule already runs without a deadlock. Each further message needs the memory of one more
# activation, and lets a faster rank run ahead of its neighbour.
SENDS_AHEAD = 4


class _Graph(NamedTuple):
    """Data from which a backward starts: the stage's input and the roots of its autograd graph."""

    x: Tensor | None
    output: GradientEdge | None  # the next virtual stage sends the gradient of this output; None on the last one
    loss: Tensor | None  # weighted sum of the losses that this stage returned; its gradient is the loss scale


Key = tuple[int, int]  # (position, microbatch)


@dataclass
class _Flight:
    """Tensors and messages of the running step. The keys of messages are (kind, position, microbatch)."""

    batch: Callable[[int], Any]
    losses: dict[str, Tensor]  # 0-dim fp64, not weighted
    loss_scale: float
    incoming: dict[tuple[Kind, int, int], Receive] = field(default_factory=dict)
    outgoing: dict[tuple[Kind, int, int], Tensor] = field(default_factory=dict)
    graphs: dict[Key, _Graph] = field(default_factory=dict)
    deferred: dict[Key, list] = field(default_factory=dict)


class Engine:
    """Runs the forward and backward passes of training steps by a pipeline schedule."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageFunction],
        mesh: Mesh,
        deferral: Deferral,
        activation: ActivationSpec,
        *,
        overlap: bool = True,
        loss_weights: Mapping[str, float] = MappingProxyType({}),
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        """Check this rank's list of actions. Raises ScheduleError if the list is not legal.

        `stages` are this rank's virtual stages, in the order of the model. `loss_weights` has the weights of the
        further losses that the stages return. `shapes` has the shapes of other values that the stages return to be
        summed. With `overlap`, messages are transferred during compute. Without `overlap`, or if the machine allows
        only one communication in flight, the rank waits for each message at the message's place in the order of
        communication.
        """
        rank = mesh.pp.rank
        overlap = overlap and not mesh.one_in_flight
        check(schedule, rank)
        positions = schedule.placement.positions_of(rank)
        assert len(stages) == len(positions) and mesh.pp.size == schedule.stages
        self._placement = schedule.placement
        self._stages = dict(zip(positions, stages, strict=True))
        self._channels = mesh.channels
        self._ledger = mesh.ledger
        actions: Sequence[Action] = schedule.actions[rank]
        if overlap:
            actions = posted_ahead(actions, schedule.pairs)
        self._units = list(units(actions, schedule.pairs))
        self._interleaving = mesh.ep.interleaving
        self._deferral = deferral
        self._activation = activation
        self._overlap = overlap
        self._loss_weights = {LOSS: 1.0, **loss_weights}
        self._shapes = {**dict.fromkeys((LOSS, *loss_weights), ()), **shapes}
        # Called with each action before it runs, and with None at the end of a step. For a paired forward and backward,
        # it is called with the resumed action each time the other one pauses.
        self.on_action: Callable[[Action | None], object] = lambda action: None
        self._execute = in_ranges(
            {
                Kind.FORWARD: self._forward,
                Kind.BACKWARD: self._backward,
                Kind.BACKWARD_INPUT: self._backward_input,
                Kind.BACKWARD_WEIGHT: self._backward_weight,
                Kind.SEND_FORWARD: self._send,
                Kind.RECV_FORWARD: self._receive,
                Kind.SEND_BACKWARD: self._send,
                Kind.RECV_BACKWARD: self._receive,
            }
        )
        self._flight: _Flight
        self._sends = Sends(SENDS_AHEAD)

    def run(self, batch: Callable[[int], Any], loss_scale: float = 1.0) -> dict[str, Tensor]:
        """Run one step: every microbatch forward and backward. `batch(n)` returns the data of microbatch n.

        Returns fp64 sums over this rank's virtual stages and microbatches: "loss" and each further loss (0-dim, without
        weight or scale), and each value that has an entry in `shapes`. A sum is zero if no stage of this rank returns
        the value.
        """
        zeros = {
            name: torch.zeros(shape, dtype=torch.float64, device=self._activation.device)
            for name, shape in self._shapes.items()
        }
        self._flight = _Flight(batch, zeros, loss_scale)
        for unit in self._units:
            self._run_unit(unit)
        self._sends.wait_all()
        self.on_action(None)
        return self._flight.losses

    def _run_unit(self, unit: tuple[Action, ...]) -> None:
        """Run one action, or a pair of a forward and a backward whose collectives overlap."""
        self._ledger.actions += len(unit)
        if len(unit) > 1 and self._interleaving is not None:
            # The backward runs first, because its first operation sends rows to experts, whereas the forward begins
            # with attention.
            self._interleaving.run_both(unit[::-1], lambda action: self._execute[action.kind](action), self.on_action)
            return
        for action in unit:
            self.on_action(action)
            self._execute[action.kind](action)

    def _forward(self, action: Action) -> None:
        flight = self._flight
        position = action.position
        key = (position, action.microbatch)
        x = self._incoming(Kind.RECV_FORWARD, *key).requires_grad_() if position else None
        returned = self._stages[position](x, flight.batch(action.microbatch))
        y, losses = returned if isinstance(returned, tuple) else (returned, {})
        last = position == self._placement.last
        if last:
            losses = {LOSS: y, **losses}
        else:
            flight.outgoing[Kind.SEND_FORWARD, *key] = y.detach()
        weighted = []
        for name, value in losses.items():
            flight.losses[name] += value.detach()
            if value.requires_grad:
                weighted.append(value if name == LOSS else value * self._loss_weights[name])
        if y.requires_grad:  # False in an evaluation, which has no backward.
            # Keep only the graph of y. The values of y are then freed as soon as the message with them has been sent.
            loss = torch.stack(weighted).sum() if len(weighted) > 1 else next(iter(weighted), None)
            flight.graphs[key] = _Graph(x, None if last else get_gradient_edge(y), loss)

    def _backward(self, action: Action) -> None:
        key = (action.position, action.microbatch)
        x, output, loss = self._flight.graphs.pop(key)
        roots: tuple[GradientEdge, ...] = ()
        gradients: tuple[Tensor, ...] = ()
        if output is not None:
            roots += (output,)
            gradients += (self._incoming(Kind.RECV_BACKWARD, *key),)
        if loss is not None:
            roots += (get_gradient_edge(loss),)
            gradients += (torch.full_like(loss, self._flight.loss_scale),)
        # torch.autograd.backward would also import sympy: half a second and 40 MB on each rank
        Variable._execution_engine.run_backward(roots, gradients, False, False, (), True, True)
        if x is not None:
            assert x.grad is not None
            self._flight.outgoing[Kind.SEND_BACKWARD, *key] = x.grad

    def _backward_input(self, action: Action) -> None:
        self._deferral.defer()
        self._backward(action)
        self._flight.deferred[action.position, action.microbatch] = self._deferral.take_deferred()

    def _backward_weight(self, action: Action) -> None:
        self._deferral.run(self._flight.deferred.pop((action.position, action.microbatch)))

    def _send(self, action: Action) -> None:
        kind, microbatch, position = action
        message = self._flight.outgoing.pop((kind, position, microbatch))
        channel = self._channels[self._placement.channel(kind, position).value]
        self._sends.start(message.contiguous(), channel, self._placement.peer(kind, position))
        if not self._overlap:
            self._sends.wait_all()

    def _receive(self, action: Action) -> None:
        """Post a receive. The action F, B or I that needs the message waits for the receive."""
        kind, microbatch, position = action
        spec = self._activation
        channel = self._channels[self._placement.channel(kind, position).value]
        receive = post_receive(spec.shape, spec.dtype, spec.device, channel, self._placement.peer(kind, position))
        self._flight.incoming[kind, position, microbatch] = receive
        if not self._overlap:
            receive.wait()

    def _incoming(self, kind: Kind, position: int, microbatch: int) -> Tensor:
        """Return the tensor of the neighbouring virtual stage: a message, or on the same rank the tensor itself."""
        if self._placement.peer(kind, position) != self._placement.rank_of[position]:
            return self._flight.incoming.pop((kind, position, microbatch)).wait()
        sent = Kind.SEND_FORWARD if kind is Kind.RECV_FORWARD else Kind.SEND_BACKWARD
        return self._flight.outgoing.pop((sent, self._placement.other_end(kind, position), microbatch))
