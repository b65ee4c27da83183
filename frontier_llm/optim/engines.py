"""Selects the engine that sums gradients and updates weights: this package's ZeRO-1, torch's FSDP, or DeepSpeed.

FSDP and DeepSpeed are imported only if they are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from frontier_llm.blueprint.optimizers import MASTER, OptimizerRule, optimizer_rule
from frontier_llm.comm import Mesh
from frontier_llm.config import RunConfig
from frontier_llm.model import Stage, initial_rows, initialize
from frontier_llm.ops import Ops, working_dtype
from frontier_llm.optim.buckets import Bucket, build_buckets
from frontier_llm.optim.state import GradientSums, Optimizer
from frontier_llm.optim.sync import GradientSync
from frontier_llm.optim.zero import Zero
from frontier_llm.parallel.tensor import AutogradGradients, ShardedParameter, WeightGradients
from frontier_llm.topology.plan import ParallelPlan
from frontier_llm.topology.traffic import uncounted_engine


@dataclass(frozen=True)
class EngineInputs:
    """Inputs for building an engine: pipeline stages on the meta device, and their layout, device and ops."""

    config: RunConfig
    plan: ParallelPlan
    mesh: Mesh
    device: torch.device
    ops: Ops
    gradients: WeightGradients
    stages: Sequence[Stage]
    draws: bool = True  # False: weights are not drawn, because a checkpoint will replace them (see `draw_masters`)

    @property
    def rule(self) -> OptimizerRule:
        """Rule of the run's optimizer, which names the optimizer states."""
        return optimizer_rule(self.config.optimizer.name)

    def fill(self, buckets: Sequence[Bucket]) -> list[ShardedParameter]:
        """Draw initial weights into the buckets, and return the parameters.

        If a layer does not add a parameter's gradient to main_grad itself, register a hook that does.
        """
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        if self.draws:
            initialize(parameters, self.config.train.seed)
        for parameter in parameters:
            if not parameter.layer_accumulates:
                self.gradients.collect_from_autograd(parameter, self.ops)
        return parameters


def draw_masters(optimizer: Optimizer, seed: int, working: torch.dtype) -> None:
    """Draw the initial weights into the masters, because an expected checkpoint could not be read.

    The weights are equal to those from `EngineInputs.fill`.

    Collective over dp.
    """
    for part in optimizer.state():
        if MASTER not in part.tensors:
            continue  # statistics have no master and start at zero
        master = part.tensors[MASTER]
        rounded = torch.empty(master.shape, dtype=working, device=master.device)
        initial_rows(replace(part.spec, offset=part.rectangle.offset, shape=part.rectangle.shape), seed, rounded)
        master.copy_(rounded)
    optimizer.weights_from_masters()


def gradient_destination(config: RunConfig) -> WeightGradients:
    """Return the object that receives the layers' weight gradients for the chosen engine."""
    return AutogradGradients() if config.parallel.data_mode == "fsdp" else WeightGradients()


def build_update(inputs: EngineInputs) -> tuple[GradientSums, Optimizer]:
    """Allocate the parameters of this rank's stages. Returns the gradient synchroniser and the optimizer.

    If `inputs.draws` is true, the initial weights are drawn. Collective over the world.
    """
    config = inputs.config
    mesh = inputs.mesh
    mesh.ledger.not_counted = uncounted_engine(config)
    if config.parallel.data_mode == "fsdp":
        from frontier_llm.optim.fsdp import FullySharded

        sharded = FullySharded(inputs)
        return sharded, sharded
    if config.optimizer.engine == "deepspeed":
        from frontier_llm.optim.deepspeed_zero import DeepSpeedZero

        deepspeed = DeepSpeedZero(inputs)
        return deepspeed, deepspeed
    numel = config.comm.bucket_elements
    buckets = build_buckets(
        inputs.stages, inputs.rule, mesh.replicas, inputs.plan.zero, inputs.device, numel, edp=mesh.edp
    )
    inputs.fill(buckets)
    wire = None if config.precision.gradient_wire == "full" else working_dtype(config.precision.gradient_wire)
    sync = GradientSync(buckets, mesh, inputs.plan.microbatches, config.comm.overlap_gradients, wire)
    inputs.gradients.on_accumulated = sync.accumulated
    return sync, Zero(buckets, config.optimizer, inputs.ops, config.comm.overlap_weights, mesh)
