"""Build order of a rank: layout → layers on the meta device → flat memory → initial weights → engine → optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from frontier_llm.comm import Mesh
from frontier_llm.config import RunConfig
from frontier_llm.model import Stage, initial_rows, working_dtype
from frontier_llm.ops import Ops, select_ops
from frontier_llm.optim import AdamW, Bucket, GradientSync, LossScaler, build_buckets
from frontier_llm.pipeline import Activation, Engine, StageFunction
from frontier_llm.schedule import Schedule, forward_only
from frontier_llm.schedule import build as build_schedule
from frontier_llm.tensor_parallel import LayerContext, WeightGradients
from frontier_llm.topology import ParallelPlan
from frontier_llm.train.feed import BatchSource, Feed
from frontier_llm.train.spikes import SpikePolicy

# 40 M elements, Megatron-LM's default bucket: 160 MB of fp32 gradients, far into the flat part of RCCL's bandwidth curve
BUCKET_NUMEL = 40_000_000


@dataclass
class TrainState:
    """Everything that one rank trains with. `train.step.train_step` is its only user that moves it forward."""

    config: RunConfig
    plan: ParallelPlan
    mesh: Mesh
    device: torch.device
    ops: Ops
    stages: list[Stage]
    buckets: list[Bucket]
    sync: GradientSync
    optimizer: AdamW
    scaler: LossScaler
    engine: Engine
    evaluator: Engine  # the same stages, forward only
    feed: Feed
    spikes: SpikePolicy
    global_tokens: int = 0  # targets of the current step over all replicas: what the loss is divided by
    current_step: int = 0
    skipped_steps: int = 0

    def new_feed(self, source: BatchSource) -> Feed:
        """Another stream of batches for this rank, e.g. the held-out one."""
        return Feed(source, self.config.batch.global_batch * self.config.model.sequence_length, self.mesh.dp, self.device)


def build_state(config: RunConfig, plan: ParallelPlan, mesh: Mesh, device: torch.device, source: BatchSource) -> TrainState:
    """One rank's part of the run, with initial weights. Raises BackendError when a chosen op is not there."""
    dtype = working_dtype(config.precision.dtype)
    ops = select_ops(config.ops, device.type, dtype)
    gradients = WeightGradients()
    context = LayerContext(mesh.tp, plan.sequence_parallel, ops, gradients, dtype)
    specs = [plan.stage_of(mesh.pp.rank, chunk) for chunk in range(plan.chunks)]
    stages = [Stage(config.model, spec, context, device, config.train.recompute) for spec in specs]
    buckets = build_buckets(stages, mesh.dp, plan.zero, device, BUCKET_NUMEL)
    with torch.no_grad():
        for bucket in buckets:
            for parameter in bucket.parameters:
                initial_rows(parameter.spec, config.train.seed, parameter)
                if not parameter.layer_accumulates:
                    gradients.collect_from_autograd(parameter, ops.accumulate_)
    sync = GradientSync(buckets, mesh, plan.microbatches, config.comm.overlap_gradients)
    gradients.on_accumulated = sync.accumulated
    targets = config.batch.global_batch * config.model.sequence_length

    def run_stage(stage: Stage, x: Tensor | None, microbatch: int) -> Tensor:
        return stage(x, state.feed.microbatch(state.current_step, microbatch), state.global_tokens)

    engine, evaluator = _engines(config, plan, mesh, device, [partial(run_stage, stage) for stage in stages], gradients, dtype)
    optimizer, scaler = AdamW(buckets, config.optimizer, mesh, ops), LossScaler.create(config.precision)
    feed = Feed(source, targets, mesh.dp, device)
    spikes = SpikePolicy(config.guard.spike_sigmas, config.guard.spike_window)
    state = TrainState(config, plan, mesh, device, ops, stages, buckets, sync, optimizer, scaler, engine, evaluator, feed, spikes)
    return state


def _engines(
    config: RunConfig,
    plan: ParallelPlan,
    mesh: Mesh,
    device: torch.device,
    stages: list[StageFunction],
    gradients: WeightGradients,
    dtype: torch.dtype,
) -> tuple[Engine, Engine]:
    """One that trains, and one that only evaluates."""
    schedule = build_schedule(plan.schedule, plan.grid.pp, plan.microbatches, plan.chunks)
    sequence = config.model.sequence_length // (mesh.tp.size if plan.sequence_parallel else 1)
    activation = Activation((sequence, config.batch.micro_batch, config.model.hidden), dtype, device)

    def engine(schedule: Schedule) -> Engine:
        return Engine(schedule, stages, mesh.pp, mesh.channels, gradients, activation)

    return engine(schedule), engine(forward_only(schedule))
