"""A parameter that carries its ShardSpec and its gradient accumulator."""

from __future__ import annotations

import torch
from torch import Tensor, nn
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


def materialise(module: nn.Module, device: torch.device) -> list[ShardedParameter]:
    """Give every parameter that was declared on the meta device memory of its own, uninitialised; returns them in order."""
    real: dict[ShardedParameter, ShardedParameter] = {}
    for owner in module.modules():
        for name, declared in owner._parameters.items():
            if not isinstance(declared, ShardedParameter):
                continue
            if declared not in real:
                data = torch.empty(declared.spec.shape, dtype=declared.dtype, device=device)
                real[declared] = ShardedParameter.create(data, declared.spec, declared.layer_accumulates, declared.uses)
            owner._parameters[name] = real[declared]
    return list(real.values())
