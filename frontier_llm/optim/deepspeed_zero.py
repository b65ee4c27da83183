"""DeepSpeed's ZeRO under our tensor and pipeline groups (Rajbhandari et al. 2020, arXiv:1910.02054; DeepSpeed 0.19).

DeepSpeed reduces gradients, cuts the state over dp, may offload it, and gathers the weights; the model, the schedule, the decision to
skip a step and the AdamW kernel that DeepSpeed calls are ours. At stage 1 our layers accumulate gradients in fp32 and hand them
over once per step, whatever schedule the pipeline plays. At stages 2 and 3 each microbatch's gradients go through autograd in the
working precision, where DeepSpeed takes, reduces and drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from frontier_llm.comm import Axis, all_reduce_, single
from frontier_llm.errors import BackendError
from frontier_llm.model import initialize
from frontier_llm.optim.buckets import build_buckets
from frontier_llm.optim.deepspeed_engine import build_engine
from frontier_llm.optim.engines import EngineInputs, fill
from frontier_llm.optim.state import KINDS, StateRectangle, state_of_run
from frontier_llm.optim.sync import GradientSync
from frontier_llm.tensor_parallel import ShardedParameter, materialise
from frontier_llm.topology import ShardSpec


class _Zero:
    """What the stages share. DeepSpeed averages where we sum, so its gradients are smaller than ours, `_divided_by` times."""

    def __init__(self, inputs: EngineInputs, parameters: list[ShardedParameter], model: nn.Module, divided_by: int) -> None:
        self.updates, self.device, self.sharded = 0, inputs.device, inputs.mesh.dp.size > 1
        self._parameters, self._divided_by, self._dp_rank = parameters, divided_by, inputs.mesh.dp.rank
        self._world_size = inputs.mesh.world.size
        self._engine = build_engine(inputs, parameters, model)
        self._zero = self._engine.optimizer
        self._zero.optimizer.allocate(self._partitions())
        self._check_places()

    def _check_places(self) -> None:
        """A setting that puts state elsewhere than DeepSpeed says would spoil every checkpoint: at the start masters equal weights."""
        for parameter in self._parameters:
            for first, flat, place, numel in self._runs(parameter):
                if not torch.equal(self._local(parameter, first, numel).to(flat), flat.narrow(0, place, numel)):
                    what = f"DeepSpeed says wrongly where the state of {parameter.spec.name} lies"
                    raise BackendError(what, "leave out what reorders parameters in the DeepSpeed JSON", "optimizer.deepspeed_config")

    def _local(self, parameter: ShardedParameter, first: int, numel: int) -> Tensor:
        """A run of a parameter's working weights."""
        return parameter.detach().view(-1)[first : first + numel]

    def _partitions(self) -> list[Tensor]:
        """DeepSpeed's flat fp32 shares of the masters."""
        partitions: list[Tensor] = self._zero.single_partition_of_fp32_groups
        return partitions

    def _norms(self) -> list[Tensor]:
        """Norms of the parts of the whole gradient, -1 where one is not finite."""
        return [self._zero.scaled_global_norm()]

    def _runs(self, parameter: ShardedParameter) -> Iterator[tuple[int, Tensor, int, int]]:
        """(first element, flat partition, its place there, elements) of what this rank holds of a parameter: nothing, or one run."""
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            run, place = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield run.start, self._partitions()[mapping.param_group_index], place.start, run.numel

    def begin(self) -> None:
        """See GradientSums."""
        self._zero.micro_step_id = -1  # where a step that was skipped left it; stage 3 counts from 0, as its zero_grad knows
        self._zero.zero_grad()

    def squared_norm_share(self) -> Tensor:
        """See Optimizer. DeepSpeed has summed over the world already: an equal share of it."""
        norms = torch.stack([torch.as_tensor(norm, device=self.device).double() for norm in self._norms()])
        share = norms.square().sum() * self._divided_by**2 / self._world_size
        return torch.where((norms >= 0).all(), share, torch.inf)

    def step(self, lr: float, grad_scale: float) -> None:
        """See Optimizer."""
        self.updates += 1
        for group in self._zero.optimizer.param_groups:
            group.update(lr=lr, step=self.updates, grad_scale=grad_scale * self._divided_by)
        self._zero.step()

    def settle(self) -> None:
        """See Optimizer: nothing is under way between steps."""

    def state(self) -> list[StateRectangle]:
        """See Optimizer."""
        found: list[StateRectangle] = []
        for parameter in self._parameters:
            for first, flat, place, numel in self._runs(parameter):
                moments = self._zero.optimizer.state[flat]
                whole = {"master": flat.detach(), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
                mine = {kind: whole[kind].narrow(0, place, numel) for kind in KINDS}
                found += state_of_run(parameter.spec, first, first + numel, parameter.spec.counted, mine)
        return found

    def weights(self) -> list[tuple[ShardSpec, Tensor]]:
        """See Optimizer."""
        return [(parameter.spec, parameter.data) for parameter in self._parameters]

    def weights_from_masters(self) -> None:
        """See Optimizer."""
        self._zero.update_lp_params()


class ZeroOne(_Zero):
    """Optimizer state split over dp, with any pipeline schedule."""

    def __init__(self, inputs: EngineInputs) -> None:
        """Give the stages memory and initial weights, then hand their parameters to DeepSpeed. Collective over the world."""
        # our buckets accumulate, and sum over tp and tied; dp is DeepSpeed's
        buckets = build_buckets(inputs.stages, single("dp"), 0, inputs.device, inputs.config.comm.bucket_elements)
        parameters = fill(buckets, inputs)
        self._sync = GradientSync(buckets, inputs.mesh, inputs.plan.microbatches, overlap=False)
        inputs.gradients.on_accumulated = self._sync.accumulated
        super().__init__(inputs, parameters, nn.ModuleList(inputs.stages), inputs.mesh.dp.size)
        for bucket in buckets:
            bucket.flat_weights = torch.empty(0)  # DeepSpeed has moved the weights into buffers of its own
        self.stages: Sequence[Callable[..., Tensor]] = inputs.stages

    def begin(self) -> None:
        """See GradientSums."""
        super().begin()
        self._sync.begin()

    def finish(self) -> None:
        """See GradientSums: hand over the accumulated gradients, and let DeepSpeed reduce them in one pass."""
        self._sync.finish()
        name = "grad_accum" if self._zero.use_grad_accum_attribute else "grad"
        with self._engine.coalesce_grad_reduction():
            for parameter in self._parameters:
                setattr(parameter, name, parameter.main_grad.detach())  # a tensor of its own: DeepSpeed points it to its bucket


class ZeroTwo(_Zero):
    """And the gradients: DeepSpeed takes them out of every backward pass. One stage, whose every backward follows its forward (1f1b)."""

    def __init__(self, inputs: EngineInputs) -> None:
        """See ZeroOne."""
        (stage,) = inputs.stages
        parameters = materialise(stage, inputs.device)
        initialize(parameters, inputs.config.train.seed)
        for parameter in parameters:
            if parameter.spec.sum_over_tp:
                _sum_in_backward(parameter, inputs.mesh.tp)
        self._microbatches, self._forwards = inputs.plan.microbatches, 0
        super().__init__(inputs, parameters, stage, inputs.mesh.dp.size * inputs.plan.microbatches)
        self.stages = [self._forward]

    def _forward(self, *inputs: Any) -> Tensor:
        """The stage, as DeepSpeed's module: it has to know which backward pass is the step's last."""
        if torch.is_grad_enabled():
            self._forwards += 1
            self._engine.set_gradient_accumulation_boundary(self._forwards == self._microbatches)
        output: Tensor = self._engine(*inputs)
        return output

    def begin(self) -> None:
        """See GradientSums."""
        super().begin()
        self._forwards = 0

    def finish(self) -> None:
        """See GradientSums: the last backward pass has done it all."""


class ZeroThree(ZeroTwo):
    """And the weights: gathered before each layer runs, dropped after it."""

    def _partitions(self) -> list[Tensor]:
        partitions: list[Tensor] = self._zero.fp32_partitioned_groups_flat
        return partitions

    def _norms(self) -> list[Tensor]:
        norms: list[Tensor] = self._zero._get_norm_groups()
        return norms

    def _runs(self, parameter: ShardedParameter) -> Iterator[tuple[int, Tensor, int, int]]:
        group, place, _ = self._zero.grad_position[self._zero.get_param_id(parameter)]
        share: int = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]  # equal on all ranks: the last one's is padded
        first = share * self._dp_rank
        numel = min(share, parameter.spec.numel - first)
        if numel > 0:
            yield first, self._partitions()[group], place, numel

    def _local(self, parameter: ShardedParameter, first: int, numel: int) -> Tensor:
        share: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        return share.detach()[:numel]

    def weights(self) -> list[tuple[ShardSpec, Tensor]]:
        """See Optimizer: none, each rank keeps its share only."""
        return []

    def weights_from_masters(self) -> None:
        """See Optimizer."""
        for group in range(len(self._partitions())):
            self._zero._reassign_or_swap_out_partitioned_parameters(group)
        small = self._zero.persistent_parameters  # those that stay gathered between steps
        if small:
            small[0].all_gather(small)


def _sum_in_backward(parameter: ShardedParameter, tp: Axis) -> None:
    """Sequence parallelism: a norm's gradient is partial over tp. Summed in every microbatch, before DeepSpeed sees it."""
    parameter.register_hook(lambda grad: all_reduce_(grad.contiguous().clone(), tp))
