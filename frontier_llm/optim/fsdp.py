"""Fully sharded data parallelism by torch's `fully_shard` (FSDP2; Zhao et al. 2023, arXiv:2304.11277) under our tensor parallelism.

Between steps a rank holds one dp-th of every weight: the fp32 master itself. Each block gathers its weights in the working precision
before it runs, forward and backward, and reduce-scatters its gradients, in fp32, after every microbatch. So memory per rank falls
with dp, and bytes on the wire rise with the number of microbatches: for few, large microbatches and models that do not fit otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from frontier_llm.comm import Axis, all_reduce_, process_group
from frontier_llm.config import OptimizerConfig
from frontier_llm.model import Stage, initial_rows
from frontier_llm.ops import AdamWUpdate, Ops, statistics_dtype, working_dtype
from frontier_llm.optim.engines import EngineInputs
from frontier_llm.optim.state import StateRectangle
from frontier_llm.topology import Rectangle, ShardSpec


@dataclass
class _Shard:
    """This rank's rectangle of one parameter. Master and gradient are the local parts of torch's DTensor."""

    spec: ShardSpec  # of the tensor-parallel part that is cut over dp
    rectangle: Rectangle
    parameter: Any  # nn.Parameter over a DTensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def master(self) -> Tensor:
        return self.parameter.detach().to_local()

    @property
    def gradient(self) -> Tensor:
        return self.parameter.grad.to_local()


class ShardedAdamW:
    """AdamW on the shards, and the sums that `fully_shard` does not do."""

    def __init__(self, inputs: EngineInputs) -> None:
        """Shard the stage, which is on the meta device, and give it its initial weights. Collective over dp."""
        (self._stage,) = inputs.stages  # there is no pipeline
        config, mesh, device = inputs.config, inputs.mesh, inputs.device
        self.updates, self.device, self.sharded = 0, device, mesh.dp.size > 1
        self._config, self._mesh, self._ops = config.optimizer, mesh, inputs.ops
        working, seed = working_dtype(config.precision.dtype), config.train.seed
        specs = _widen(self._stage)
        _fully_shard(self._stage, mesh.dp, working, device, config.train.timeout_s)
        self._stage.to_empty(device=device)
        parameters = zip(self._stage.parameters(), specs, strict=True)
        self._shards = [_initial_shard(parameter, spec, mesh.dp, working, seed) for parameter, spec in parameters]

    # --- GradientSums ---

    def begin(self) -> None:
        """See GradientSums."""
        for shard in self._shards:
            shard.parameter.grad = None

    def finish(self) -> None:
        """See GradientSums. Over dp they are summed already; norms and biases under sequence parallelism still miss tp."""
        partial = [shard.gradient for shard in self._shards if shard.spec.sum_over_tp]
        if partial:
            flat = all_reduce_(torch.cat([gradient.flatten() for gradient in partial]), self._mesh.tp)
            for gradient, total in zip(partial, flat.split([gradient.numel() for gradient in partial]), strict=True):
                gradient.copy_(total.view_as(gradient))

    # --- Optimizer ---

    def squared_norm_share(self) -> Tensor:
        """See Optimizer. Replicas are multiplied by zero: they add nothing but are heard where they are not finite."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for shard in self._shards:
            if shard.rectangle.numel:
                total += self._ops.sum_of_squares(shard.gradient.view(-1)) * int(shard.spec.counted)
        return total

    def step(self, lr: float, grad_scale: float) -> None:
        """See Optimizer."""
        self.updates += 1
        for shard in self._shards:
            if shard.rectangle.numel:
                _update(shard, self._config, self._ops, lr, self.updates, grad_scale)

    def settle(self) -> None:
        """See Optimizer: nothing is under way between steps."""

    def state(self) -> list[StateRectangle]:
        """See Optimizer."""
        return [
            StateRectangle(
                shard.spec,
                shard.rectangle,
                shard.spec.counted,
                {"master": shard.master, "exp_avg": shard.exp_avg, "exp_avg_sq": shard.exp_avg_sq},
            )
            for shard in self._shards
            if shard.rectangle.numel
        ]

    def weights(self) -> list[tuple[ShardSpec, Tensor]]:
        """See Optimizer: none, the masters are all that stays."""
        return []

    def weights_from_masters(self) -> None:
        """See Optimizer: forget what was gathered."""
        for module in self._stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _widen(stage: Stage) -> list[ShardSpec]:
    """Make the declared parameters plain ones in the masters' precision, still without memory; returns their specs in order."""
    specs = [parameter.spec for parameter in stage.parameters()]  # type: ignore[attr-defined]
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, dtype=statistics_dtype(parameter.dtype)))
    return specs


def _cut_dim(shape: Sequence[int], ways: int) -> int:
    """The first dim that dp divides: key/value heads are few, so QKV's first dim often cannot be cut. Else 0, unevenly."""
    return next((dim for dim, size in enumerate(shape) if size % ways == 0), 0)


def _fully_shard(stage: Stage, dp: Axis, working: torch.dtype, device: torch.device, timeout_s: float) -> None:
    """Each block by itself, then what is left of the stage (embedding, final norm, head). Gradients are summed, not averaged."""
    mesh = DeviceMesh.from_group(process_group(dp, timeout_s), device.type)
    policy = MixedPrecisionPolicy(param_dtype=working, reduce_dtype=statistics_dtype(working), cast_forward_inputs=False)
    for module in (*stage.blocks, stage):
        fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda p: Shard(_cut_dim(p.shape, dp.size)))
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _initial_shard(parameter: Any, spec: ShardSpec, dp: Axis, working: torch.dtype, seed: int) -> _Shard:
    """Initial weights rounded to the working precision, as every engine starts from them."""
    dim, local = _cut_dim(spec.shape, dp.size), parameter.detach().to_local()
    first = min(-(-spec.shape[dim] // dp.size) * dp.rank, spec.shape[dim])  # torch.chunk's cut
    offset = tuple(start + (first if index == dim else 0) for index, start in enumerate(spec.offset))
    rectangle = Rectangle(offset, tuple(local.shape))
    if rectangle.numel:
        rounded = torch.empty(local.shape, dtype=working, device=local.device)
        initial_rows(replace(spec, offset=offset, shape=rectangle.shape), seed, rounded)
        local.copy_(rounded)
    return _Shard(spec, rectangle, parameter, torch.zeros_like(local), torch.zeros_like(local))


def _update(shard: _Shard, config: OptimizerConfig, ops: Ops, lr: float, step: int, grad_scale: float) -> None:
    master = shard.master.view(-1)
    update = AdamWUpdate(lr, *config.betas, config.eps, config.weight_decay if shard.spec.decay else 0.0, step, grad_scale)
    ops.adamw_(master, shard.gradient.view(-1), shard.exp_avg.view(-1), shard.exp_avg_sq.view(-1), master, update)
