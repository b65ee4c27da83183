"""The mistakes that parallel training is known for, made on purpose inside the ranks: a parity test that stays green
under one is worthless.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from frontier_llm.comm import DONE, Axis, Mesh, Pending, single
from frontier_llm.model import Stage
from frontier_llm.ops import Scores
from frontier_llm.optim import Bucket, GradientSync
from frontier_llm.parallel.context import gather, ring
from frontier_llm.parallel.context.blocks import Query
from frontier_llm.parallel.expert import Dispatch
from frontier_llm.parallel.pipeline import Engine
from frontier_llm.schedule import Action, Kind
from frontier_llm.topology.shards import ShardSpec
from frontier_llm.training import step
from frontier_llm.training.feed import Feed
from frontier_llm.training.routing import tell_routers

dispatch = importlib.import_module("frontier_llm.parallel.expert.dispatch")  # the package has a function of that name
_SABOTAGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {}


def sabotage(function: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Register a context in which a mistake is made; its name has hyphens."""
    context = contextmanager(function)
    _SABOTAGES[function.__name__.replace("_", "-")] = context
    return context


@sabotage
def dropped_dp_sum() -> Iterator[None]:
    """Each replica keeps the gradient of its own samples."""
    with patch.object(GradientSync, "_start_sum", lambda self, bucket: DONE):
        yield


@sabotage
def dropped_expert_sum() -> Iterator[None]:
    """Each replica of an expert keeps the gradient of the tokens that came to it."""
    honest = GradientSync._start_sum
    with patch.object(
        GradientSync, "_start_sum", lambda self, bucket: DONE if bucket.dp.name == "edp" else honest(self, bucket)
    ):
        yield


@sabotage
def mean_over_expert_replicas() -> Iterator[None]:
    """Experts' gradients are divided by their replicas, as if each had seen the whole batch."""
    honest = GradientSync._start_sum

    def start(self: GradientSync, bucket: Bucket) -> Pending:
        if bucket.dp.name == "edp":
            bucket.gradients.div_(bucket.dp.size)
        return honest(self, bucket)

    with patch.object(GradientSync, "_start_sum", start):
        yield


@sabotage
def unsorted_scatter() -> Iterator[None]:
    """What comes back from the experts is taken in the order in which it was sent, as if nobody had sorted it."""

    def add_up(returned: Tensor, plan: Dispatch, fan: int) -> Tensor:
        return returned[: len(plan.place)].unflatten(0, (-1, fan)).sum(1)

    with patch.object(dispatch, "_add_up", add_up):
        yield


@sabotage
def own_load() -> Iterator[None]:
    """Each rank's routers are told how often experts were chosen by its own tokens."""
    honest = step.sum_over_world
    own = {}

    def observed(mesh: Mesh, losses: Any, *more: Any) -> step.StepSums:
        own["load"] = losses[step.LOAD]
        return honest(mesh, losses, *more)

    with (
        patch.object(step, "sum_over_world", observed),
        patch.object(step, "tell_routers", lambda stages, _: tell_routers(stages, own["load"])),
    ):
        yield


@sabotage
def double_counted_norm() -> Iterator[None]:
    """Every replica of a tp-replicated or tied parameter enters the gradient norm."""
    with patch.object(ShardSpec, "counted", property(lambda self: True)):
        yield


def _without_sum_over(name: str) -> AbstractContextManager[Any]:
    honest = Mesh.axis

    def axis(self: Mesh, asked: str) -> Axis:
        return single(name) if asked == name else honest(self, asked)

    return patch.object(Mesh, "axis", axis)


@sabotage
def forgotten_tied_sum() -> Iterator[None]:
    """The embedding's copies on the first and the last stage keep their own gradients."""
    with _without_sum_over("tied"):
        yield


@sabotage
def missing_norm_sum() -> Iterator[None]:
    """Under sequence parallelism norms and biases keep the gradient of their own part of the sequence."""
    with _without_sum_over("tp"):
        yield


@sabotage
def swapped_microbatch() -> Iterator[None]:
    """The last stage takes the targets of microbatch 0 for microbatch 1 and the other way round."""
    honest = Engine._forward

    def forward(self: Engine, action: Action) -> None:
        batch = self._flight.batch
        if action.position == self._placement.last:
            self._flight.batch = lambda microbatch: batch({0: 1, 1: 0}.get(microbatch, microbatch))
        honest(self, action)
        self._flight.batch = batch

    with patch.object(Engine, "_forward", forward):
        yield


@sabotage
def stale_activation() -> Iterator[None]:
    """Each message carries the activation of the microbatch before."""
    honest = Engine._send
    last = {}

    def send(self: Engine, action: Action) -> None:
        key = (action.kind, action.position, action.microbatch)
        if action.kind is Kind.SEND_FORWARD:
            fresh = self._flight.outgoing[key]
            self._flight.outgoing[key], last[action.position] = last.get(action.position, fresh), fresh
        honest(self, action)

    with patch.object(Engine, "_send", send):
        yield


@sabotage
def local_division() -> Iterator[None]:
    """Each context-parallel rank divides by the targets of its own tokens, and the shares are averaged: as
    Megatron-LM does by default.
    """
    honest = Feed.count_targets

    def count(self: Feed, step: int) -> Any:
        mesh = self._mesh
        self._mesh = replace(self._mesh, replicas=self._mesh.dp)
        own = honest(self, step)
        self._mesh = mesh
        return own * mesh.cp.size

    with patch.object(Feed, "count_targets", count):
        yield


@sabotage
def mask_by_own_index() -> Iterator[None]:
    """Queries see keys by where they lie in the ranks' tensors, not by where they stand in the sequence."""
    honest = Query.scores

    def scores(self: Query, scores: Scores, keys: range) -> Scores:
        return replace(honest(self, scores, keys), offset=self.rows.start)

    with patch.object(Query, "scores", scores):
        yield


@sabotage
def positions_by_own_index() -> Iterator[None]:
    """Rotations are those of a token's place in the rank's tensors."""
    with patch.object(Stage, "_given_positions", lambda self, batch: None):
        yield


@sabotage
def keys_without_gradient() -> Iterator[None]:
    """The gradients of keys and values stay where their queries are."""
    with patch.object(gather, "start_reduce_scatter", lambda x, axis: (x.chunk(axis.size)[axis.rank], DONE)):
        yield


@sabotage
def missing_merge() -> Iterator[None]:
    """Outputs over several blocks of keys are averaged, as if each had the same share of the sum."""

    def merge(merged: Any, o: Any, logsumexp: Any) -> Any:
        return (o, logsumexp) if merged is None else ((merged[0] + o) / 2, merged[1].logaddexp(logsumexp))

    with patch.object(ring, "merge", merge):
        yield


@sabotage
def backward_with_own_logsumexp() -> Iterator[None]:
    """The ring's backward has for each query the sum over the last block that it saw, not over all of them."""
    honest = ring.merge

    def merge(merged: Any, o: Any, logsumexp: Any) -> Any:
        return honest(merged, o, logsumexp)[0], logsumexp if merged is None else merged[1]

    with patch.object(ring, "merge", merge):
        yield


def _drawn_by(change: Callable[[Any, int], Any]) -> AbstractContextManager[Any]:
    """By what masks are drawn, changed for a number of rows."""
    honest = Stage._positions

    def positions(self: Stage, batch: Any, rows: int) -> Any:
        right = honest(self, batch, rows)
        return replace(right, drawn=right.drawn and change(right.drawn, rows))

    return patch.object(Stage, "_positions", positions)


@sabotage
def masks_by_own_index() -> Iterator[None]:
    """Dropout draws by a token's place in the rank's tensors."""
    with _drawn_by(lambda drawn, rows: drawn._replace(positions_S=torch.arange(rows))):
        yield


@sabotage
def masks_by_own_row() -> Iterator[None]:
    """Dropout draws by a sample's row in the microbatch."""
    with _drawn_by(lambda drawn, rows: drawn._replace(samples_B=torch.arange(len(drawn.samples_B)))):
        yield


SABOTAGES = dict(_SABOTAGES)
