"""What every engine starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from frontier_llm.blueprint.optimizers import MASTER, OptimizerRule, optimizer_rule
from frontier_llm.comm import Mesh
from frontier_llm.config import RunConfig
from frontier_llm.model import Stage, initial_rows, initialize
from frontier_llm.ops import Ops
from frontier_llm.optim.buckets import Bucket
from frontier_llm.optim.state import Optimizer
from frontier_llm.parallel.tensor import ShardedParameter, WeightGradients
from frontier_llm.topology.plan import ParallelPlan


@dataclass(frozen=True)
class EngineInputs:
    """Stages on the meta device, and where and how they will live."""

    config: RunConfig
    plan: ParallelPlan
    mesh: Mesh
    device: torch.device
    ops: Ops
    gradients: WeightGradients
    stages: Sequence[Stage]
    draws: bool = True  # False: what a checkpoint is about to replace is not drawn (see `draw_masters`)

    @property
    def rule(self) -> OptimizerRule:
        """What the run's optimizer keeps."""
        return optimizer_rule(self.config.optimizer.name)

    def fill(self, buckets: Sequence[Bucket]) -> list[ShardedParameter]:
        """Initial weights into the buckets, and autograd's gradients on their way there; returns the parameters."""
        parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        if self.draws:
            initialize(parameters, self.config.train.seed)
        for parameter in parameters:
            if not parameter.layer_accumulates:
                self.gradients.collect_from_autograd(parameter, self.ops.accumulate_)
        return parameters


def draw_masters(optimizer: Optimizer, seed: int, working: torch.dtype) -> None:
    """Initial weights after all, where no checkpoint could be read: the same that `fill` would have given.
    Collective over dp.
    """
    for part in optimizer.state():
        if MASTER not in part.tensors:
            continue  # a statistic, which begins with zero
        master = part.tensors[MASTER]
        rounded = torch.empty(master.shape, dtype=working, device=master.device)
        initial_rows(replace(part.spec, offset=part.rectangle.offset, shape=part.rectangle.shape), seed, rounded)
        master.copy_(rounded)
    optimizer.weights_from_masters()
