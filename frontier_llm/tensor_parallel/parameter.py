"""A parameter that carries its ShardSpec and its gradient accumulator."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from frontier_llm.topology import ShardSpec


class ShardedParameter(Parameter):
    """A parameter that knows what it is part of."""

    spec: ShardSpec
    main_grad: Tensor  # fp32 (fp64 under fp64) view of the flat gradient buffer; attached by optim
    layer_accumulates: bool  # its layer adds to main_grad itself; otherwise autograd's gradient is moved there
    uses: int  # contributions per microbatch: 2 for an embedding that is also the head of the same stage

    @classmethod
    def create(cls, data: Tensor, spec: ShardSpec, layer_accumulates: bool, uses: int = 1) -> ShardedParameter:
        """A parameter over `data`, which has the spec's local shape."""
        parameter = cls(data)
        parameter.spec, parameter.layer_accumulates, parameter.uses = spec, layer_accumulates, uses
        return parameter
