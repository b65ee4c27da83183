"""Fully sharded data parallelism with tensor parallelism, by torch's `fully_shard` (FSDP2; arXiv:2304.11277).

Between steps a rank holds 1/dp of every weight, as an fp32 master. Each transformer block gathers its weights in the
working precision before its forward and before its backward. It reduce-scatters its gradients in fp32 after every
microbatch. Memory per rank falls with dp, and the communicated bytes grow with the number of microbatches. Use FSDP for
few, large microbatches, and for models that do not fit otherwise.

With HSDP, `parallel.data_shard` consecutive replicas shard the weights together, inside one node if they fit into it.
Each such group of replicas holds a copy of all weights. The gradient shards of the copies are summed once per step.
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

from frontier_llm.blueprint.optimizers import MASTER
from frontier_llm.comm import Axis, all_reduce_, end_communication, process_group
from frontier_llm.model import Stage, initial_rows
from frontier_llm.ops import statistics_dtype, working_dtype
from frontier_llm.optim.engines import EngineInputs
from frontier_llm.optim.registry import Slice, slice_update
from frontier_llm.optim.state import StateRectangle
from frontier_llm.topology.rectangles import Rectangle
from frontier_llm.topology.shards import ShardSpec


@dataclass
class _Shard:
    """This rank's shard of one parameter. Master and gradient are the local parts of torch's DTensor."""

    spec: ShardSpec  # spec of the tensor-parallel part that is sharded over dp
    rectangle: Rectangle
    parameter: Any  # nn.Parameter over a DTensor
    states: dict[str, Tensor]

    @property
    def master(self) -> Tensor:
        return self.parameter.detach().to_local()

    @property
    def gradient(self) -> Tensor:
        return self.parameter.grad.to_local()


class FullySharded:
    """Implements `GradientSums` and `Optimizer` with FSDP.

    This class updates the shards, and computes those gradient sums that `fully_shard` does not compute.
    """

    def __init__(self, inputs: EngineInputs) -> None:
        """Shard the stage, which is on the meta device, and initialise its weights. Collective over dp."""
        (self._stage,) = inputs.stages  # there is no pipeline
        config = inputs.config
        mesh = inputs.mesh
        device = inputs.device
        self.rule = inputs.rule
        self.updates = 0
        self.device = device
        self._formula = slice_update(config.optimizer, inputs.ops)
        self._mesh = mesh
        self._ops = inputs.ops
        working = working_dtype(config.precision.dtype)
        seed = config.train.seed
        shards, copies = _shards_and_copies(mesh.replicas, config.parallel.data_shard)
        self.shards = shards.size
        self._is_first_copy = copies.rank == 0
        self._has_copies = copies.size > 1
        self._microbatches = inputs.plan.microbatches
        self._forwards = 0
        self._stage.register_forward_pre_hook(self._before_forward)
        specs = _widen(self._stage)
        _fully_shard(self._stage, _device_mesh(mesh.replicas, shards, copies, device, config.train.timeout_s), working)
        self._stage.to_empty(device=device)
        self._shards = []
        for parameter, spec in zip(self._stage.parameters(), specs, strict=True):
            rectangle, local = _initial_rectangle(parameter, spec, shards, working, seed if inputs.draws else None)
            states = {name: torch.zeros_like(local) for name in self.rule.states(spec.parameter)}
            self._shards.append(_Shard(spec, rectangle, parameter, states))

    # --- GradientSums ---

    def begin(self) -> None:
        """Release the gradients of the last step."""
        end_communication(self._mesh, self.device)
        for shard in self._shards:
            shard.parameter.grad = None
        self._forwards = 0
        self._sum_copies(False)

    def _before_forward(self, stage: nn.Module, inputs: Any) -> None:
        """Enable the gradient sum over HSDP's copies, but only for the backward of the last microbatch."""
        self._forwards += torch.is_grad_enabled()
        if self._forwards == self._microbatches:
            self._sum_copies(True)

    def _sum_copies(self, asked: bool) -> None:
        if self._has_copies:
            assert isinstance(self._stage, FSDPModule)
            self._stage.set_requires_all_reduce(asked)

    def finish(self) -> None:
        """Sum gradients over the axes on which they are partial (tp with sequence parallelism).

        The sums over dp are already complete.
        """
        # FSDP's last reduce-scatter must end before the sums over the world begin
        end_communication(self._mesh, self.device)
        for name in dict.fromkeys(axis for shard in self._shards for axis in shard.spec.parameter.partial_axes()):
            partial = [shard.gradient for shard in self._shards if name in shard.spec.parameter.partial_axes()]
            flat = all_reduce_(torch.cat([gradient.flatten() for gradient in partial]), self._mesh.axis(name))
            for gradient, total in zip(partial, flat.split([gradient.numel() for gradient in partial]), strict=True):
                gradient.copy_(total.view_as(gradient))

    # --- Optimizer ---

    def squared_norm_share(self) -> Tensor:
        """Return this rank's summand of the squared gradient norm.

        Copies are multiplied by zero. They add nothing, but a NaN in any copy still reaches the sum.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for shard in self._held():
            total += self._ops.sum_of_squares(shard.gradient.view(-1)) * int(self._counts(shard))
        return total

    def step(self, lr: float, grad_scale: float | Tensor) -> None:
        """Update this rank's shards."""
        self.updates += 1
        for shard in self._held():
            master = shard.master.view(-1)
            states = {name: state.view(-1) for name, state in shard.states.items()}
            part = Slice(master, shard.gradient.view(-1), states, master, shard.spec.parameter.decay)
            self._formula.update(part, lr, self.updates, grad_scale)

    def wait_for_gather(self) -> None:
        """Do nothing, because no gather is running between steps."""

    def state(self) -> list[StateRectangle]:
        """Return this rank's masters and states."""
        return [
            StateRectangle(shard.spec, shard.rectangle, self._counts(shard), {MASTER: shard.master, **shard.states})
            for shard in self._held()
        ]

    def weights(self) -> list[tuple[ShardSpec, Tensor]]:
        """Return an empty list, because only the masters are kept between steps."""
        return []

    def weights_from_masters(self) -> None:
        """Free the gathered weights, so that the next forward gathers them from the masters."""
        for module in self._stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _counts(self, shard: _Shard) -> bool:
        """Return True on the one copy of the shard that counts in the norm and is saved in checkpoints."""
        return shard.spec.counted and self._is_first_copy

    def _held(self) -> list[_Shard]:
        """Return the shards with at least one element on this rank.

        If dp does not divide the sharded dim, some ranks have none.
        """
        return [shard for shard in self._shards if shard.rectangle.numel]


def _widen(stage: Stage) -> list[ShardSpec]:
    """Replace the declared parameters by plain nn.Parameters in the masters' precision, still on the meta device.

    Returns the specs of the parameters in order.
    """
    specs = [parameter.spec for parameter in stage.parameters()]  # type: ignore[attr-defined]
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(
                    torch.empty_like(parameter, dtype=statistics_dtype(parameter.dtype))
                )
    return specs


def _cut_dim(shape: Sequence[int], ways: int) -> int:
    """Return the first dim whose size is a multiple of `ways`, the number of shards. Return 0 if there is none (uneven
    shards).

    The first dim of QKV's weight is the number of key/value heads, which is often smaller than `ways`.
    """
    return next((dim for dim, size in enumerate(shape) if size % ways == 0), 0)


def _shards_and_copies(replicas: Axis, ways: int | None) -> tuple[Axis, Axis]:
    """Return two axes: the replicas that shard the weights together, and the replicas with copies of this rank's shard.

    `ways` consecutive replicas shard the weights together. None means all replicas.
    """
    copy, place = divmod(replicas.rank, ways := ways or replicas.size)
    row = replicas.ranks[copy * ways : (copy + 1) * ways]
    column = replicas.ranks[place::ways]
    return Axis("shards", place, len(row), row), Axis("copies", copy, len(column), column)


def _device_mesh(replicas: Axis, shards: Axis, copies: Axis, device: torch.device, timeout_s: float) -> DeviceMesh:
    """Return torch's DeviceMesh: one-dimensional over the replicas, or for HSDP (copies, shards)."""
    group = process_group(shards, timeout_s)
    if copies.size == 1:
        return DeviceMesh.from_group(group, device.type)
    table = torch.tensor(replicas.ranks).view(copies.size, shards.size)
    return DeviceMesh.from_group(
        [process_group(copies, timeout_s), group], device.type, mesh=table, mesh_dim_names=("copies", "shards")
    )


def _fully_shard(stage: Stage, mesh: DeviceMesh, working: torch.dtype) -> None:
    """Shard each block, and then the parameters of the stage outside blocks (embedding, final norm, head).

    Gradients are summed, not averaged.
    """
    ways = mesh.size(mesh.ndim - 1)
    policy = MixedPrecisionPolicy(
        param_dtype=working, reduce_dtype=statistics_dtype(working), cast_forward_inputs=False
    )
    for module in (*stage.blocks, stage):
        fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda p: Shard(_cut_dim(p.shape, ways)))
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _initial_rectangle(
    parameter: Any, spec: ShardSpec, shards: Axis, working: torch.dtype, seed: int | None
) -> tuple[Rectangle, Tensor]:
    """Return this rank's rectangle of the global tensor, and its master.

    The initial weights are rounded to the working precision, as with every engine. Without a seed they are not drawn.
    """
    dim = _cut_dim(spec.shape, shards.size)
    local = parameter.detach().to_local()
    first = min(-(-spec.shape[dim] // shards.size) * shards.rank, spec.shape[dim])  # the same split as in torch.chunk
    offset = tuple(start + (first if index == dim else 0) for index, start in enumerate(spec.offset))
    rectangle = Rectangle(offset, tuple(local.shape))
    if rectangle.numel and seed is not None:
        rounded = torch.empty(local.shape, dtype=working, device=local.device)
        initial_rows(replace(spec, offset=offset, shape=rectangle.shape), seed, rounded)
        local.copy_(rounded)
    return rectangle, local
