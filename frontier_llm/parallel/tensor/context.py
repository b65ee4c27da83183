"""What every layer is given when it is built: the axes along which layers communicate, its kernels, and where its
gradients go.
"""

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
    """Shared by all layers of a rank."""

    tp: Axis
    sequence_parallel: bool  # only where there are several tp ranks
    ops: Ops
    gradients: WeightGradients
    dtype: torch.dtype  # of working weights and activations
    tensor_chunks: int = 1  # pieces in which activations are gathered, scattered and summed beside a product
    cp: Axis = field(default_factory=partial(single, "cp"))
    ep: Axis = field(default_factory=partial(single, "ep"))  # ranks that share out the experts
    etp: int = 1  # of them, neighbours that split each expert's width
    context_attention: str = "gather"  # of blueprint.context.WAYS, where there are several cp ranks
    seed: int = 0  # of dropout's masks

    def declare(self, parameter: Parameter, tied_rank: int = 0) -> ShardedParameter:
        """This rank's part, on the meta device: memory comes later, as a view into the flat buffer of the rank that
        owns the stage.

        `tied_rank`: this rank's coordinate on the axis "tied", where the parameter is tied.
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
