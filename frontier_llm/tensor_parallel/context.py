"""What every layer is given when it is built: its tensor-parallel axis, its kernels, and where its gradients go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from frontier_llm.comm import Axis
from frontier_llm.ops import Ops
from frontier_llm.tensor_parallel.gradients import WeightGradients
from frontier_llm.tensor_parallel.parameter import ShardedParameter
from frontier_llm.topology import ShardSpec, split, whole


@dataclass(frozen=True)
class LayerContext:
    """Shared by all layers of a rank."""

    tp: Axis
    sequence_parallel: bool
    ops: Ops
    gradients: WeightGradients
    dtype: torch.dtype  # of working weights and activations
    tensor_chunks: int = 1  # pieces in which activations are gathered, scattered and summed beside a product

    def matrix(self, name: str, global_shape: tuple[int, ...], dim: int, init_std: float) -> ShardedParameter:
        """A weight cut along `dim` over tp, whose layer accumulates its gradient."""
        return self.declare(split(name, global_shape, dim, self.tp.size, self.tp.rank, init_std), layer_accumulates=True)

    def split_vector(self, name: str, global_shape: tuple[int, ...], dim: int) -> ShardedParameter:
        """A bias, zero at the start, cut along `dim` over tp."""
        return self.declare(split(name, global_shape, dim, self.tp.size, self.tp.rank, None))

    def whole(self, name: str, shape: tuple[int, ...], init_std: float | None = None, init_value: float = 0.0) -> ShardedParameter:
        """A parameter that every tp rank holds in full.

        Such parameters act on the sequence-parallel region, where each rank sees only its part of the sequence:
        their gradients are then partial sums over tp.
        """
        partial = self.sequence_parallel
        return self.declare(whole(name, shape, init_std, init_value, self.tp.size, self.tp.rank, sum_over_tp=partial))

    def declare(self, spec: ShardSpec, layer_accumulates: bool = False) -> ShardedParameter:
        """On the meta device: memory comes later, as a view into the flat buffer of the rank that owns the stage."""
        return ShardedParameter.create(torch.empty(spec.shape, dtype=self.dtype, device="meta"), spec, layer_accumulates)
