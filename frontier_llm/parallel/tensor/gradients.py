"""Where weight gradients go: straight into the parameter's `main_grad`, now or, in a zero-bubble schedule, later; or
through autograd.

Matrix layers submit the product that adds a microbatch's gradient to a buffer. With `WeightGradients` that buffer is
the parameter's `main_grad`, an fp32 view into the flat gradients (optim attaches it); all other parameters get theirs
from autograd through a hook. Either way `on_accumulated` is told, which is how the optimizer knows that a bucket is
complete and may be reduced while the backward pass goes on. `AutogradGradients` is for engines that take gradients
where PyTorch puts them (FSDP).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from frontier_llm.comm import DONE, Axis, Pending, start_all_gather
from frontier_llm.ops import statistics_dtype
from frontier_llm.parallel.tensor.parameter import ShardedParameter

Accumulate = Callable[[Tensor], None]  # adds one microbatch's gradient to a buffer of the parameter's shape


class Factor:
    """A factor of a weight gradient, (S, …): whole, or a rank's part of the sequence (s, …) that is gathered over
    `axis` for the product.

    What waits for its W action keeps the part. Whole, the two inputs and two output gradients of a layer would be 2.45
    times of what the layer keeps from F to I (TP8, measured), and the last of p stages under ZB-H1 has p - 1
    microbatches waiting.
    """

    def __init__(self, tensor: Tensor, axis: Axis | None = None) -> None:
        # what was saved for backward would keep its graph until W, where torch records again and gloo may not write
        # into its gathers
        self.tensor = tensor.detach()
        self._axis = axis
        self._arriving: Pending = DONE

    def start(self) -> None:
        """Begin to gather, if there is something to gather."""
        if self._axis is not None:
            self.tensor, self._arriving = start_all_gather(self.tensor, self._axis)
            self._axis = None

    def whole(self) -> Tensor:
        """All of it."""
        self.start()
        arriving = self._arriving
        self._arriving = DONE
        arriving.wait()
        return self.tensor


Work = tuple[ShardedParameter, Accumulate, tuple[Factor, ...]]


class WeightGradients:
    """One per rank, shared by all of its layers."""

    def __init__(self) -> None:
        self.on_accumulated: Callable[[ShardedParameter], None] = lambda parameter: None
        self._deferred: list[Work] | None = None

    @property
    def waits(self) -> bool:
        """True while submitted work is kept for a later W action."""
        return self._deferred is not None

    def submit(
        self,
        parameter: ShardedParameter,
        accumulate: Accumulate,
        factors: tuple[Factor, ...] = (),
    ) -> Tensor | None:
        """Add one microbatch's gradient to parameter.main_grad, or keep the work, which reads `factors`, for the W
        action.

        Returns what the layer's backward has to return for this parameter: nothing.
        """
        if self._deferred is None:
            accumulate(parameter.main_grad)
            self.on_accumulated(parameter)
        else:
            self._deferred.append((parameter, accumulate, factors))
        return None

    def defer(self) -> None:
        """From here on keep submitted work (the I action of a split backward)."""
        assert self._deferred is None, "deferral does not nest"
        self._deferred = []

    def take_deferred(self) -> list[Work]:
        """Stop deferring; the work kept since `defer()`, to be handed to `run` by the W action."""
        assert self._deferred is not None, "take_deferred without defer"
        work = self._deferred
        self._deferred = None
        return work

    def run(self, work: list[Work]) -> None:
        """Do deferred work and empty the list; while one product is computed, the factors of the next are gathered."""
        work.reverse()  # taken from the end, each lets go of its factors before the next but one is gathered
        while work:
            parameter, accumulate, factors = work.pop()
            for factor in factors:
                factor.start()
            if work:
                for factor in work[-1][2]:
                    factor.start()
            accumulate(parameter.main_grad)
            self.on_accumulated(parameter)

    def collect_from_autograd(self, parameter: ShardedParameter, accumulate: Callable[[Tensor, Tensor], None]) -> None:
        """Make autograd's gradient of a non-matrix parameter end in main_grad: `accumulate(main_grad, grad)`."""
        # torch keeps hooks where the garbage collector does not look, so a strong reference here would never let go of
        # the run
        weak_self = weakref.ref(self)

        def move(tensor: Tensor) -> None:
            owner = weak_self()
            grad = tensor.grad
            tensor.grad = None
            assert owner is not None and grad is not None and isinstance(tensor, ShardedParameter)
            owner.submit(tensor, lambda main_grad: accumulate(main_grad, grad))

        # as it was summed, in fp32: autograd would round it to the parameter's type, in one more kernel
        parameter.grad_dtype = None
        parameter.register_post_accumulate_grad_hook(move)


class AutogradGradients(WeightGradients):
    """Every gradient goes through autograd, in the parameter's type, to whoever listens there."""

    def submit(
        self,
        parameter: ShardedParameter,
        accumulate: Accumulate,
        factors: tuple[Factor, ...] = (),
    ) -> Tensor | None:
        """This microbatch's gradient, summed in fp32 (fp64 under fp64) and rounded to the parameter's type."""
        grad = torch.zeros(parameter.shape, dtype=statistics_dtype(parameter.dtype), device=parameter.device)
        accumulate(grad)
        return grad.to(parameter.dtype)
