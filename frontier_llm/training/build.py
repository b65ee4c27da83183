"""Builds the training state of a rank.

It creates these parts in order: layout, layers on the meta device, memory and initial weights, gradient synchroniser
and optimizer, pipeline engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from frontier_llm.blueprint.layout import context_way
from frontier_llm.comm import Mesh
from frontier_llm.config import RunConfig, RunPhase, phases_of
from frontier_llm.data.position import START, Position
from frontier_llm.model import Stage, build_stages, losses
from frontier_llm.ops import Ops, select_run_ops, working_dtype
from frontier_llm.optim import (
    EngineInputs,
    GradientSums,
    GradientSync,
    LossScaler,
    Optimizer,
    build_update,
    gradient_destination,
)
from frontier_llm.parallel.pipeline import Engine
from frontier_llm.parallel.stages import ActivationSpec
from frontier_llm.parallel.tensor import LayerContext
from frontier_llm.schedule import Schedule, forward_only
from frontier_llm.topology.plan import ParallelPlan, pipeline_schedule
from frontier_llm.training.feed import BatchSource, Feed
from frontier_llm.training.guard import SpikePolicy


@dataclass(frozen=True)
class BestLoss:
    """The lowest loss so far on the held-out set that `train.keep_best` names."""

    step: int
    loss: float


@dataclass
class TrainState:
    """Training state of one rank: weights, optimizer, pipeline engine, data feed and position in the run.

    `training.step.train_step` advances the state by one step.
    """

    phases: tuple[RunPhase, ...]  # all phases of the run
    plan: ParallelPlan
    mesh: Mesh
    device: torch.device
    stages: list[Stage]
    sync: GradientSums
    optimizer: Optimizer
    scaler: LossScaler
    spikes: SpikePolicy
    current_step: int = 0
    skipped_steps: int = 0
    position: Position = START  # position in the run's data
    best: BestLoss | None = None
    # The fields below belong to the current phase.
    config: RunConfig = field(init=False)
    pipeline: Engine = field(init=False)
    evaluator: Engine = field(init=False)  # the same stages, forward only
    feed: Feed = field(init=False)

    def enter(self, phase: RunPhase, source: BatchSource, position: Position = START) -> None:
        """Start a phase of the run. Weights and optimizer state are kept.

        A phase may have another sequence length, other position embeddings and another number of microbatches.

        `position` is the position in the run's data at which `source` begins. Use START if `source` is not the run's
        data.
        """
        self.position = position
        config = phase.config
        self.config = config
        batch = config.batch
        self.plan = replace(self.plan, microbatches=batch.global_batch // (batch.micro_batch * self.plan.grid.dp))
        for stage in self.stages:
            stage.follow(config.model)
        if isinstance(self.sync, GradientSync):
            self.sync.microbatches = self.plan.microbatches
        schedule = pipeline_schedule(config, self.plan)
        self.pipeline = self._new_engine(schedule)
        self.evaluator = self._new_engine(forward_only(schedule))
        self.feed = self.new_feed(source)

    def _new_engine(self, schedule: Schedule) -> Engine:
        """Build a pipeline engine for this rank's stages in the current phase."""
        config = self.config
        context = self.stages[0].context
        sequence_shards = self.mesh.cp.size
        if self.plan.sequence_parallel:
            sequence_shards *= self.mesh.tp.size
        tokens = config.model.sequence_length // sequence_shards
        shape = (tokens, config.batch.micro_batch, config.model.hidden)
        return Engine(
            schedule,
            self.stages,
            self.mesh,
            context.gradients,
            ActivationSpec(shape, context.dtype, self.device),
            overlap=config.comm.overlap_messages,
            loss_weights=losses.weights(config),
            shapes=losses.shapes(config.model),
        )

    def new_feed(self, source: BatchSource) -> Feed:
        """Return a stream of batches for this rank, for example the held-out batches."""
        is_end = any(stage.spec.embedding or stage.spec.head for stage in self.stages)
        sequences = self.config.batch.global_batch
        targets = sequences * self.config.model.sequence_length
        drops = self.config.model.dropout > 0
        return Feed(
            source,
            targets_per_step=targets,
            mesh=self.mesh,
            device=self.device,
            is_end=is_end,
            sequences_per_step=sequences,
            drops=drops,
        )


def build_state(
    config: RunConfig,
    plan: ParallelPlan,
    mesh: Mesh,
    device: torch.device,
    source: BatchSource,
    draws: bool = True,
    ops: Ops | None = None,
) -> TrainState:
    """Build the training state of one rank for the first phase of the run.

    With `draws` False, the initial weights are not drawn, because a checkpoint will be loaded. If `ops` is None, the
    configuration selects the ops. Raises BackendError if a selected op is not available.
    """
    phases = phases_of(config)
    config = phases[0].config
    model = config.model
    way = context_way(model, mesh.tp.size, mesh.cp.size, config.parallel.context_attention)
    ops = ops or select_run_ops(config, device.type, attends_in_parts=mesh.cp.size > 1 and way != "heads")
    gradients = gradient_destination(config)
    context = LayerContext(
        tp=mesh.tp,
        sequence_parallel=plan.sequence_parallel,
        ops=ops,
        gradients=gradients,
        dtype=working_dtype(config.precision.dtype),
        tensor_chunks=config.comm.tensor_chunks,
        cp=mesh.cp,
        ep=mesh.ep,
        etp=plan.grid.etp,
        context_attention=way,
        seed=config.train.seed,
    )
    stages = build_stages(
        model,
        plan.stages_of(mesh.pp.rank),
        context,
        device,
        recompute_modes=config.train.recompute,
        terms=losses.select(config.train.loss_weights),
    )
    inputs = EngineInputs(
        config=config,
        plan=plan,
        mesh=mesh,
        device=device,
        ops=ops,
        gradients=gradients,
        stages=stages,
        draws=draws,
    )
    sync, optimizer = build_update(inputs)
    state = TrainState(
        phases=phases,
        plan=plan,
        mesh=mesh,
        device=device,
        stages=stages,
        sync=sync,
        optimizer=optimizer,
        scaler=LossScaler.create(config),
        spikes=SpikePolicy(config.guard.spike_sigmas, config.guard.spike_window),
    )
    state.enter(phases[0], source)
    return state
