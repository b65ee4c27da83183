"""DeepSpeed's ZeRO-1 with the tensor and pipeline groups of this package (arXiv:1910.02054; DeepSpeed 0.19).

DeepSpeed reduces gradients, shards the optimizer state over dp (and may offload it), and gathers the weights. This
package supplies the model, the pipeline schedule, the decision to skip a step, and the optimizer's formula. With every
schedule, the layers accumulate gradients in fp32, and DeepSpeed receives them once per step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from frontier_llm.blueprint.optimizers import MASTER
from frontier_llm.comm import end_communication, single
from frontier_llm.errors import BackendError
from frontier_llm.optim.buckets import build_buckets
from frontier_llm.optim.deepspeed_engine import build_engine
from frontier_llm.optim.engines import EngineInputs
from frontier_llm.optim.state import StateRectangle, state_of_run
from frontier_llm.optim.sync import GradientSync
from frontier_llm.parallel.tensor import ShardedParameter
from frontier_llm.topology.shards import ShardSpec


class DeepSpeedZero:
    """Implements `GradientSums` and `Optimizer` with DeepSpeed's ZeRO-1.

    DeepSpeed averages gradients over dp, but this package sums gradients. DeepSpeed's gradients are therefore smaller
    by the factor `_divided_by`.
    """

    def __init__(self, inputs: EngineInputs) -> None:
        """Allocate and initialise the parameters, then pass them to DeepSpeed. Collective over the world."""
        mesh = inputs.mesh
        self.rule = inputs.rule
        self.updates = 0
        self.device = inputs.device
        self._mesh = mesh
        self.shards = mesh.dp.size
        self._divided_by = mesh.dp.size
        self._is_first = mesh.world.rank == 0
        # These buckets accumulate gradients and sum them over tp and tied. DeepSpeed sums over dp.
        buckets = build_buckets(
            inputs.stages, self.rule, single("dp"), 0, inputs.device, inputs.config.comm.bucket_elements
        )
        self._parameters = inputs.fill(buckets)
        self._sync = GradientSync(buckets, mesh, inputs.plan.microbatches, overlap=False)
        inputs.gradients.on_accumulated = self._sync.accumulated
        end_communication(mesh, self.device)
        self._engine = build_engine(inputs, self._parameters, nn.ModuleList(inputs.stages))
        self._zero = self._engine.optimizer
        self._zero.optimizer.allocate()
        for bucket in buckets:
            bucket.flat_weights = torch.empty(0)  # DeepSpeed has moved the weights into its own buffers
        self._check_places()
        end_communication(mesh, self.device)

    def _check_places(self) -> None:
        """Raise BackendError if a parameter's state is not at the position that DeepSpeed reports.

        The check compares masters with weights, which are equal at the start. Without it, a DeepSpeed setting that
        reorders parameters would corrupt every checkpoint.
        """
        for parameter in self._parameters:
            for first, flat, place, numel in self._runs(parameter):
                weights = parameter.detach().view(-1)[first : first + numel]
                if not torch.equal(weights.to(flat), flat.narrow(0, place, numel)):
                    what = f"DeepSpeed reports a wrong place for the optimizer state of {parameter.spec.name}"
                    raise BackendError(
                        what,
                        "remove options that reorder parameters from the DeepSpeed JSON",
                        "optimizer.deepspeed_config",
                    )

    def _runs(self, parameter: ShardedParameter) -> Iterator[tuple[int, Tensor, int, int]]:
        """Yield (first element, flat fp32 partition, position in the partition, number of elements) of a parameter.

        The tuple describes the parameter's elements that lie in this rank's partition. Yields at most one tuple.
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
        """Zero the gradients. The gradients of a new step follow."""
        # Only DeepSpeed's `step` resets these values, and a skipped step does not call it. DeepSpeed would add the
        # gradients of a bf16 step to the sums that are left in `averaged_gradients`.
        self._zero.micro_step_id = -1
        self._zero.averaged_gradients.clear()
        self._zero.all_grad_tensors.clear()
        if self._zero.cpu_offload:
            self._zero.reset_cpu_buffers()
        self._zero.zero_grad()
        self._sync.begin()

    def finish(self) -> None:
        """Pass the accumulated gradients to DeepSpeed, which reduces all of them at once."""
        self._sync.finish()
        end_communication(self._mesh, self.device)  # this package's communication must end before DeepSpeed's begins
        name = "grad_accum" if self._zero.use_grad_accum_attribute else "grad"
        with self._engine.coalesce_grad_reduction():
            for parameter in self._parameters:
                # a separate tensor, because DeepSpeed makes it a view of its bucket
                setattr(parameter, name, parameter.main_grad.detach())

    def squared_norm_share(self) -> Tensor:
        """Return the squared gradient norm on rank 0, and 0 on other ranks, because DeepSpeed has already summed it.

        DeepSpeed reports -1 for a norm that is not finite. Every rank then returns infinity.
        """
        norm = torch.as_tensor(self._zero.scaled_global_norm(), device=self.device).double()
        # DeepSpeed's communication must end before the sums over the world begin
        end_communication(self._mesh, self.device)
        return torch.where(norm < 0, torch.inf, (norm * self._divided_by).square() * self._is_first)

    def step(self, lr: float, grad_scale: float | Tensor) -> None:
        """Run DeepSpeed's update of the weights."""
        self.updates += 1
        for group in self._zero.optimizer.param_groups:
            group.update(lr=lr, step=self.updates, grad_scale=grad_scale * self._divided_by)
        end_communication(self._mesh, self.device)
        self._zero.step()
        end_communication(self._mesh, self.device)  # the all-gather of the weights precedes the next forward

    def wait_for_gather(self) -> None:
        """Do nothing, because no gather is running between steps."""

    def state(self) -> list[StateRectangle]:
        """Return the optimizer state in DeepSpeed's partitions, as rectangles."""
        rectangles: list[StateRectangle] = []
        for parameter in self._parameters:
            for first, flat, place, numel in self._runs(parameter):
                whole = {MASTER: flat.detach(), **self._zero.optimizer.state[flat]}
                mine = {kind: values.narrow(0, place, numel) for kind, values in whole.items()}
                rectangles += state_of_run(parameter.spec, first, first + numel, parameter.spec.counted, mine)
        return rectangles

    def weights(self) -> list[tuple[ShardSpec, Tensor]]:
        """Return the working weights with their specs."""
        return [(parameter.spec, parameter.data) for parameter in self._parameters]

    def weights_from_masters(self) -> None:
        """Copy the masters into the working weights and gather them. Collective over dp."""
        end_communication(self._mesh, self.device)
        self._zero.update_lp_params()
        end_communication(self._mesh, self.device)
