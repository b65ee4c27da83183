"""Build order of a rank: layout → layers on the meta device → memory and initial weights → what updates them → pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from frontier_llm.blueprint.context import context_way
from frontier_llm.comm import Mesh
from frontier_llm.config import RunConfig
from frontier_llm.model import Stage, build_stages, losses
from frontier_llm.ops import AttentionNeeds, AttentionShape, select_ops, working_dtype
from frontier_llm.optim import EngineInputs, GradientSums, LossScaler, Optimizer, build_update, gradient_destination
from frontier_llm.pipeline import ActivationSpec, Engine
from frontier_llm.schedule import Schedule, forward_only
from frontier_llm.schedule import build as build_schedule
from frontier_llm.tensor_parallel import LayerContext
from frontier_llm.topology import ParallelPlan
from frontier_llm.train.feed import BatchSource, Feed
from frontier_llm.train.guard import SpikePolicy


@dataclass
class TrainState:
    """Everything that one rank trains with. `train.step.train_step` is its only user that moves it forward."""

    config: RunConfig
    plan: ParallelPlan
    mesh: Mesh
    device: torch.device
    stages: list[Stage]
    sync: GradientSums
    optimizer: Optimizer
    scaler: LossScaler
    pipeline: Engine
    evaluator: Engine  # the same stages, forward only
    feed: Feed
    spikes: SpikePolicy
    current_step: int = 0
    skipped_steps: int = 0

    def new_feed(self, source: BatchSource) -> Feed:
        """Another stream of batches for this rank, e.g. the held-out one."""
        return _feed(self.config, self.mesh, self.device, self.stages, source)


def build_state(
    config: RunConfig, plan: ParallelPlan, mesh: Mesh, device: torch.device, source: BatchSource, draws: bool = True
) -> TrainState:
    """One rank's part of the run, with initial weights, unless a checkpoint will be loaded (`draws`).

    Raises BackendError when a chosen op is not there.
    """
    dtype = working_dtype(config.precision.dtype)
    model, documents = config.model, config.data.reset_at_documents
    shape = AttentionShape(model.dim_per_head, extras=documents or model.position == "alibi")
    way = context_way(model, mesh.tp.size, mesh.cp.size, config.parallel.context_attention)
    parts, window, softcap = mesh.cp.size > 1 and way != "heads", model.sliding_window is not None, model.score_softcap is not None
    needs = AttentionNeeds(documents, parts=parts, window=window, softcap=softcap)
    ops = select_ops(config.ops, device.type, dtype, needs, attention=shape)
    gradients = gradient_destination(config)
    context = LayerContext(
        mesh.tp, plan.sequence_parallel, ops, gradients, dtype, config.comm.tensor_chunks, mesh.cp, mesh.ep, plan.grid.etp, way
    )
    specs, terms = plan.stages_of(mesh.pp.rank), losses.select(config.train.loss_weights)
    stages = build_stages(model, specs, context, device, config.train.recompute, terms)
    sync, optimizer = build_update(EngineInputs(config, plan, mesh, device, ops, gradients, stages, draws))

    sequence = config.model.sequence_length // mesh.cp.size // (mesh.tp.size if plan.sequence_parallel else 1)
    activation = ActivationSpec((sequence, config.batch.micro_batch, config.model.hidden), dtype, device)

    def engine(schedule: Schedule) -> Engine:
        overlap = config.comm.overlap_messages
        weights, shapes = losses.weights(config), losses.shapes(config.model)
        return Engine(schedule, stages, mesh, gradients, activation, overlap=overlap, loss_weights=weights, shapes=shapes)

    schedule = build_schedule(plan.schedule, plan.grid.pp, plan.microbatches, plan.chunks)
    return TrainState(
        config=config,
        plan=plan,
        mesh=mesh,
        device=device,
        stages=stages,
        sync=sync,
        optimizer=optimizer,
        scaler=LossScaler.create(config),
        pipeline=engine(schedule),
        evaluator=engine(forward_only(schedule)),
        feed=_feed(config, mesh, device, stages, source),
        spikes=SpikePolicy(config.guard.spike_sigmas, config.guard.spike_window),
    )


def _feed(config: RunConfig, mesh: Mesh, device: torch.device, stages: list[Stage], source: BatchSource) -> Feed:
    is_end = any(stage.spec.embedding or stage.spec.head for stage in stages)
    sequences = config.batch.global_batch
    return Feed(source, sequences * config.model.sequence_length, mesh, device, is_end, sequences_per_step=sequences)
