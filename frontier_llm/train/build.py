"""Build order of a rank: layout → layers on the meta device → flat memory → initial weights → engine → optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from frontier_llm.comm import Mesh
from frontier_llm.config import RunConfig
from frontier_llm.model import Microbatch, Stage, initial_rows, working_dtype
from frontier_llm.ops import Ops, select_ops
from frontier_llm.optim import AdamW, Bucket, GradientSync, LossScaler, build_buckets
from frontier_llm.pipeline import Activation, Engine
from frontier_llm.schedule import build as build_schedule
from frontier_llm.tensor_parallel import LayerContext, WeightGradients
from frontier_llm.topology import ParallelPlan

# 40 M elements, Megatron-LM's default bucket: 160 MB of fp32 gradients, far into the flat part of RCCL's bandwidth curve
BUCKET_NUMEL = 40_000_000

FetchMicrobatch = Callable[[int, int], Microbatch]  # (step, index) → this rank's microbatch


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
    fetch: FetchMicrobatch
    global_tokens: int  # targets per step over all replicas: what the loss is divided by
    current_step: int = 0
    skipped_steps: int = 0


def build_state(config: RunConfig, plan: ParallelPlan, mesh: Mesh, device: torch.device, fetch: FetchMicrobatch) -> TrainState:
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
    sync = GradientSync(buckets, mesh, plan.microbatches)
    gradients.on_accumulated = sync.accumulated
    state = TrainState(
        config, plan, mesh, device, ops, stages, buckets, sync,
        optimizer=AdamW(buckets, config.optimizer, mesh, ops),
        scaler=LossScaler.create(config.precision),
        engine=None,  # type: ignore[arg-type]  # set two lines below: its stages read the step from this state
        fetch=fetch,
        global_tokens=config.batch.global_batch * config.model.sequence_length,
    )  # fmt: skip
    state.engine = _build_engine(state, gradients, dtype)
    return state


def _build_engine(state: TrainState, gradients: WeightGradients, dtype: torch.dtype) -> Engine:
    plan, model, batch = state.plan, state.config.model, state.config.batch
    schedule = build_schedule(plan.schedule, plan.grid.pp, plan.microbatches, plan.chunks)
    sequence = model.sequence_length // (state.mesh.tp.size if plan.sequence_parallel else 1)
    activation = Activation((sequence, batch.micro_batch, model.hidden), dtype, state.device)

    def run_stage(stage: Stage, x: Tensor | None, microbatch: int) -> Tensor:
        return stage(x, state.fetch(state.current_step, microbatch), state.global_tokens)

    stages = [partial(run_stage, stage) for stage in state.stages]
    return Engine(schedule, stages, state.mesh.pp, state.mesh.channels, gradients, activation)
