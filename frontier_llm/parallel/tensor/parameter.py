"""A parameter that carries its ShardSpec and its gradient accumulator."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from frontier_llm.topology.shards import ShardSpec


class ShardedParameter(Parameter):
    """A parameter that knows what it is part of."""

    spec: ShardSpec
    main_grad: Tensor  # fp32 (fp64 under fp64) view of the flat gradient buffer; attached by optim
    layer_accumulates: bool  # its layer adds to main_grad itself; otherwise autograd's gradient is moved there

    @classmethod
    def create(cls, data: Tensor, spec: ShardSpec, layer_accumulates: bool = False) -> ShardedParameter:
        """A parameter over `data`, which has the spec's local shape."""
        parameter = cls(data)
        parameter.spec = spec
        parameter.layer_accumulates = layer_accumulates
        return parameter

    def accumulated_by_layer(self) -> ShardedParameter:
        """Itself, for the layer that promises to submit its gradients (see WeightGradients)."""
        self.layer_accumulates = True
        return self


Declared = Mapping[str, ShardedParameter]  # what a rank has declared, by the names that the blueprint gives


def materialise(module: nn.Module, device: torch.device) -> list[ShardedParameter]:
    """Give every parameter that was declared on the meta device memory of its own, uninitialised; returns them in
    order.
    """
    real: dict[ShardedParameter, ShardedParameter] = {}
    for owner in module.modules():
        for name, declared in owner._parameters.items():
            if not isinstance(declared, ShardedParameter):
                continue
            if declared not in real:
                data = torch.empty(declared.spec.shape, dtype=declared.dtype, device=device)
                real[declared] = ShardedParameter.create(data, declared.spec, declared.layer_accumulates)
            owner._parameters[name] = real[declared]
    return list(real.values())
