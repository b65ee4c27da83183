"""Which engine sums the gradients and updates the weights: our own ZeRO, torch's FSDP, or DeepSpeed. Each is imported only when chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from frontier_llm.comm import Mesh
from frontier_llm.config import RunConfig
from frontier_llm.model import Stage, initialize
from frontier_llm.ops import Ops, working_dtype
from frontier_llm.optim.adamw import AdamW
from frontier_llm.optim.buckets import Bucket, build_buckets
from frontier_llm.optim.state import GradientSums, Optimizer
from frontier_llm.optim.sync import GradientSync
from frontier_llm.tensor_parallel import AutogradGradients, ShardedParameter, WeightGradients
from frontier_llm.topology import ParallelPlan


@dataclass(frozen=True)
class EngineInputs:
    """What every engine starts from: stages on the meta device, and where they will live."""

    config: RunConfig
    plan: ParallelPlan
    mesh: Mesh
    device: torch.device
    ops: Ops
    gradients: WeightGradients
    stages: Sequence[Stage]


class Update(NamedTuple):
    """What an engine does for the training step."""

    sync: GradientSums
    optimizer: Optimizer
    stages: Sequence[Callable[..., Tensor]]  # what to call for each virtual stage: the stage, or the engine's wrapping of it


def gradient_destination(config: RunConfig) -> WeightGradients:
    """Where the chosen engine wants the layers' weight gradients."""
    through_autograd = config.parallel.data_mode == "fsdp" or config.parallel.zero > 1
    return AutogradGradients() if through_autograd else WeightGradients()


def build_update(inputs: EngineInputs) -> Update:
    """Give the stages memory and initial weights, and hand over what sums and updates. Collective over the world."""
    config = inputs.config
    if config.parallel.data_mode == "fsdp":
        from frontier_llm.optim.fsdp import ShardedAdamW

        sharded = ShardedAdamW(inputs)
        return Update(sharded, sharded, inputs.stages)
    if config.optimizer.engine == "deepspeed":
        from frontier_llm.optim.deepspeed_zero import ZeroOne, ZeroThree, ZeroTwo

        stages: dict[int, type[ZeroOne] | type[ZeroTwo]] = {1: ZeroOne, 2: ZeroTwo, 3: ZeroThree}
        zero = stages[config.parallel.zero](inputs)
        return Update(zero, zero, zero.stages)
    return _native(inputs)


def fill(buckets: Sequence[Bucket], inputs: EngineInputs) -> list[ShardedParameter]:
    """Initial weights into the buckets, and autograd's gradients on their way there; returns the parameters."""
    parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
    initialize(parameters, inputs.config.train.seed)
    for parameter in parameters:
        if not parameter.layer_accumulates:
            inputs.gradients.collect_from_autograd(parameter, inputs.ops.accumulate_)
    return parameters


def _native(inputs: EngineInputs) -> Update:
    config, mesh = inputs.config, inputs.mesh
    buckets = build_buckets(inputs.stages, mesh.dp, inputs.plan.zero, inputs.device, config.comm.bucket_elements)
    fill(buckets, inputs)
    wire = None if config.precision.gradient_wire == "full" else working_dtype(config.precision.gradient_wire)
    sync = GradientSync(buckets, mesh, inputs.plan.microbatches, config.comm.overlap_gradients, wire)
    inputs.gradients.on_accumulated = sync.accumulated
    return Update(sync, AdamW(buckets, config.optimizer, mesh, inputs.ops, config.comm.overlap_weights), inputs.stages)
