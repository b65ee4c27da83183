"""DeepSpeed's ZeRO-1 under our tensor and pipeline groups (Rajbhandari et al. 2020, arXiv:1910.02054; DeepSpeed 0.19).

DeepSpeed reduces gradients, cuts the state over dp, may offload it, and gathers the weights; the model, the schedule,
the decision to skip a step and the formula that DeepSpeed calls are ours. Our layers accumulate gradients in fp32 and
hand them over once per step, whatever schedule the pipeline plays.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from frontier_llm.blueprint.optimizers import MASTER
from frontier_llm.comm import single
from frontier_llm.errors import BackendError
from frontier_llm.optim.buckets import build_buckets
from frontier_llm.optim.deepspeed_engine import build_engine
from frontier_llm.optim.engines import EngineInputs
from frontier_llm.optim.state import StateRectangle, state_of_run
from frontier_llm.optim.sync import GradientSync
from frontier_llm.parallel.tensor import ShardedParameter
from frontier_llm.topology.shards import ShardSpec


class DeepSpeedZero:
    """GradientSums and Optimizer. DeepSpeed averages over dp where we sum, so its gradients are smaller than ours,
    `_divided_by` times.
    """

    def __init__(self, inputs: EngineInputs) -> None:
        """Give the stages memory and initial weights, then hand their parameters to DeepSpeed. Collective over the
        world.
        """
        mesh = inputs.mesh
        self.rule = inputs.rule
        self.updates = 0
        self.device = inputs.device
        self.shards = mesh.dp.size
        self._divided_by = mesh.dp.size
        self._is_first = mesh.world.rank == 0
        # our buckets accumulate, and sum over tp and tied; dp is DeepSpeed's
        buckets = build_buckets(
            inputs.stages, self.rule, single("dp"), 0, inputs.device, inputs.config.comm.bucket_elements
        )
        self._parameters = inputs.fill(buckets)
        self._sync = GradientSync(buckets, mesh, inputs.plan.microbatches, overlap=False)
        inputs.gradients.on_accumulated = self._sync.accumulated
        self._engine = build_engine(inputs, self._parameters, nn.ModuleList(inputs.stages))
        self._zero = self._engine.optimizer
        self._zero.optimizer.allocate()
        for bucket in buckets:
            bucket.flat_weights = torch.empty(0)  # DeepSpeed has moved the weights into buffers of its own
        self._check_places()

    def _check_places(self) -> None:
        """A setting that puts state elsewhere than DeepSpeed says would spoil every checkpoint: at the start masters
        equal weights.
        """
        for parameter in self._parameters:
            for first, flat, place, numel in self._runs(parameter):
                weights = parameter.detach().view(-1)[first : first + numel]
                if not torch.equal(weights.to(flat), flat.narrow(0, place, numel)):
                    what = f"DeepSpeed says wrongly where the state of {parameter.spec.name} lies"
                    raise BackendError(
                        what, "leave out what reorders parameters in the DeepSpeed JSON", "optimizer.deepspeed_config"
                    )

    def _runs(self, parameter: ShardedParameter) -> Iterator[tuple[int, Tensor, int, int]]:
        """(first element, flat fp32 partition, its place there, elements) of what this rank holds of a parameter:
        nothing, or one run.
        """
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            run = mapping.lp_fragment_address
            place = mapping.hp_fragment_address
            yield (
                run.start,
                self._zero.single_partition_of_fp32_groups[mapping.param_group_index],
                place.start,
                run.numel,
            )

    def begin(self) -> None:
        """See GradientSums."""
        self._zero.micro_step_id = -1  # where a step that was skipped left it
        self._zero.zero_grad()
        self._sync.begin()

    def finish(self) -> None:
        """See GradientSums: hand over the accumulated gradients, and let DeepSpeed reduce them in one pass."""
        self._sync.finish()
        name = "grad_accum" if self._zero.use_grad_accum_attribute else "grad"
        with self._engine.coalesce_grad_reduction():
            for parameter in self._parameters:
                # a tensor of its own: DeepSpeed points it to its bucket
                setattr(parameter, name, parameter.main_grad.detach())

    def squared_norm_share(self) -> Tensor:
        """See Optimizer. DeepSpeed has summed over all ranks already and says -1 for a norm that is not finite: rank
        0 passes it on.
        """
        norm = torch.as_tensor(self._zero.scaled_global_norm(), device=self.device).double()
        return torch.where(norm < 0, torch.inf, (norm * self._divided_by).square() * self._is_first)

    def step(self, lr: float, grad_scale: float | Tensor) -> None:
        """See Optimizer."""
        self.updates += 1
        for group in self._zero.optimizer.param_groups:
            group.update(lr=lr, step=self.updates, grad_scale=grad_scale * self._divided_by)
        self._zero.step()

    def settle(self) -> None:
        """See Optimizer: nothing is under way between steps."""

    def state(self) -> list[StateRectangle]:
        """See Optimizer."""
        rectangles: list[StateRectangle] = []
        for parameter in self._parameters:
            for first, flat, place, numel in self._runs(parameter):
                whole = {MASTER: flat.detach(), **self._zero.optimizer.state[flat]}
                mine = {kind: values.narrow(0, place, numel) for kind, values in whole.items()}
                rectangles += state_of_run(parameter.spec, first, first + numel, parameter.spec.counted, mine)
        return rectangles

    def weights(self) -> list[tuple[ShardSpec, Tensor]]:
        """See Optimizer."""
        return [(parameter.spec, parameter.data) for parameter in self._parameters]

    def weights_from_masters(self) -> None:
        """See Optimizer."""
        self._zero.update_lp_params()
