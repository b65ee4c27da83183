"""Accumulation of weight gradients, in the parameter's `main_grad` or through autograd.

A layer with a matrix submits a function that adds a microbatch's weight gradient to a buffer. With `WeightGradients`
this buffer is the parameter's `main_grad`: a view of the flat gradients in fp32, which the package `optim` attaches. In
zero-bubble schedules this function runs later, in the W action. The gradients of other parameters come from autograd
through a hook. In both cases `on_accumulated` is called. The callback starts the reduction of a complete bucket during
the backward pass. `AutogradGradients` is for engines that read gradients from PyTorch's autograd (FSDP).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from frontier_llm.comm import DONE, Axis, Pending, start_all_gather
from frontier_llm.ops import Ops, statistics_dtype
from frontier_llm.parallel.tensor.parameter import ShardedParameter

Accumulate = Callable[[Tensor], None]  # adds one microbatch's gradient to a buffer of the parameter's shape


class Factor:
    """One of the two factors of a weight gradient (input activation and output gradient), (S, …).

    With `axis` the tensor is this rank's part of the sequence, (s, …), and is gathered for the product. Until the W
    action only this part is kept. The gathered inputs and output gradients of a layer would need 2.45 times the memory
    that the layer keeps from F to I (TP8, docs/benchmarks/log.md). With the schedule ZB-H1, p - 1 microbatches wait for
    their W action on the last of p stages.
    """

    def __init__(self, tensor: Tensor, axis: Axis | None = None) -> None:
        # Without `detach`, the tensor would keep its autograd graph until the W action. In the W action autograd
        # records operations again, and gloo must not write into a tensor that autograd records.
        self.tensor = tensor.detach()
        self._axis = axis
        self._arriving: Pending = DONE

    def start(self) -> None:
        """Start the all-gather, unless the tensor is complete or its all-gather is running."""
        if self._axis is not None:
            self.tensor, self._arriving = start_all_gather(self.tensor, self._axis)
            self._axis = None

    def whole(self) -> Tensor:
        """Return the complete factor, (S, …). Waits for the all-gather."""
        self.start()
        arriving = self._arriving
        self._arriving = DONE
        arriving.wait()
        return self.tensor


Work = tuple[ShardedParameter, Accumulate, tuple[Factor, ...]]


class WeightGradients:
    """Adds weight gradients to `main_grad`, at once or in a later W action. All layers of a rank share one object."""

    def __init__(self) -> None:
        self.on_accumulated: Callable[[ShardedParameter], None] = lambda parameter: None
        self._deferred: list[Work] | None = None

    @property
    def waits(self) -> bool:
        """True if submitted work is kept for a later W action."""
        return self._deferred is not None

    def submit(
        self,
        parameter: ShardedParameter,
        accumulate: Accumulate,
        factors: tuple[Factor, ...] = (),
    ) -> Tensor | None:
        """Add one microbatch's gradient to parameter.main_grad, or store the work for the W action.

        `accumulate` reads `factors`. Returns the gradient that the layer's backward returns to autograd, here None.
        """
        if self._deferred is None:
            accumulate(parameter.main_grad)
            self.on_accumulated(parameter)
        else:
            self._deferred.append((parameter, accumulate, factors))
        return None

    def defer(self) -> None:
        """From now on, store submitted work for a later W action (called in the I action of a split backward)."""
        assert self._deferred is None, "defer() was called inside another defer()"
        self._deferred = []

    def take_deferred(self) -> list[Work]:
        """Stop deferring, and return the work kept since `defer()`. The W action passes it to `run`."""
        assert self._deferred is not None, "take_deferred() was called outside of defer()"
        work = self._deferred
        self._deferred = None
        return work

    def run(self, work: list[Work]) -> None:
        """Execute deferred work and empty the list. During each matrix product, the factors of the next product are
        gathered.
        """
        work.reverse()  # pop() frees the factors of a finished product, so that at most two products' factors exist
        while work:
            parameter, accumulate, factors = work.pop()
            for factor in factors:
                factor.start()
            if work:
                _, _, next_factors = work[-1]
                for factor in next_factors:
                    factor.start()
            accumulate(parameter.main_grad)
            self.on_accumulated(parameter)

    def collect_from_autograd(self, parameter: ShardedParameter, ops: Ops) -> None:
        """Add the gradient of a non-matrix parameter to main_grad.

        The gradient comes from autograd, or from an op that computes partial sums (`take_gradient_rows`).
        """
        # Python's garbage collector does not see references from torch's hooks. A strong reference to self would keep
        # all objects of the run alive.
        weak_self = weakref.ref(self)

        def move(tensor: ShardedParameter) -> None:
            grad = tensor.grad
            if grad is None:
                return  # the op has passed the gradient's rows to `take_rows`, so autograd has no gradient here
            tensor.grad = None
            owner = weak_self()
            assert owner
            owner.submit(tensor, lambda main_grad: ops.accumulate_(main_grad, grad))

        def take_rows(parameter: ShardedParameter, rows_RC: Tensor) -> None:
            owner = weak_self()
            assert owner
            # Until the W action only the sum over rows is kept, because the R rows need R times the memory of the sum.
            if owner.waits:
                rows_RC = rows_RC.sum(0, keepdim=True)
            owner.submit(parameter, lambda main_grad: ops.accumulate_rows_(main_grad, rows_RC))

        # Let autograd pass the gradient in the dtype of its sum (fp32). Otherwise one more kernel would round it to the
        # parameter's dtype.
        parameter.grad_dtype = None
        parameter.register_post_accumulate_grad_hook(move)
        parameter.take_gradient_rows = take_rows


class AutogradGradients(WeightGradients):
    """Returns every gradient to autograd, in the parameter's type."""

    def submit(
        self,
        parameter: ShardedParameter,
        accumulate: Accumulate,
        factors: tuple[Factor, ...] = (),
    ) -> Tensor | None:
        """Return this microbatch's gradient, summed in fp32 (fp64 under fp64) and rounded to the parameter's type."""
        grad = torch.zeros(parameter.shape, dtype=statistics_dtype(parameter.dtype), device=parameter.device)
        accumulate(grad)
        return grad.to(parameter.dtype)
