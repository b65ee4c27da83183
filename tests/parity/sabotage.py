"""Plants known mistakes of parallel training into the ranks' code.

A parity test that passes in spite of the mistake that it should find proves nothing.
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

# The package has a function with the module's name, so a plain import would return the function.
dispatch = importlib.import_module("frontier_llm.parallel.expert.dispatch")
_SABOTAGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {}


def sabotage(function: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Register a context manager that plants a mistake. Its name has hyphens instead of underscores."""
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
    """Each replica of an expert keeps the gradient of the tokens that it received."""
    honest = GradientSync._start_sum
    with patch.object(
        GradientSync, "_start_sum", lambda self, bucket: DONE if bucket.dp.name == "edp" else honest(self, bucket)
    ):
        yield


@sabotage
def mean_over_expert_replicas() -> Iterator[None]:
    """Experts' gradients are divided by the number of their replicas, as if each replica had processed the whole
    batch.
    """
    honest = GradientSync._start_sum

    def start(self: GradientSync, bucket: Bucket) -> Pending:
        if bucket.dp.name == "edp":
            bucket.gradients.div_(bucket.dp.size)
        return honest(self, bucket)

    with patch.object(GradientSync, "_start_sum", start):
        yield


@sabotage
def unsorted_scatter() -> Iterator[None]:
    """Rows from the experts are used in the order in which they were sent, without undoing the sort."""

    def add_up(returned: Tensor, plan: Dispatch, fan: int) -> Tensor:
        return returned[: len(plan.place)].unflatten(0, (-1, fan)).sum(1)

    with patch.object(dispatch, "_add_up", add_up):
        yield


@sabotage
def own_load() -> Iterator[None]:
    """Each rank's routers receive the expert load of the rank's own tokens only."""
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
    """All replicas of a tp-replicated or tied parameter count in the gradient norm."""
    with patch.object(ShardSpec, "counted", property(lambda self: True)):
        yield


def _without_sum_over(name: str) -> AbstractContextManager[Any]:
    honest = Mesh.axis

    def axis(self: Mesh, asked: str) -> Axis:
        return single(name) if asked == name else honest(self, asked)

    return patch.object(Mesh, "axis", axis)


@sabotage
def forgotten_tied_sum() -> Iterator[None]:
    """The copies of the embedding on the first and the last stage keep their own gradients."""
    with _without_sum_over("tied"):
        yield


@sabotage
def missing_norm_sum() -> Iterator[None]:
    """Leave out the sum of norms' and biases' gradients over tp, which sequence parallelism needs."""
    with _without_sum_over("tp"):
        yield


@sabotage
def swapped_microbatch() -> Iterator[None]:
    """The last stage swaps the targets of microbatches 0 and 1."""
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
    """Each message carries the activation of the previous microbatch."""
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
    """Each context-parallel rank divides by the number of its own targets and the results are averaged.

    Megatron-LM does this by default.
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
    """The attention mask uses indices into the rank's tensors instead of positions in the sequence."""
    honest = Query.scores

    def scores(self: Query, scores: Scores, keys: range) -> Scores:
        return replace(honest(self, scores, keys), offset=self.rows.start)

    with patch.object(Query, "scores", scores):
        yield


@sabotage
def positions_by_own_index() -> Iterator[None]:
    """Rotary embeddings use a token's index in the rank's tensors instead of its position."""
    with patch.object(Stage, "_given_positions", lambda self, batch: None):
        yield


@sabotage
def keys_without_gradient() -> Iterator[None]:
    """The gradients of keys and values stay on the rank of the queries."""
    with patch.object(gather, "start_reduce_scatter", lambda x, axis: (x.chunk(axis.size)[axis.rank], DONE)):
        yield


@sabotage
def missing_merge() -> Iterator[None]:
    """Outputs over several blocks of keys are averaged, as if each block had the same share of the softmax sum."""

    def merge(merged: Any, o: Any, logsumexp: Any) -> Any:
        return (o, logsumexp) if merged is None else ((merged[0] + o) / 2, merged[1].logaddexp(logsumexp))

    with patch.object(ring, "merge", merge):
        yield


@sabotage
def backward_with_own_logsumexp() -> Iterator[None]:
    """The backward of ring attention uses the log-sum-exp of the last block instead of the one over all blocks."""
    honest = ring.merge

    def merge(merged: Any, o: Any, logsumexp: Any) -> Any:
        return honest(merged, o, logsumexp)[0], logsumexp if merged is None else merged[1]

    with patch.object(ring, "merge", merge):
        yield


def _drawn_by(change: Callable[[Any, int], Any]) -> AbstractContextManager[Any]:
    """Change the positions and sample ids from which dropout masks are drawn.

    `change` also receives the number of rows.
    """
    honest = Stage._positions

    def positions(self: Stage, batch: Any, rows: int) -> Any:
        right = honest(self, batch, rows)
        return replace(right, drawn=right.drawn and change(right.drawn, rows))

    return patch.object(Stage, "_positions", positions)


@sabotage
def masks_by_own_index() -> Iterator[None]:
    """Dropout masks use a token's index in the rank's tensors."""
    with _drawn_by(lambda drawn, rows: drawn._replace(positions_S=torch.arange(rows))):
        yield


@sabotage
def masks_by_own_row() -> Iterator[None]:
    """Dropout masks use a sample's row in the microbatch."""
    with _drawn_by(lambda drawn, rows: drawn._replace(samples_B=torch.arange(len(drawn.samples_B)))):
        yield


SABOTAGES = dict(_SABOTAGES)
