"""What an optimizer that works on whole matrices adds to a step: products, collectives, padding and buffers, by the very plan of the buckets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from frontier_llm.blueprint import Parameter, block_parameters
from frontier_llm.blueprint.layout import DTYPE_BYTES, Layout
from frontier_llm.blueprint.matrices import Matrices, Part, matrices_of
from frontier_llm.blueprint.optimizers import OptimizerRule, optimizer_rule
from frontier_llm.blueprint.work import Product
from frontier_llm.config import ModelConfig, MuonConfig
from frontier_llm.costs.collectives import node_s
from frontier_llm.costs.hierarchical import collective_s
from frontier_llm.costs.kernels import product_s
from frontier_llm.costs.layouts import Layouts, Number
from frontier_llm.costs.seats import cut, seats
from frontier_llm.machine.rates import Rates
from frontier_llm.topology import plan_buckets

MUON = MuonConfig()
BUCKET_ELEMENTS = 40_000_000  # comm.bucket_elements of a run file that names none


class WholeUpdate(NamedTuple):
    """Of one pipeline rank; numbers, or columns over many layouts."""

    seconds: Number  # of the owner with most to do, its collectives included
    flops: Number
    padding: Number  # elements that slices are longer than their tensors
    gathered: Number  # elements that are gathered over dp because slices cut tensors
    largest: Number  # elements of the largest bucket of these


def whole_update(model: ModelConfig, layouts: Layout | Layouts, rates: Rates, layers: Number) -> WholeUpdate:
    """Of a rank that holds `layers` layers; all zero for an optimizer that gathers nothing."""
    rule = optimizer_rule(layouts.optimizer)
    owners = np.where(cut(layouts, 1), layouts.replicas, 1)
    columns = np.broadcast_arrays(layouts.tp, owners, np.asarray(layers))
    if not rule.gathers:
        return WholeUpdate(*[0.0 * columns[0]] * len(WholeUpdate._fields))
    cases, each = np.unique(np.stack([column.ravel() for column in columns]), axis=1, return_inverse=True)
    bytes_each = DTYPE_BYTES[layouts.dtype]
    rows = [_one(model, rule, rates, bytes_each, *map(int, case)) for case in cases.T]
    values = WholeUpdate(*(np.array(column)[each].reshape(columns[0].shape) for column in zip(*rows, strict=True)))
    place = seats(layouts, rates)
    gather_s = collective_s(
        rates,
        layouts.replicas,
        place.replicas_per_node,
        place.replicas_sharing,
        np.maximum(values.gathered * bytes_each, 1.0),
        "all_gather",
    )
    return values._replace(seconds=values.seconds + np.where(values.gathered > 0, gather_s, 0.0))


def _one(model: ModelConfig, rule: OptimizerRule, rates: Rates, bytes_each: int, tp: int, owners: int, layers: int) -> WholeUpdate:
    block = [one for one in block_parameters(model, 0) if rule.whole(one)]
    seconds = {one.name: parameter_s(one, tp, rates, bytes_each) for one in block}
    flops = {one.name: update_flops(one, tp) for one in block}

    def shard_of(parameter: Parameter) -> tuple[Parameter, int]:
        return parameter, int(parameter.rank_numel({"tp": tp}))

    busiest_s = busiest_flops = 0.0
    padding = gathered = largest = 0
    for bucket in plan_buckets(block * layers, shard_of, rule, owners, owners, BUCKET_ELEMENTS):
        size = bucket.numel // owners
        work = np.zeros((2, owners))
        for parameter, offset in zip(bucket.members, bucket.offsets, strict=True):
            last = (offset + shard_of(parameter)[1] - 1) // size
            work[:, offset // size : last + 1] += [[seconds[parameter.name]], [flops[parameter.name]]]
        busiest_s, busiest_flops = busiest_s + work[0].max(), busiest_flops + work[1].max()
        padding += bucket.numel - sum(shard_of(parameter)[1] for parameter in bucket.members)
        gathered += 0 if bucket.apart or owners == 1 else bucket.numel
        largest = max(largest, bucket.numel)
    return WholeUpdate(busiest_s, busiest_flops, padding, gathered, largest)


def products(matrices: Matrices, tp: int) -> list[Product]:
    """Of one Newton-Schulz step on one of `tp` ranks."""
    part, (count, short, long) = matrices.part(tp), matrices.on_rank(tp)
    if part is Part.SHORT:
        short = matrices.short
    return [Product(short, short, long, count), Product(short, short, short, count), Product(short, long, short, count)]


def update_flops(parameter: Parameter, tp: int) -> float:
    """Of one parameter's orthogonal update on one of `tp` ranks."""
    return MUON.steps * sum(product.flops for one in matrices_of(parameter) for product in products(one, tp))


def parameter_s(parameter: Parameter, tp: int, rates: Rates, bytes_each: int) -> float:
    """Seconds of the same, with what it sends over tp."""
    total = 0.0
    for one in matrices_of(parameter):
        total += MUON.steps * sum(product_s(product, rates) for product in products(one, tp))
        if one.part(tp) is Part.LONG:
            total += MUON.steps * float(node_s(rates, tp, one.count * one.short**2 * bytes_each, "all_reduce"))
        elif one.part(tp) is Part.SHORT:
            total += float(node_s(rates, tp, one.count * one.short * one.long * bytes_each, "all_gather"))
    return total
