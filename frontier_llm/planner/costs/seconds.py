"""Seconds of a block, the embedding and the head for one microbatch on one rank, from their work lists.

`by_cause` sums the seconds of a work list by cause, which `plan --explain` prints. `times` returns the seconds of all
parts, for one layout or as columns for thousands of layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np

from frontier_llm.blueprint.expert_work import DISPATCH
from frontier_llm.blueprint.items import (
    ADDING,
    SENDING,
    SHARDS,
    Collective,
    FlashCore,
    HostWait,
    Item,
    Keep,
    Phase,
    Product,
    Under,
    Work,
)
from frontier_llm.blueprint.layout import DTYPE_BYTES, Layout, fullest_stage, layer_kinds, mode_shares, shares
from frontier_llm.blueprint.parameters import StageSpec
from frontier_llm.blueprint.work import block_work, embedding_work, head_work
from frontier_llm.config import ModelConfig
from frontier_llm.machine.rates import Rates, fabric_bandwidth
from frontier_llm.planner.costs.collectives import collective_s, message_s, node_s
from frontier_llm.planner.costs.kernels import flash_s, memory_s, pace, product_s
from frontier_llm.planner.costs.layouts import Number, by_schedule, over_layouts, stage_length
from frontier_llm.schedule import split_share
from frontier_llm.topology.expert_nodes import experts_inside, experts_s

# Operations that the host dispatches per layer in eager PyTorch (kernels, views, autograd nodes, collectives). Backward
# has two products and an accumulation per weight, and recomputation adds operations.
FORWARD_OPS = 24
BACKWARD_OPS = 40
RECOMPUTED_OPS = {"none": 0, "selective": 6, "full": FORWARD_OPS}
WAITING = "waiting for tp ranks"
RECOMPUTED = "recompute"
LAUNCHES = "launch-bound"

# cache: (work, devices, tp, cp, ep, expert ranks per node, tensor_chunks) → seconds; most layouts share their work
Prices = dict[tuple[Work, int, int, int, int, int, int], float]


def work_s(work: Work, layout: Layout, rates: Rates, prices: Prices) -> float:
    """Return the exposed seconds of one item's work: its duration without the part that overlaps other work."""
    key = (
        work,
        layout.devices,
        layout.tp,
        layout.cp,
        layout.ep,
        int(experts_inside(layout, rates)) if isinstance(work, Collective) else 1,
        layout.tensor_chunks,
    )
    if key not in prices:
        if isinstance(work, Product):
            prices[key] = product_s(work, rates) * pace(layout.devices, rates)
        elif isinstance(work, FlashCore):
            prices[key] = flash_s(work, rates) * pace(layout.devices, rates)
        elif isinstance(work, Collective):
            by_axis = {"tp": tensor_s, "cp": context_s, "ep": experts_s}
            prices[key] = by_axis[work.axis.split(".")[0]](work, layout, rates)
        elif isinstance(work, HostWait):
            prices[key] = 0.0 if rates.host_executes else work.launches * rates.launch_s
        else:
            prices[key] = 0.0 if isinstance(work, Keep) else memory_s(work.moved_bytes, work.kernels, rates)
    return prices[key]


def tensor_s(collective: Collective, layout: Layout, rates: Rates) -> float:
    """Return the exposed seconds of a collective over tp."""
    if layout.tensor_chunks > 1 and collective.beside:
        return in_pieces_s(collective, collective.beside, layout, rates)
    beside_other = 1.0 if rates.host_executes else 0.5  # CPU cores both send and compute, so nothing is hidden
    shown = {
        Under.NOTHING: 1.0,
        Under.PRODUCT: 1 - rates.tp_overlap,
        Under.GRADIENT: (1 - rates.tp_overlap) * beside_other,
        Under.HEAD: 0.0,
        Under.ATTENTION: 1 - rates.dp_overlap,
    }[collective.under]
    return shown * alone_s(collective, layout.tp, rates)


def alone_s(collective: Collective, tp: int, rates: Rates) -> float:
    """Return the seconds of a collective over tp without any overlap.

    If the group spans nodes, a gather or a scatter takes half as long as an all-reduce.
    """
    if tp <= rates.node_devices:
        return float(node_s(rates, tp, collective.size_bytes, collective.operation))
    whole_s = collective_s(
        rates=rates,
        ranks=tp,
        per_node=rates.node_devices,
        sharing=1,
        size_bytes=collective.size_bytes,
        operation="all_reduce",
    )
    return float(whole_s) * (1.0 if collective.operation == "all_reduce" else 0.5)


def in_pieces_s(collective: Collective, product: Product, layout: Layout, rates: Rates) -> float:
    """Return the seconds that a collective adds to its matrix product if both are split into pieces
    (parallel/tensor/linear.py).

    Each piece of the collective overlaps the next piece of the product, or the reverse. But n small products and n
    small collectives take longer than one large product and one large collective. A piece has a product time and a
    collective time. The fraction `chunk_overlap` of the shorter time is hidden n - 1 times. In addition, the rows are
    copied into their final order. For a reduce-scatter this happens before the product.
    """
    pieces = layout.tensor_chunks
    product_part_s = product_s(replace(product, m=product.m // pieces), rates)
    sent_part_s = alone_s(replace(collective, size_bytes=collective.size_bytes // pieces), layout.tp, rates)
    hidden_s = rates.chunk_overlap * (pieces - 1) * min(product_part_s, sent_part_s)
    moved = product.m * (product.k if collective.operation == "reduce_scatter" else product.n)
    copy_s = memory_s(2 * DTYPE_BYTES[layout.dtype] * moved, pieces, rates)
    return pieces * (product_part_s + sent_part_s) - hidden_s + copy_s - product_s(product, rates)


def context_s(collective: Collective, layout: Layout, rates: Rates) -> float:
    """Return the exposed seconds of a collective over cp.

    Every tp-th rank belongs to the same group. If a group spans nodes, the groups of a node share its NICs. The share
    `dp_overlap` of communication that overlaps attention is hidden.
    """
    node = rates.node_devices
    tp = layout.tp
    cp = layout.cp
    inside = min(cp, max(node // tp, 1))
    beside = 0.0 if rates.host_executes or collective.under is Under.NOTHING else rates.dp_overlap
    sharing = node // inside  # number of groups of a node that share its NICs
    if collective.operation == "exchange":
        near = cp <= inside
        return (
            (1 - beside)
            * collective.calls
            * float(message_s(rates, collective.size_bytes, near, 1 if near else sharing))
        )
    if cp <= inside:  # a ring through every tp-th device cannot be faster than a ring through all devices
        reach = float(fabric_bandwidth(rates, cp)) / float(fabric_bandwidth(rates, min(tp * cp, node)))
        return (1 - beside) * float(node_s(rates, cp, collective.size_bytes, collective.operation)) * max(reach, 1.0)
    return (1 - beside) * float(
        collective_s(
            rates=rates,
            ranks=cp,
            per_node=inside,
            sharing=sharing,
            size_bytes=collective.size_bytes,
            operation=collective.operation,
        )
    )


def by_cause(
    items: Iterable[Item],
    layout: Layout,
    rates: Rates,
    prices: Prices | None = None,
    modes: Mapping[str, float] | None = None,
    split: float = 0.0,
) -> dict[str, tuple[float, float]]:
    """Return cause → (forward, backward) seconds. The forward that is repeated in backward has the cause RECOMPUTED.

    Collectives of sharded weights (SHARDS) are not included.

    Args:
        items: the work list.
        layout: the layout.
        rates: rates of the machine.
        prices: cache of the seconds of each work, which several calls may share.
        modes: recomputation mode → share of the layers with it. None means the shares in `layout.recompute`.
        split: share of the backwards that are split in input and weight gradients.
    """
    prices = {} if prices is None else prices
    modes = modes or shares(layout.recompute.split(","))
    causes: dict[str, list[float]] = {}
    items = list(items)
    again = 0.0
    meetings = [0.0, 0.0]
    for item in items:
        if item.cause == SHARDS:
            continue
        side = int(item.phase is not Phase.F)
        often = split if item.apart else 1.0
        seconds = often * work_s(item.work, layout, rates, prices)
        causes.setdefault(item.cause, [0.0, 0.0])[side] += seconds
        meetings[side] += often * (item.cause == SENDING)
        again += seconds * item.repeats(modes)
    if DISPATCH in causes:
        hidden_s, _ = rows_s(items, layout, rates, prices)
        causes[DISPATCH] = [shown - hidden for shown, hidden in zip(causes[DISPATCH], hidden_s, strict=True)]
        again -= hidden_s[0] * modes.get("full", 0.0)
    if (rates.meeting_s or rates.spread) and SENDING in causes:
        computing = [sum(pair[side] for cause, pair in causes.items() if cause != SENDING) for side in (0, 1)]
        waits = [waiting_s(number, one, rates) for number, one in zip(meetings, computing, strict=True)]
        causes[WAITING] = waits
        again += waits[0] * modes.get("full", 0.0)
    causes[RECOMPUTED] = [0.0, again]
    return {cause: (forward, backward) for cause, (forward, backward) in causes.items()}


def rows_s(items: Sequence[Item], layout: Layout, rates: Rates, prices: Prices) -> tuple[list[float], list[float]]:
    """Return the hidden and the exposed seconds of sending token rows to experts and back, as [forward, backward] each.

    The compute of the shared expert hides the hidden seconds. The exposed seconds include the host's wait for row
    counts. If the schedule runs pairs of microbatches, the other microbatch hides a part of the exposed seconds
    (`costs.time.pair_s`).
    """
    ways = {under: [0.0, 0.0] for under in (Under.SHARED, Under.OTHER)}
    shared_s = [0.0, 0.0]
    for item in items:
        side = int(item.phase is not Phase.F)
        if isinstance(item.work, Collective) and item.work.under in ways:
            ways[item.work.under][side] += work_s(item.work, layout, rates, prices)
        elif isinstance(item.work, HostWait):
            ways[Under.OTHER][side] += work_s(item.work, layout, rates, prices)
        elif isinstance(item.work, Product) and ".moe.shared." in item.work.parameter and item.phase is not Phase.W:
            shared_s[side] += work_s(item.work, layout, rates, prices)
    overlap = 0.0 if rates.host_executes else rates.dp_overlap
    hidden_s = [min(rows * overlap, shared) for rows, shared in zip(ways[Under.SHARED], shared_s, strict=True)]
    return hidden_s, [sum(all_s) - hidden for *all_s, hidden in zip(*ways.values(), hidden_s, strict=True)]


def waiting_s(meetings: Number, compute_s: Number, rates: Rates) -> Number:
    """Return the seconds that ranks wait for each other at `meetings` collectives in `compute_s` seconds of compute."""
    return meetings * rates.meeting_s + compute_s * rates.spread


class Times(NamedTuple):
    """Seconds of a block, an embedding or a head for one microbatch; numbers, or columns over many layouts."""

    forward_s: Number
    backward_s: Number  # Input and weight gradients and the recomputed forward, without `adding_s`.
    adding_s: Number  # Extra time if weight gradients are accumulated: in every microbatch of a step but the first.
    weight_s: Number  # Part of backward_s for the weight gradients, which a split backward may run later.
    sent_s: Number  # Part of forward_s: communication over tp, which does not hide the host's dispatch.
    sent_backward_s: Number
    rows_s: Number  # Part of forward_s: rows to and from experts, which another microbatch's compute may hide.
    rows_backward_s: Number
    host_forward_s: Number  # Time of the host to dispatch the operations.
    host_backward_s: Number
    gather_bytes: Number  # Sharded weights that forward gathers over dp.
    gather_again_bytes: Number  # Sharded weights that backward gathers again over dp.
    scatter_bytes: Number  # Gradients of sharded weights that backward reduce-scatters over dp.

    def both(self, microbatches: Number, rates: Rates) -> tuple[Number, Number]:
        """Return the (forward, backward) seconds of an average microbatch.

        On a GPU the host dispatches operations while the device computes. Only the host's time beyond the device's
        compute is therefore added. On a CPU all of the host's time is added.
        """
        backward_s = self.backward_s + self.adding_s * added_share(microbatches)
        if rates.host_executes:
            device_s = (0.0, 0.0)
        else:
            device_s = (self.forward_s - self.sent_s, backward_s - self.sent_backward_s)
        return (
            self.forward_s + np.maximum(self.host_forward_s - device_s[0], 0.0),
            backward_s + np.maximum(self.host_backward_s - device_s[1], 0.0),
        )

    def weights(self, microbatches: Number) -> Number:
        """Return the seconds of an average microbatch's weight gradients."""
        return self.weight_s + self.adding_s * added_share(microbatches)


class Parts(NamedTuple):
    """Times of a block, of the embedding and of the head, of which stages consist."""

    block: Times  # times with the schedule's share of split backwards
    split: Times  # times of a block if every backward is split
    embedding: Times
    head: Times


def added_share(microbatches: Number) -> Number:
    """Return the fraction of a step's microbatches whose weight gradients are accumulated: all but the first."""
    return 1 - 1 / np.maximum(microbatches, 1)


def times(model: ModelConfig, layouts: Layout, rates: Rates, layers: range | None = None) -> Parts:
    """Return the times of block, embedding and head for one layout, or as columns for a table.

    A block's times are the mean over `layers`, the layers of a virtual stage. None means `fullest_stage`.
    """
    prices: Prices = {}

    def fold(layout: Layout) -> Parts:
        stage = layers or fullest_stage(model, layout)
        modes = mode_shares(model, layout, len(stage))
        again = sum(share * RECOMPUTED_OPS[mode] for mode, share in modes.items())
        host = FORWARD_OPS * rates.launch_s, (BACKWARD_OPS + again) * rates.launch_s

        def block(split: float) -> Times:
            return mean_of_layers(
                model,
                stage,
                lambda layer: part(
                    items=block_work(model, layout, rates, layer),
                    layout=layout,
                    rates=rates,
                    prices=prices,
                    host_s=host,
                    modes=modes,
                    split=split,
                ),
            )

        whole = block(0.0)
        ends = (embedding_work(model, layout), head_work(model, layout, rates))
        # without sequence parallelism, a split backward has the same times
        split = block(1.0) if layout.sequence_parallel else whole
        return Parts(whole, split, *(part(items, layout, rates, prices) for items in ends))

    sharded = (layouts.sharding == name for name in ("weights", "weights-gathered-once"))
    parts: Parts = over_layouts(
        layouts,
        fold,
        layouts.devices,
        experts_inside(layouts, rates),
        stage_length(model, layouts),
        *sharded,
    )
    share = by_schedule(layouts, split_share, "pp", "microbatches")
    average = Times(
        *(whole * (1 - share) + split * share for whole, split in zip(parts.block, parts.split, strict=True))
    )
    return parts._replace(block=average)


Result = TypeVar("Result", bound="NamedTuple")


def mean_of_layers(model: ModelConfig, layers: range, of_layer: Callable[[int], Result]) -> Result:
    """Return the mean of `of_layer`, a named tuple of numbers, over some layers of the model."""
    kinds = [(of_layer(layer), count / len(layers)) for layer, count in layer_kinds(model, layers)]
    first = kinds[0][0]
    if len(kinds) == 1:
        return first
    return type(first)(*(sum(share * values[place] for values, share in kinds) for place in range(len(first))))


def of_stages(model: ModelConfig, stages: Sequence[StageSpec], of: Callable[[range], Result]) -> list[Result]:
    """Return `of(layers)` of each virtual stage. It is called once for stages with equal numbers of layers of each
    kind.
    """
    kinds = [tuple(layer_kinds(model, stage.layers)) for stage in stages]
    alike = {kind: stage.layers for kind, stage in zip(kinds, stages, strict=True)}
    results = {kind: of(layers) for kind, layers in alike.items()}
    return [results[kind] for kind in kinds]


def part(
    items: list[Item],
    layout: Layout,
    rates: Rates,
    prices: Prices,
    host_s: tuple[float, float] = (0.0, 0.0),
    modes: Mapping[str, float] = MappingProxyType({"none": 1.0}),
    split: float = 0.0,
) -> Times:
    """Return the times of one work list. `host_s` is the host's dispatch time in (forward, backward)."""
    causes = by_cause(
        items=items,
        layout=layout,
        rates=rates,
        prices=prices,
        modes=modes,
        split=split,
    )
    adding = causes.pop(ADDING, (0.0, 0.0))[1]
    sent = causes.get(SENDING, (0.0, 0.0))
    rows = rows_s(items, layout, rates, prices)[1] if DISPATCH in causes else (0.0, 0.0)
    sent_again = sum(
        item.repeats(modes) * work_s(item.work, layout, rates, prices) for item in items if item.cause == SENDING
    )
    moved = {
        (item.phase, item.work.operation): item.work.size_bytes
        for item in items
        if item.cause == SHARDS and isinstance(item.work, Collective)
    }
    weights = (
        item
        for item in items
        if item.phase is Phase.W and item.cause != ADDING and not isinstance(item.work, Collective)
    )
    return Times(
        forward_s=sum(forward for forward, _ in causes.values()),
        backward_s=sum(backward for _, backward in causes.values()),
        adding_s=adding * (1 + (rates.spread if SENDING in causes else 0.0)),
        weight_s=sum(work_s(item.work, layout, rates, prices) for item in weights),
        sent_s=sent[0],
        sent_backward_s=sent[1] + sent_again,
        rows_s=rows[0],
        rows_backward_s=rows[1] + rows[0] * modes.get("full", 0.0),
        host_forward_s=host_s[0],
        host_backward_s=host_s[1],
        gather_bytes=moved.get((Phase.F, "all_gather"), 0),
        gather_again_bytes=moved.get((Phase.I, "all_gather"), 0),
        scatter_bytes=moved.get((Phase.I, "reduce_scatter"), 0),
    )
