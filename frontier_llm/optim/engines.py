"""Which engine sums the gradients and updates the weights: our own ZeRO, torch's FSDP, or DeepSpeed. Each is
imported only when chosen.
"""

from __future__ import annotations

from frontier_llm.config import RunConfig
from frontier_llm.ops import working_dtype
from frontier_llm.optim.buckets import build_buckets
from frontier_llm.optim.inputs import EngineInputs
from frontier_llm.optim.state import GradientSums, Optimizer
from frontier_llm.optim.sync import GradientSync
from frontier_llm.optim.zero import Zero
from frontier_llm.parallel.tensor import AutogradGradients, WeightGradients


def gradient_destination(config: RunConfig) -> WeightGradients:
    """Where the chosen engine wants the layers' weight gradients."""
    return AutogradGradients() if config.parallel.data_mode == "fsdp" else WeightGradients()


def build_update(inputs: EngineInputs) -> tuple[GradientSums, Optimizer]:
    """Give the stages memory and initial weights, and hand over what sums and updates. Collective over the world."""
    config = inputs.config
    mesh = inputs.mesh
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
