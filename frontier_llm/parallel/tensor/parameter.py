"""A parameter that carries its ShardSpec and its gradient accumulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from frontier_llm.topology.shards import ShardSpec


class ShardedParameter(Parameter):
    """This rank's part of a parameter. `spec` describes its place in the global tensor."""

    spec: ShardSpec
    main_grad: Tensor  # Fp32 (fp64 under fp64) view of the flat gradient buffer, attached by optim.
    # Function that adds the sum of fp32 rows (R, C) to the gradient, for ops that compute partial sums. If it is None,
    # autograd adds the sum.
    take_gradient_rows: Callable[[ShardedParameter, Tensor], None] | None = None
    layer_accumulates: bool  # True: the layer adds the gradient to main_grad. False: a hook adds autograd's gradient.

    @classmethod
    def create(cls, data: Tensor, spec: ShardSpec, layer_accumulates: bool = False) -> ShardedParameter:
        """Return a parameter over `data`, which has the spec's local shape."""
        parameter = cls(data)
        parameter.spec = spec
        parameter.layer_accumulates = layer_accumulates
        return parameter

    def accumulated_by_layer(self) -> ShardedParameter:
        """Mark that the calling layer submits this parameter's gradients to `WeightGradients`. Returns self."""
        self.layer_accumulates = True
        return self


Declared = Mapping[str, ShardedParameter]  # names in the blueprint → parameters that this rank has declared


def materialise(module: nn.Module, device: torch.device) -> list[ShardedParameter]:
    """Replace every parameter on the meta device by a parameter with uninitialised memory on `device`.

    Returns the new parameters in the order of the modules. A parameter that several modules share is replaced once.
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
