"""Context that every layer receives when it is built: axes of communication, kernels, and gradient accumulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from frontier_llm.blueprint.parameters import Parameter
from frontier_llm.comm import Axis, single
from frontier_llm.ops import Ops, statistics_dtype
from frontier_llm.parallel.tensor.gradients import WeightGradients
from frontier_llm.parallel.tensor.parameter import ShardedParameter
from frontier_llm.topology.shards import shard


@dataclass(frozen=True)
class LayerContext:
    """Settings and services that all layers of a rank share."""

    tp: Axis
    sequence_parallel: bool  # Can be True only with several tp ranks.
    ops: Ops
    gradients: WeightGradients
    dtype: torch.dtype  # Type of working weights and activations.
    tensor_chunks: int = 1  # Number of chunks of a tp collective that overlaps with its matrix product.
    cp: Axis = field(default_factory=partial(single, "cp"))
    ep: Axis = field(default_factory=partial(single, "ep"))  # Ranks that together hold one copy of all experts.
    etp: int = 1  # Number of consecutive ep ranks that split the width of each expert.
    context_attention: str = "gather"  # One of `blueprint.layout.WAYS`. Used with several cp ranks.
    seed: int = 0  # Seed of dropout's masks.

    def declare(self, parameter: Parameter, tied_rank: int = 0) -> ShardedParameter:
        """Return this rank's part of a parameter, on the meta device.

        The parameter gets memory later, normally as a view of a flat buffer. For a tied parameter, `tied_rank` is this
        rank's coordinate on the axis "tied".
        """
        if "ep" in parameter.axes:
            degrees = {"ep": self.ep.size // self.etp, "etp": self.etp}
            coordinates = {}
            coordinates["ep"], coordinates["etp"] = divmod(self.ep.rank, self.etp)
        else:
            degrees = {"tp": self.tp.size}
            coordinates = {"tp": self.tp.rank} | ({"tied": tied_rank} if "tied" in parameter.axes else {})
        spec = shard(parameter, degrees, coordinates)
        dtype = statistics_dtype(self.dtype) if parameter.wide else self.dtype
        return ShardedParameter.create(torch.empty(spec.shape, dtype=dtype, device="meta"), spec)
