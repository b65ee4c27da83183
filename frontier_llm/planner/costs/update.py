"""Costs of an optimizer that updates complete matrices (Muon): matrix products, collectives, padding and buffers of a
step.

The costs follow from the assignment of matrices to buckets, which the runtime uses too (`topology/buckets.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from frontier_llm.blueprint.items import Product
from frontier_llm.blueprint.layout import DTYPE_BYTES, Layout, layer_kinds
from frontier_llm.blueprint.matrices import NEWTON_SCHULZ_STEPS, Matrices, Part, matrices_of
from frontier_llm.blueprint.optimizers import OptimizerRule, optimizer_rule
from frontier_llm.blueprint.parameters import Parameter, block_parameters
from frontier_llm.config import CommConfig, ModelConfig
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.collectives import collective_s, node_s
from frontier_llm.planner.costs.kernels import product_s
from frontier_llm.planner.costs.layouts import Number, cut, ranks_per_node
from frontier_llm.planner.costs.parameters import layers_by_kind
from frontier_llm.topology.buckets import plan_buckets

BUCKET_ELEMENTS = CommConfig().bucket_elements  # the default of a run file


class WholeUpdate(NamedTuple):
    """Costs of updating complete matrices on one pipeline rank: numbers, or columns over many layouts."""

    seconds: Number  # sum over buckets of the busiest replica's time; collectives included
    flops: Number
    padding: Number  # elements of buckets that belong to no tensor
    gathered: Number  # elements gathered over dp because a replica's slice of a bucket cuts tensors
    largest: Number  # elements of the largest bucket


def whole_update(
    model: ModelConfig, layouts: Layout, rates: Rates, layers: Number, routed: Number | None = None
) -> WholeUpdate:
    """Return the costs for a rank that holds `layers` layers, of which `routed` have experts (`layers_by_kind`).

    All are 0 if the optimizer gathers nothing.
    """
    rule = optimizer_rule(layouts.optimizer)
    if not rule.gathers:
        return WholeUpdate(*[0.0 * np.asarray(layers)] * len(WholeUpdate._fields))
    owners, expert_owners = (np.where(cut(layouts, 1), replicas, 1) for replicas in (layouts.replicas, layouts.edp))
    columns = np.broadcast_arrays(
        layouts.tp,
        layouts.ep,
        layouts.etp,
        owners,
        expert_owners,
        *(np.round(number) for _, number in layers_by_kind(model, layers, routed)),
    )
    cases, each = np.unique(np.stack([column.ravel() for column in columns]), axis=1, return_inverse=True)
    bytes_each = DTYPE_BYTES[layouts.dtype]
    rows = []
    for case in cases.T.astype(int).tolist():
        ranks = _Ranks(
            tp=case[0],
            ep=case[1],
            etp=case[2],
            owners=case[3],
            expert_owners=case[4],
            layers=tuple(case[5:]),
        )
        rows.append(_one(model, rule, rates, bytes_each, ranks))
    values = WholeUpdate(*(np.array(column)[each].reshape(columns[0].shape) for column in zip(*rows, strict=True)))
    place = ranks_per_node(layouts, rates)
    gather_s = collective_s(
        rates=rates,
        ranks=layouts.replicas,
        per_node=place.replicas_per_node,
        sharing=place.replicas_sharing,
        size_bytes=np.maximum(values.gathered * bytes_each, 1.0),
        operation="all_gather",
    )
    return values._replace(seconds=values.seconds + np.where(values.gathered > 0, gather_s, 0.0))


class _Ranks(NamedTuple):
    """Degrees and numbers that decide which matrices a pipeline rank holds, and how many ranks share their update."""

    tp: int
    ep: int
    etp: int
    owners: int
    expert_owners: int
    layers: tuple[int, ...]  # number of layers of each kind

    def degrees(self) -> dict[str, int]:
        return {"tp": self.tp, "ep": self.ep, "etp": self.etp}


def _one(model: ModelConfig, rule: OptimizerRule, rates: Rates, bytes_each: int, ranks: _Ranks) -> WholeUpdate:
    held: list[Parameter] = []
    for (layer, _), count in zip(layer_kinds(model), ranks.layers, strict=True):
        held += [one for one in block_parameters(model, layer) if rule.whole(one)] * count
    degrees = ranks.degrees()
    each_once = {one.name: one for one in held}
    costs = {
        name: (parameter_s(one, degrees, rates, bytes_each), update_flops(one, degrees))
        for name, one in each_once.items()
    }

    def shard_of(parameter: Parameter) -> tuple[Parameter, int]:
        return parameter, int(parameter.rank_numel(degrees))

    busiest = np.zeros(2)
    padding = gathered = largest = 0
    owners_of = {"dp": ranks.owners, "edp": ranks.expert_owners}
    for bucket in plan_buckets(
        members=held,
        of=shard_of,
        rule=rule,
        replicas=owners_of.__getitem__,
        sharded=True,
        limit=BUCKET_ELEMENTS,
    ):
        owners = owners_of[bucket.members[0].replicas]
        size = bucket.numel // owners
        work = np.zeros((2, owners))
        for parameter, offset in zip(bucket.members, bucket.offsets, strict=True):
            last = (offset + shard_of(parameter)[1] - 1) // size
            work[:, offset // size : last + 1] += np.array(costs[parameter.name])[:, None]
        busiest += work.max(axis=1)
        padding += bucket.numel - sum(shard_of(parameter)[1] for parameter in bucket.members)
        gathered += 0 if bucket.apart or owners == 1 else bucket.numel
        largest = max(largest, bucket.numel)
    return WholeUpdate(float(busiest[0]), float(busiest[1]), padding, gathered, largest)


def products(matrices: Matrices, tp: int, ep: int = 1) -> list[Product]:
    """Return the matrix products of one Newton-Schulz step on one of `tp` ranks."""
    count, short, long = matrices.on_rank(tp, ep)
    if matrices.part(tp) is Part.SHORT:
        short = matrices.short
    return [Product(short, short, long, count), Product(short, short, short, count), Product(short, long, short, count)]


def update_flops(parameter: Parameter, degrees: Mapping[str, int]) -> float:
    """Return the FLOPs of one parameter's orthogonal update on one rank."""
    tp, ep = _degrees_of(parameter, degrees)
    return NEWTON_SCHULZ_STEPS * sum(
        product.flops for one in matrices_of(parameter) for product in products(one, tp, ep)
    )


def parameter_s(parameter: Parameter, degrees: Mapping[str, int], rates: Rates, bytes_each: int) -> float:
    """Return the seconds of one parameter's orthogonal update on one rank.

    Collectives over tp (experts: etp) are included.
    """
    total = 0.0
    tp, ep = _degrees_of(parameter, degrees)
    for one in matrices_of(parameter):
        count = one.on_rank(tp, ep)[0]
        total += NEWTON_SCHULZ_STEPS * sum(product_s(product, rates) for product in products(one, tp, ep))
        if one.part(tp) is Part.LONG:
            total += NEWTON_SCHULZ_STEPS * float(node_s(rates, tp, count * one.short**2 * bytes_each, "all_reduce"))
        elif one.part(tp) is Part.SHORT:
            total += float(node_s(rates, tp, count * one.short * one.long * bytes_each, "all_gather"))
    return total


def _degrees_of(parameter: Parameter, degrees: Mapping[str, int]) -> tuple[int, int]:
    """Return (ranks that cut each matrix of the parameter, ranks over which complete matrices are distributed)."""
    sharing = degrees.get("ep", 1) if parameter.tensor_axis == "etp" else 1
    return degrees.get(parameter.tensor_axis, 1), sharing
