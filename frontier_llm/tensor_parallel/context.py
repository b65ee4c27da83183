"""What every layer is given when it is built: its tensor-parallel axis, its kernels, and where its gradients go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import Parameter

from frontier_llm.comm import Axis
from frontier_llm.ops import Ops
from frontier_llm.tensor_parallel.gradients import WeightGradients
from frontier_llm.topology import ShardSpec, split, whole


@dataclass(frozen=True)
class LayerContext:
    """Shared by all layers of a rank."""

    tp: Axis
    sequence_parallel: bool
    ops: Ops
    gradients: WeightGradients
    dtype: torch.dtype  # of working weights and activations

    def split_parameter(self, name: str, global_shape: tuple[int, ...], dim: int, init_std: float | None, decay: bool = True) -> Parameter:
        """A parameter cut along `dim` over tp."""
        return self._declare(split(name, global_shape, dim, self.tp.size, self.tp.rank, init_std, decay=decay))

    def whole_parameter(
        self, name: str, shape: tuple[int, ...], init_std: float | None = None, init_value: float = 0.0, decay: bool = False
    ) -> Parameter:
        """A parameter that every tp rank holds in full.

        Such parameters act on the sequence-parallel region, where each rank sees only its part of the sequence:
        their gradients are then partial sums over tp.
        """
        spec = whole(name, shape, init_std, init_value, decay, self.tp.size, self.tp.rank, sum_over_tp=self.sequence_parallel)
        return self._declare(spec)

    def _declare(self, spec: ShardSpec) -> Parameter:
        # on the meta device: memory comes later, as a view into the flat buffer of the rank that owns the stage
        parameter = Parameter(torch.empty(spec.shape, dtype=self.dtype, device="meta"))
        parameter.spec = spec
        return parameter
