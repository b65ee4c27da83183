"""Runs the training step of a small copy on every simulated rank, and keeps the values that the check compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frontier_llm.certificate.axis_types.simulated import Exchange, simulated_mesh
from frontier_llm.certificate.axis_types.small import SmallSource, plan_of
from frontier_llm.certificate.axis_types.trace import EventId, Recorder
from frontier_llm.comm import Mesh
from frontier_llm.config import RunConfig
from frontier_llm.model.initialize import initial_rows
from frontier_llm.optim import Bucket
from frontier_llm.parallel.tensor import ShardedParameter
from frontier_llm.schedule import Action
from frontier_llm.topology.shards import ShardSpec
from frontier_llm.training.build import TrainState, build_state
from frontier_llm.training.step import StepResult, train_step

_PERTURBATION = 0.3  # standard deviation of the noise that is added to all weights, so that none is constant


@dataclass
class Contribution:
    """Gradient of one parameter from one microbatch on one rank, before any sum over replicas."""

    gradient: Tensor
    events: list[EventId]


@dataclass(frozen=True)
class HeldElements:
    """Elements [start, stop) of a rank's part of a parameter."""

    spec: ShardSpec
    start: int
    stop: int
    values: Tensor
    storage: int  # memory that holds the values


@dataclass
class RankRecord:
    """Values of one rank's step."""

    place: Mapping[str, int]  # coordinates of the rank
    recorder: Recorder
    specs: dict[str, ShardSpec] = field(default_factory=dict)
    contributions: dict[tuple[str, int], Contribution] = field(default_factory=dict)  # key: parameter, microbatch
    unsummed: dict[str, Tensor] = field(default_factory=dict)  # sum of the contributions, by parameter
    gradients: list[HeldElements] = field(default_factory=list)  # gradients after all sums, for this rank's slices
    losses: dict[str, Tensor] = field(default_factory=dict)
    loss_sources: dict[str, tuple[EventId, ...]] = field(default_factory=dict)
    norm_share: float = 0.0
    weights: list[HeldElements] = field(default_factory=list)  # weights after the update
    result: StepResult | None = None


def run_step(small: RunConfig) -> list[RankRecord]:
    """Run one step of all ranks of a small copy, each in a thread, and return their records by global rank.

    Raises the error of the first rank that fails.
    """
    plan = plan_of(small)
    grid = plan.grid
    exchange = Exchange(grid.world_size)
    records = [RankRecord(grid.coordinates(rank), Recorder(rank)) for rank in range(grid.world_size)]

    def run(record: RankRecord) -> None:
        mesh = simulated_mesh(
            grid,
            plan.placement,
            exchange,
            record.recorder,
            tied_embeddings=small.model.tied_embeddings,
            experts=small.model.moe is not None,
            by_node=small.parallel.expert_all_to_all == "hierarchical",
        )
        _run_rank(small, mesh, record)

    exchange.run([partial(run, record) for record in records])
    if exchange.failure is not None:
        raise exchange.failure
    return records


def _run_rank(small: RunConfig, mesh: Mesh, record: RankRecord) -> None:
    source = SmallSource(small, mesh.dp.rank)
    with record.recorder.quiet():
        state = build_state(small, plan_of(small), mesh, torch.device("cpu"), source)
        _perturb(state, small.train.seed)
        _observe(state, source, record)
    with record.recorder:
        record.result = train_step(state)
        state.optimizer.wait_for_gather()
        with record.recorder.quiet():
            record.weights = [
                _part(parameter, parameter.data) for bucket in _buckets(state) for parameter in bucket.parameters
            ]


def _buckets(state: TrainState) -> list[Bucket]:
    buckets: list[Bucket] = state.optimizer.buckets  # type: ignore[attr-defined]
    return buckets


def _perturb(state: TrainState, seed: int) -> None:
    """Add noise to all weights. A norm's weight or a bias that is constant would hide missing sums."""
    for bucket in _buckets(state):
        for parameter in bucket.parameters:
            declared = replace(parameter.spec.parameter, name=f"noise.{parameter.spec.name}", init_std=_PERTURBATION)
            noise = torch.empty(parameter.spec.shape, dtype=parameter.dtype)
            initial_rows(replace(parameter.spec, parameter=declared), seed, noise)
            parameter.data.add_(noise)


def _part(parameter: ShardedParameter, values: Tensor) -> HeldElements:
    storage = values.untyped_storage()._cdata
    return HeldElements(parameter.spec, 0, parameter.spec.numel, values.detach().clone().flatten(), storage)


def _observe(state: TrainState, source: SmallSource, record: RankRecord) -> None:
    """Wrap the methods of the state's objects that mark the phases of a step."""
    recorder = record.recorder
    gradients = state.stages[0].context.gradients
    seen: dict[str, Tensor] = {}
    for bucket in _buckets(state):
        recorder.accumulators.add(bucket.gradients.untyped_storage()._cdata)
        for parameter in bucket.parameters:
            record.specs[parameter.spec.name] = parameter.spec
            seen[parameter.spec.name] = torch.zeros_like(parameter.main_grad)

    def on_action(action: Action | None) -> None:
        recorder.microbatch = None if action is None else source.global_index(action.microbatch)

    def accumulated(parameter: ShardedParameter) -> None:
        _record_contribution(parameter, record, seen)
        honest_accumulated(parameter)

    def finish() -> None:
        recorder.microbatch = None
        honest_finish()
        with recorder.quiet():
            record.unsummed = seen
            for bucket in _buckets(state):
                own = bucket.own(bucket.gradients)
                storage = own.untyped_storage()._cdata
                for part in bucket.owned_ranges():
                    values = own[part.place].clone()
                    record.gradients.append(HeldElements(part.spec, part.start, part.stop, values, storage))

    def run(*args: Any) -> dict[str, Tensor]:
        losses = honest_run(*args)
        record.losses = dict(losses)
        record.loss_sources = {name: recorder.sources_of(loss) for name, loss in losses.items()}
        return losses

    def squared_norm_share() -> Tensor:
        share = honest_share()
        record.norm_share = float(share)
        return share

    honest_accumulated = gradients.on_accumulated
    honest_finish = state.sync.finish
    honest_run = state.pipeline.run
    honest_share = state.optimizer.squared_norm_share
    gradients.on_accumulated = accumulated
    state.pipeline.on_action = on_action
    state.sync.finish = finish  # type: ignore[method-assign]
    state.pipeline.run = run  # type: ignore[method-assign, assignment]
    state.optimizer.squared_norm_share = squared_norm_share  # type: ignore[method-assign]
    # gradients that are sent in a narrower dtype would be rounded in the sums
    if getattr(state.sync, "_wire", None) is not None:
        state.sync._wire = torch.float64  # type: ignore[attr-defined]
    for stage in state.stages:
        for layer, block in zip(stage.spec.layers, stage.blocks, strict=True):
            block.register_forward_pre_hook(partial(_enter_layer, recorder, layer))
            block.register_forward_hook(partial(_enter_layer, recorder, None))


def _enter_layer(recorder: Recorder, layer: int | None, *_: Any) -> None:
    recorder.layer = layer


def _record_contribution(parameter: ShardedParameter, record: RankRecord, seen: dict[str, Tensor]) -> None:
    """Record the gradient that was added to `main_grad` since the previous call for this parameter."""
    recorder = record.recorder
    name = parameter.spec.name
    assert recorder.microbatch is not None
    with recorder.quiet():
        gradient = parameter.main_grad - seen[name]
        seen[name] = parameter.main_grad.clone()
        place = (parameter.main_grad.untyped_storage()._cdata, int(parameter.main_grad.storage_offset()))
        events = recorder.contributions.pop(place, [])
        known = record.contributions.setdefault(
            (name, recorder.microbatch), Contribution(torch.zeros_like(gradient), [])
        )
        known.gradient += gradient
        known.events.extend(events)
