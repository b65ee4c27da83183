"""ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054): optimizer states are sharded over data-parallel ranks.

Each rank receives the gradient sum of its slice of each bucket, and updates this slice of the weights. The updated
slices are then all-gathered. Buckets are updated in the order in which the next forward needs them. The all-gather of a
bucket starts as soon as its update is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from frontier_llm.blueprint.optimizers import MASTER, optimizer_rule
from frontier_llm.comm import Mesh, serial_mesh
from frontier_llm.config import OptimizerConfig
from frontier_llm.ops import Ops
from frontier_llm.optim.buckets import Bucket
from frontier_llm.optim.matrices import Statistics, WholeTensors
from frontier_llm.optim.registry import Slice, slice_update
from frontier_llm.optim.state import StateRectangle, state_of_bucket
from frontier_llm.topology.shards import ShardSpec


class Zero:
    """Implements `Optimizer` with ZeRO-1: holds the optimizer state of this rank's slices and updates them.

    With fp32 or fp64 weights the master copy shares its memory with the slice of the weights.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        config: OptimizerConfig,
        ops: Ops,
        overlap_gather: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        """Create the masters as copies of the weights, which must be initialised.

        With `overlap_gather`, `step` returns while weights are still being gathered (optim.buckets). `mesh` is needed
        if tensor parallelism splits tensors. None means that no tensor is split.
        """
        self.buckets = buckets
        self.rule = optimizer_rule(config.name)
        self.updates = 0
        self._formula = slice_update(config, ops)
        self._ops = ops
        self._overlap_gather = overlap_gather
        self.states = [_new_state(bucket) for bucket in buckets]
        mesh = mesh or serial_mesh()
        self._tensors = {
            bucket: WholeTensors(bucket, mesh.axis(bucket.parameters[0].spec.parameter.tensor_axis))
            for bucket in buckets
            if bucket.whole and self.rule.gathers
        }
        self._statistics = {
            bucket: Statistics(bucket, self.rule, mesh)
            for bucket in buckets
            if self.rule.statistics(bucket.parameters[0].spec.parameter)
        }
        self._norm_spans = [_norm_spans(bucket) for bucket in buckets]

    def squared_norm_share(self) -> Tensor:
        """Return this rank's summand of the squared gradient norm (see the protocol `Optimizer`).

        Each element of the model counts once: each dp rank counts one part of a bucket, and only one of several copies
        of a part counts. The other copies are multiplied by zero. They add nothing, but a NaN in any copy still reaches
        the sum.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for bucket, spans in zip(self.buckets, self._norm_spans, strict=True):
            share, _ = bucket.norm_share(bucket.gradients)
            for start, stop, counted in spans:
                total += self._ops.sum_of_squares(share[start:stop]) * counted
        return total

    def step(self, lr: float, grad_scale: float | Tensor) -> None:
        """Update this rank's slices and start to gather the weights."""
        self.updates += 1
        for bucket, state in sorted(zip(self.buckets, self.states, strict=True), key=lambda pair: pair[0].first_use):
            for part in _slices(bucket, state, self._tensors.get(bucket), self._statistics.get(bucket)):
                self._formula.update(part, lr, self.updates, grad_scale)
            bucket.start_gather()
        if not self._overlap_gather:
            self.wait_for_gather()

    def wait_for_gather(self) -> None:
        """Wait for the running gathers of all buckets."""
        for bucket in self.buckets:
            bucket.wait_for_gather()

    @property
    def shards(self) -> int:
        """Number of consecutive replicas that shard the optimizer state."""
        return max(bucket.owner.size for bucket in self.buckets)

    @property
    def device(self) -> torch.device:
        """Device of the optimizer state."""
        return self.buckets[0].gradients.device

    def state(self) -> list[StateRectangle]:
        """Return this rank's optimizer state. A rank saves one of dp equal parts of a bucket, with or without ZeRO."""
        parts: list[StateRectangle] = []
        for bucket, state in zip(self.buckets, self.states, strict=True):
            parts.extend(state_of_bucket(bucket, state))
        for statistics in self._statistics.values():
            parts.extend(statistics.state())
        return parts

    def weights(self) -> list[tuple[ShardSpec, Tensor]]:
        """Return the working weights with their specs."""
        return [(parameter.spec, parameter.data) for bucket in self.buckets for parameter in bucket.parameters]

    def weights_from_masters(self) -> None:
        """Copy the masters into the working weights and gather them. Collective over dp."""
        for bucket, state in zip(self.buckets, self.states, strict=True):
            own = bucket.own(bucket.weights)
            if own.data_ptr() != state[MASTER].data_ptr():
                own.copy_(state[MASTER])
            bucket.start_gather()
        self.wait_for_gather()


def _new_state(bucket: Bucket) -> dict[str, Tensor]:
    """Return this rank's slice of a bucket's optimizer state, by kind."""
    own = bucket.own(bucket.weights)
    master = own if own.dtype == bucket.gradients.dtype else own.to(bucket.gradients.dtype)
    return {kind: master if kind == MASTER else torch.zeros_like(master) for kind in bucket.kinds}


def _slices(
    bucket: Bucket, state: dict[str, Tensor], whole: WholeTensors | None, statistics: Statistics | None
) -> Iterator[Slice]:
    """Yield the elements that one call of the update formula changes: this rank's slice of the bucket, or each complete
    parameter in the slice.
    """
    tensors = {**state, "gradient": bucket.own(bucket.gradients), "weights": bucket.own(bucket.weights)}
    if bucket.whole and not whole:
        parts = [
            {
                name: flat[run.position : run.position + run.spec.numel].view(run.spec.shape)
                for name, flat in tensors.items()
            }
            for run in bucket.owned_ranges()
        ]
    else:
        parts = [tensors]
    for part in parts:
        states = {kind: part[kind] for kind in bucket.kinds if kind != MASTER}
        yield Slice(part[MASTER], part["gradient"], states, part["weights"], bucket.decay, whole, statistics)


def _norm_spans(bucket: Bucket) -> list[tuple[int, int, int]]:
    """Return the spans (start, stop, counted) of the elements for which this rank computes the squared norm.

    Adjacent spans with the same `counted` are merged. `counted` is 0 for a copy that another rank counts, otherwise 1.
    """
    share, offset = bucket.norm_share(bucket.gradients)
    spans: list[tuple[int, int, int]] = []
    for piece in bucket.ranges(offset, offset + share.numel()):
        start = piece.position
        stop = piece.position + piece.stop - piece.start
        counted = int(piece.spec.counted)
        if spans and spans[-1][1:] == (start, counted):
            start = spans.pop()[0]
        spans.append((start, stop, counted))
    return spans
