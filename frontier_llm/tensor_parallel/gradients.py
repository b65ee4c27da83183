"""Where weight gradients go: straight into the parameter's `main_grad`, now or, in a zero-bubble schedule, later; or through autograd.

Matrix layers submit the product that adds a microbatch's gradient to a buffer. With `WeightGradients` that buffer is the parameter's
`main_grad`, an fp32 view into the flat gradients (optim attaches it); all other parameters get theirs from autograd through a hook.
Either way `on_accumulated` is told, which is how the optimizer knows that a bucket is complete and may be reduced while the backward
pass goes on. `AutogradGradients` is for engines that take gradients where PyTorch puts them (FSDP, DeepSpeed's ZeRO-2 and 3).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from frontier_llm.tensor_parallel.parameter import ShardedParameter

Accumulate = Callable[[Tensor], None]  # adds one microbatch's gradient to a buffer of the parameter's shape
Work = tuple[ShardedParameter, Accumulate]


class WeightGradients:
    """One per rank, shared by all of its layers."""

    def __init__(self) -> None:
        self.on_accumulated: Callable[[ShardedParameter], None] = lambda parameter: None
        self._deferred: list[Work] | None = None

    def submit(self, parameter: ShardedParameter, accumulate: Accumulate) -> Tensor | None:
        """Add one microbatch's gradient to parameter.main_grad, or keep the work for the W action.

        Returns what the layer's backward has to return for this parameter: nothing.
        """
        if self._deferred is None:
            accumulate(parameter.main_grad)
            self.on_accumulated(parameter)
        else:
            self._deferred.append((parameter, accumulate))
        return None

    def defer(self) -> None:
        """From here on keep submitted work (the I action of a split backward)."""
        assert self._deferred is None, "deferral does not nest"
        self._deferred = []

    def take_deferred(self) -> list[Work]:
        """Stop deferring; the work kept since `defer()`, to be handed to `run` by the W action."""
        assert self._deferred is not None, "take_deferred without defer"
        work, self._deferred = self._deferred, None
        return work

    def run(self, work: list[Work]) -> None:
        """Do deferred work."""
        for parameter, accumulate in work:
            accumulate(parameter.main_grad)
            self.on_accumulated(parameter)

    def collect_from_autograd(self, parameter: ShardedParameter, accumulate: Callable[[Tensor, Tensor], None]) -> None:
        """Make autograd's gradient of a non-matrix parameter end in main_grad: `accumulate(main_grad, grad)`."""
        # torch keeps hooks where the garbage collector does not look, so a strong reference here would never let go of the run
        weak_self = weakref.ref(self)

        def move(tensor: Tensor) -> None:
            owner, grad, tensor.grad = weak_self(), tensor.grad, None
            assert owner is not None and grad is not None and isinstance(tensor, ShardedParameter)
            owner.submit(tensor, lambda main_grad: accumulate(main_grad, grad))

        parameter.register_post_accumulate_grad_hook(move)


class AutogradGradients(WeightGradients):
    """Every gradient goes through autograd, in the parameter's type, to whoever listens there."""

    def submit(self, parameter: ShardedParameter, accumulate: Accumulate) -> Tensor | None:
        """This microbatch's gradient, summed in fp32 (fp64 under fp64) and rounded to the parameter's type."""
        wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        grad = torch.zeros(parameter.shape, dtype=wide, device=parameter.device)
        accumulate(grad)
        return grad.to(parameter.dtype)
