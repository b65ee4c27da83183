"""Gradient synchronisation: sums each bucket over its axes. The sums start while backward is still running.

Gradients are summed and not averaged, because the loss is already divided by the step's global number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from frontier_llm.comm import (
    Mesh,
    Pending,
    start_all_reduce_,
    start_narrow_sum_,
    start_reduce_scatter_into,
)
from frontier_llm.optim.buckets import Bucket
from frontier_llm.parallel.tensor import ShardedParameter


class GradientSync:
    """Sums each bucket over the axes on which its gradients are partial, and over dp.

    Gradients are partial on tp (norms with sequence parallelism) and on "tied" (a tied embedding). If a bucket needs
    only the dp sum, this sum starts when the last contribution of the step has been added. A parameter gets `uses`
    contributions per microbatch. The number of contributions is therefore known in advance, for every schedule.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        mesh: Mesh,
        microbatches: int,
        overlap: bool = True,
        wire: torch.dtype | None = None,
    ) -> None:
        """`wire` is the dtype in which gradients are sent over dp. None sends them in their own dtype."""
        self._buckets = buckets
        self._mesh = mesh
        self._overlap = overlap
        self._wire = wire
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self.microbatches = microbatches  # microbatches of the next step
        self._uses = {
            bucket: sum(parameter.spec.parameter.uses for parameter in bucket.parameters) for bucket in buckets
        }
        self._missing: dict[Bucket, int] = {}
        self._pending: list[Pending] = []

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradient sums, by parameter name."""
        return {parameter.spec.name: parameter.main_grad for parameter in self._bucket_of}

    def begin(self, reduce: bool = True) -> None:
        """Zero the gradients. The contributions of a new step follow.

        Without `reduce`, the gradients are not summed over ranks, and `finish` must not be called.
        """
        for bucket in self._buckets:
            bucket.gradients.zero_()
        # a count that starts at 0 becomes negative and never starts a sum
        expected = self.microbatches if reduce else 0
        self._missing = {bucket: expected * uses for bucket, uses in self._uses.items()}
        self._pending = []

    def accumulated(self, parameter: ShardedParameter) -> None:
        """Record that one contribution has been added to parameter.main_grad."""
        bucket = self._bucket_of[parameter]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0 and self._overlap and not bucket.partial_axes:
            self._pending.append(self._start_sum(bucket))

    def finish(self) -> None:
        """Start the remaining sums and wait for all of them.

        Afterwards each rank's own slice holds the full gradient of the step.
        """
        incomplete = [bucket.parameters[0].spec.name for bucket in self._buckets if self._missing[bucket]]
        assert not incomplete, f"gradient contributions are missing in the buckets that start with {incomplete}"
        # Also start the sums of buckets without contributions, for which `accumulated` is never called.
        late = [
            bucket for bucket in self._buckets if bucket.partial_axes or not self._overlap or not self._uses[bucket]
        ]
        for depth in range(max((len(bucket.partial_axes) for bucket in late), default=0)):
            partial = [bucket for bucket in late if len(bucket.partial_axes) > depth]
            for pending in [
                start_all_reduce_(bucket.gradients, self._mesh.axis(bucket.partial_axes[depth])) for bucket in partial
            ]:
                pending.wait()
        self._pending += [self._start_sum(bucket) for bucket in late]
        for pending in self._pending:
            pending.wait()

    def _start_sum(self, bucket: Bucket) -> Pending:
        """Start the sum over dp. With ZeRO-1 a rank receives only the slice that it will update."""
        if self._wire is not None:
            return start_narrow_sum_(bucket.gradients, bucket.dp, self._wire, everywhere=bucket.owner.size == 1)
        if bucket.owner.size == 1:
            return start_all_reduce_(bucket.gradients, bucket.dp)
        return start_reduce_scatter_into(bucket.own(bucket.gradients), bucket.gradients, bucket.owner)
