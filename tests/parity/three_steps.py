"""The function that the parity tests run on each rank: three training steps of a case with the package's `train_step`.

It returns all results that the tests compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from frontier_llm import log
from frontier_llm.blueprint.expert_work import Rows, even_rows
from frontier_llm.blueprint.layout import layout_of
from frontier_llm.comm import build_mesh
from frontier_llm.config import RunConfig
from frontier_llm.data.loader import SampleBatch
from frontier_llm.model import experts
from frontier_llm.optim import Bucket
from frontier_llm.parallel.expert import Dispatch, plan_dispatch
from frontier_llm.topology.plan import make_plan
from frontier_llm.topology.shards import ShardSpec
from frontier_llm.topology.traffic import step_traffic
from frontier_llm.training.build import TrainState, build_state
from frontier_llm.training.evaluate import held_out_loss
from frontier_llm.training.step import train_step
from tests.parity.cases import STEPS, Case
from tests.parity.sabotage import SABOTAGES, dispatch


class Piece(NamedTuple):
    """Elements [start, stop) of the part (rectangle) of a parameter that one rank holds."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    values: np.ndarray


class RankResult(NamedTuple):
    """The results of one rank."""

    losses: list[float]  # one loss per step, then the loss of an evaluation
    norms: list[float]
    initial: list[Piece]
    gradients: list[Piece]  # gradients of the first step, after all sums
    final: list[Piece]
    # differences between the first step's communication (calls, bytes) and the prediction by `costs`
    traffic: list[str]


def batch(step: int, config: RunConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and document ids of a step's global batch, both (B, S + 1). They depend only on the step."""
    generator = np.random.default_rng(1000 + step)
    shape = (config.batch.global_batch, config.model.sequence_length + 1)
    tokens = generator.integers(0, config.model.vocab_size, shape)
    starts = generator.random(shape) < 0.2
    starts[0, 1] = False  # the second token starts no document, so at least one target counts
    return tokens, starts.cumsum(1)


def learnt(tokens: Any) -> Any:
    """Return the mask of trained tokens if some are only read.

    The trained part of a row varies between rows. Each row also has tokens that are only read.
    """
    return tokens.cumsum(1) % 97 > 40


class Source:
    """The microbatches of a data-parallel rank: the replicas take slices of the global batch in turn."""

    def __init__(self, case: Case, dp_rank: int) -> None:
        self._config = case.config()
        self._dp = case.dp
        self._dp_rank = dp_rank
        self._size = self._config.batch.micro_batch
        self.microbatches = self._config.batch.global_batch // (case.dp * self._size)
        self.reset_at_documents = case.documents
        self._read_only = case.read_only
        self.masks_targets = case.documents or case.read_only

    def sample_ids(self, step: int, index: int) -> range:
        first = step * self._config.batch.global_batch + (index * self._dp + self._dp_rank) * self._size
        return range(first, first + self._size)

    def microbatch(self, step: int, index: int) -> SampleBatch:
        """Return a microbatch. With document resets, a target counts only if its input is in the same document."""
        tokens, documents = batch(step, self._config)
        ids = self.sample_ids(step, index)
        size = len(tokens)
        rows = slice(ids.start - step * size, ids.stop - step * size)
        targets = learnt(tokens)[rows, 1:] if self._read_only else None
        if not self.reset_at_documents:
            return SampleBatch(tokens[rows], None, targets)
        documents = documents[rows]
        within = documents[:, :-1] == documents[:, 1:]
        return SampleBatch(tokens[rows], documents[:, :-1], within if targets is None else within & targets)


def _piece(spec: ShardSpec, start: int, stop: int, values: Tensor) -> Piece:
    return Piece(
        spec.name,
        spec.global_shape,
        spec.offset,
        spec.shape,
        start,
        stop,
        values.detach().to(torch.float64, copy=True).numpy(),
    )


def whole_piece(spec: ShardSpec, values: Tensor) -> Piece:
    """Return a rank's complete rectangle of a parameter or of its gradient."""
    return _piece(spec, 0, spec.numel, values.flatten())


def weights(buckets: list[Bucket]) -> list[Piece]:
    """Return all parameters that this rank holds, including replicas."""
    for bucket in buckets:
        bucket.wait_for_gather()
    return [whole_piece(p.spec, p) for bucket in buckets for p in bucket.parameters]


def gradients_of(buckets: list[Bucket]) -> list[Piece]:
    """Return the slices that this rank's optimizer reads. With ZeRO the rest of the buffer is scratch space."""
    pieces = []
    for bucket in buckets:
        own = bucket.own(bucket.gradients)
        for part in bucket.owned_ranges():
            pieces.append(
                _piece(part.spec, part.start, part.stop, own[part.position : part.position + part.stop - part.start])
            )
    return pieces


def build(rank: int, case: Case, dtype: str = "fp64") -> TrainState:
    """Build the training state of this rank for a case."""
    log.set_rank(1, 2)  # no rank prints the run's messages
    config = case.config(dtype)
    plan = make_plan(config, case.world_size)
    tied = config.model.tied_embeddings
    has_experts = config.model.moe is not None
    by_node = config.parallel.expert_all_to_all == "hierarchical"
    mesh = build_mesh(
        plan.grid,
        rank,
        plan.placement,
        tied,
        60.0,
        config.comm,
        case.ranks_per_node,
        experts=has_experts,
        by_node=by_node,
    )
    assert by_node == (mesh.ep.levels is not None)
    return build_state(config, plan, mesh, torch.device("cpu"), Source(case, mesh.dp.rank))


def train_case(rank: int, case: Case, sabotage: str | None = None) -> RankResult:
    """Run three steps of a case on one rank through `train_step`, with one planted fault if `sabotage` is given."""
    with ExitStack() as stack:
        if sabotage:
            stack.enter_context(SABOTAGES[sabotage]())
        state = build(rank, case)
        initial = weights(state.optimizer.buckets)
        gradients: list[Piece] = []
        update = state.optimizer.step

        def observed(lr: float, grad_scale: float) -> None:
            if not gradients:
                gradients.extend(gradients_of(state.optimizer.buckets))
            update(lr, grad_scale)

        state.optimizer.step = observed  # type: ignore[method-assign]
        state.mesh.ledger.calls.clear()
        state.mesh.ledger.bytes.clear()
        with routed_rows(state) as routed:
            results = [train_step(state)]
        traffic = [] if sabotage else _traffic(state, routed, case.read_only)
        results += [train_step(state) for _ in range(STEPS - 1)]
        # With document resets the two batches have different numbers of targets.
        samples = 2 * state.config.batch.global_batch
        # Weights may still be in flight here.
        held_out = held_out_loss(state, Source(case, state.mesh.dp.rank), samples, lambda: False)
        assert held_out is not None
        final = weights(state.optimizer.buckets)
        return RankResult(
            [*(r.loss for r in results), held_out],
            [r.gradient_norm for r in results],
            initial,
            gradients,
            final,
            traffic,
        )


@contextmanager
def routed_rows(state: TrainState) -> Iterator[list[Rows]]:
    """Record the rows that this rank's routers send and receive.

    The list has one entry for each layer and microbatch, even if a layer is recomputed.
    """
    rows: list[Rows] = []
    to_nodes: list[Dispatch] = []

    def noted_to_nodes(*args: Any) -> Dispatch:
        to_nodes.append(plan_dispatch(*args))
        return to_nodes[-1]

    def noted(*args: Any, **options: Any) -> Dispatch:
        plan = plan_dispatch(*args, **options)
        if plan.axis.ledger is state.mesh.ledger:
            first = to_nodes.pop() if to_nodes else None
            along_rail = () if first is None else (first.axis.size, sum(first.sent), sum(first.received))
            rows.append(Rows(sum(plan.sent), sum(plan.received), int(plan.ends_E[-1]), *along_rail))
        return plan

    with patch.object(experts, "plan_dispatch", noted), patch.object(dispatch, "plan_dispatch", noted_to_nodes):
        yield rows
    if state.config.train.recompute == "full":
        assert sorted(rows)[::2] == sorted(rows)[1::2]
        rows[:] = sorted(rows)[::2]


def _traffic(state: TrainState, routed: list[Rows], prompts: bool) -> list[str]:
    """Return the differences between the ledger of one step and the closed form, by axis and operation."""
    ledger = state.mesh.ledger
    mesh = state.mesh
    model = state.config.model
    if model.moe and model.moe.capacity and routed:  # the number of rows then does not depend on the routing
        layout = replace(layout_of(state.config, state.plan.grid.world_size), expert_nodes=routed[0].nodes)
        routed = [even_rows(model, layout)] * len(routed)
    expected = step_traffic(state.config, state.plan, mesh.pp.rank, routed, mesh.replicas.rank, prompts=prompts)
    counted = {"calls": (ledger.calls, expected.calls), "bytes": (ledger.bytes, expected.bytes)}
    return [
        f"{what} of {' '.join(key)}: {ours.get(key, 0)} instead of {theirs.get(key, 0)}"
        for what, (ours, theirs) in counted.items()
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key, 0) != theirs.get(key, 0)
    ]
