"""Memory of a pipeline rank in bytes: weights, gradients, optimizer state, activations, logits, buffers, reserve.

Functions return purpose → bytes (`Lines`), so that a plan can list each purpose. All values are for one device of a
pipeline rank, which holds `chunks` virtual stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, reduce
from typing import NamedTuple

import numpy as np

from frontier_llm.blueprint.items import EXCHANGE, Collective, Item, Keep, Phase
from frontier_llm.blueprint.layout import DTYPE_BYTES, Layout, fullest_stage, layer_kinds, mode_shares, statistics_bytes
from frontier_llm.blueprint.optimizers import optimizer_rule
from frontier_llm.blueprint.parameters import Parameter, StageSpec, block_parameters
from frontier_llm.blueprint.work import block_work, head_work
from frontier_llm.config import ModelConfig
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.layouts import Number, by_schedule, cut, over_layouts, stage_length
from frontier_llm.planner.costs.parameters import Size, by_rank, expert_numel, stage_columns, stage_numel
from frontier_llm.planner.costs.seconds import mean_of_layers, of_stages
from frontier_llm.planner.costs.time import p2p_bytes, stage_layers
from frontier_llm.planner.costs.update import BUCKET_ELEMENTS, whole_update
from frontier_llm.schedule import one_end, peak_bytes, peak_in_flight, peak_waiting, peak_waiting_in_backward

Lines = dict[str, Number]

# Memory of the exchange in backward, in multiples of the size of all gathered keys and values: 1 for the keys and
# values, 1 for their gradients, and 1/2 + 1/2 for a reordered half of each.
EXCHANGE_COPIES = 3
BUCKET_BYTES = 2 * 160 * 2**20  # two gradient buckets in flight, of 40 M parameters each


def kept_bytes(items: Iterable[Item], recompute: str, phase: Phase = Phase.F) -> float:
    """Return the bytes that the items of a work list keep for one microbatch from forward to backward.

    With phase W, they are kept from the input gradient to the weight gradient.
    """
    return sum(
        item.work.size_bytes
        for item in items
        if isinstance(item.work, Keep) and item.phase is phase and recompute in item.work.modes
    )


class Held(NamedTuple):
    """Bytes that a block and the head keep for one microbatch: numbers for one layout, or columns for many."""

    block: Number  # Bytes that a block keeps from forward to backward.
    # Bytes that a block keeps from its input gradients to its weight gradients: the operands of its products, but
    # nothing of the attention core.
    block_waiting: Number
    block_working: Number  # working memory of a block while it is recomputed, in bytes
    logits: Number  # Bytes that the head keeps from forward to backward.
    logits_waiting: Number  # Bytes that the head keeps from its input gradients to its weight gradients.
    exchanged: Number  # gathered keys and values of the complete sequence (context parallelism)


def held(model: ModelConfig, layouts: Layout, rates: Rates, layers: range | None = None) -> Held:
    """Return the bytes that a block and the head keep per microbatch. A block's bytes are the mean over `layers`, the
    layers of a virtual stage. None means `fullest_stage`.

    The bytes agree with Korthikanti et al. 2022, table 2: S·B·H·(10 + 24/t) bytes per block, with the two masks of
    dropout.
    """

    @cache
    def lists(layer: int, part: Layout) -> tuple[list[Item], list[Item]]:
        return block_work(model, part, rates, layer=layer), head_work(model, part, rates)

    def of_layer(layer: int, layout: Layout, stage: range) -> Held:
        fields = (
            "tp",
            "cp",
            "context_attention",
            "ep",
            "etp",
            "expert_nodes",
            "imbalance",
            "micro_batch",
            "sequence_parallel",
        )
        part = Layout(**{name: getattr(layout, name) for name in fields}, dtype=layouts.dtype)
        block, head = lists(layer, part)
        modes = mode_shares(model, layout, len(stage))
        return Held(
            block=sum(share * kept_bytes(block, mode) for mode, share in modes.items()),
            block_waiting=kept_bytes(block, "selective"),
            block_working=kept_bytes(block, "none") if "full" in modes else 0.0,
            logits=kept_bytes(head, "none"),
            logits_waiting=kept_bytes(head, "none", Phase.W),
            exchanged=EXCHANGE_COPIES
            * sum(
                item.work.size_bytes
                for item in block
                if item.phase is Phase.F and item.cause == EXCHANGE and isinstance(item.work, Collective)
            ),
        )

    def fold(layout: Layout) -> Held:
        stage = layers or fullest_stage(model, layout)
        return mean_of_layers(model, stage, lambda layer: of_layer(layer, layout, stage))

    parts: Held = over_layouts(layouts, fold, stage_length(model, layouts))
    return parts


def stage_memory(
    model: ModelConfig,
    layouts: Layout,
    rates: Rates,
    stage: Number,
    layers: Number,
    embedding: Number,
    head: Number,
    *,
    routed: Number | None = None,
) -> Lines:
    """Return purpose → bytes of one pipeline rank, or of several ranks as arrays.

    A rank holds `layers` layers in all its chunks, and the embedding or the head if the flags are true. `routed` is the
    number of the layers that have experts; None means the mean of all layers.
    """
    contents = _Contents(layers, embedding, head, routed)
    parameters = sum(_dense_and_experts(model, layouts, contents))
    statistics = _statistics_bytes(model, layouts, contents)
    parts = held(model, layouts, rates)
    size = DTYPE_BYTES[layouts.dtype]
    in_flight, waiting, waiting_in_backward = (
        by_schedule(layouts, of, "pp", "chunks", "microbatches", stage=stage)
        for of in (peak_in_flight, peak_waiting, peak_waiting_in_backward)
    )
    # With full recomputation a waiting layer keeps more than a layer before its backward, so the peak is in backward.
    per_layer = reduce(
        np.maximum,
        (
            parts.block * in_flight + (parts.block_waiting - parts.block) * late
            for late in (waiting, np.minimum(waiting_in_backward, in_flight))
        ),
    )
    activations = per_layer * layers / layouts.chunks
    working = parts.block_working * rates.fragmentation
    at_the_head = np.where(layouts.chunks > 1, 1, in_flight - waiting)  # microbatches between the head's F and B or I
    logits = np.where(head, parts.logits * at_the_head + parts.logits_waiting * waiting, 0.0)
    sent = p2p_bytes(model, layouts, replace(rates, p2p_split=False))
    bucket = np.minimum(np.where(layouts.replicas > 1, BUCKET_BYTES, 0.0), parameters * size)
    return {
        # with sharded weights (FSDP), a rank keeps its own shard of the weights only as the fp32 master copy
        "weights": np.where(layouts.sharding == "weights", 0.0, parameters * size),
        "gradients": parameters * _gradient_element_bytes(layouts, rates),
        "optimizer": _state_bytes(model, layouts, rates, contents) + statistics,
        "activations": activations * rates.fragmentation,
        "recompute working set": working,
        "logits": _beside_recomputation(logits, parts, working),
        "gathered keys and values": parts.exchanged,
        "pipeline buffers": np.where(layouts.pp > 1, 4 * sent, 0.0),
        "communication buffers": np.where(
            cut(layouts, 3), _gathered_weights_bytes(model, layouts, rates, contents, activations), bucket
        ),
        "reserve": rates.reserve_bytes + 0.0 * parameters,
    } | _update_lines(model, layouts, rates, contents, parameters, bool(np.any(statistics > 0)))


def _beside_recomputation(logits: Number, parts: Held, working: Number) -> Number:
    """Return the bytes of logits beside the working set: a microbatch's logits are freed before its first layer is
    recomputed.
    """
    return np.maximum(logits - np.minimum(parts.logits, working), 0.0)


class _Contents(NamedTuple):
    """Number of layers of a pipeline rank, and whether it holds embedding and head. Arrays describe several ranks."""

    layers: Number
    embedding: Number
    head: Number
    routed: Number | None  # number of the layers that have experts


def _dense_and_experts(
    model: ModelConfig, layouts: Layout, contents: _Contents, size: Size = Parameter.rank_numel
) -> tuple[Number, Number]:
    """Return the sums of `size` over the dense parameters of a rank, and over its experts."""
    layers, embedding, head, routed = contents
    dense = stage_numel(model, layouts.tp, layers, embedding, head, size, routed)
    return dense, expert_numel(model, layouts, layers, size, routed)


def _gradient_element_bytes(layouts: Layout, rates: Rates) -> Number:
    """Return the bytes of gradients that a rank keeps for each element of its parameters."""
    element_bytes = rates.gradient_bytes + rates.further_gradient_bytes
    # with a pipeline, ZeRO-2 keeps complete gradients of one chunk: the chunk whose backwards are accumulated
    complete = np.where(cut(layouts, 3) | (layouts.pp == 1), 0.0, 1 / layouts.chunks)
    return element_bytes * np.where(cut(layouts, 2), np.minimum(1 / layouts.shards + complete, 1.0), 1.0)


def _gathered_weights_bytes(
    model: ModelConfig, layouts: Layout, rates: Rates, contents: _Contents, activations: Number
) -> Number:
    """Return the buffers of sharded weights (FSDP): the gradients of one layer, and the gathered 16-bit weights of this
    layer and the next. With "weights-gathered-once" the gathered weights are a rank's weights from forward to
    backward.

    torch gathers the weights outside the layers (embedding, final norm, head) in forward and frees them at the end of
    backward. The head's gradient is kept until then too. The gradients of all these weights are summed at the end of
    backward, after the activations are freed.
    """
    size = DTYPE_BYTES[layouts.dtype]
    layer = stage_numel(model, layouts.tp, 1, False, False)
    outside = stage_numel(model, layouts.tp, 0, contents.embedding, contents.head)
    head = stage_numel(model, layouts.tp, 0, False, contents.head)
    summed = np.maximum(layer * rates.gradient_bytes, outside * rates.gradient_bytes - activations)
    gathered = (2 * layer + outside + head) * size
    return summed + np.where(layouts.sharding == "weights", gathered, 0)


def _state_bytes(model: ModelConfig, layouts: Layout, rates: Rates, contents: _Contents) -> Number:
    """Return the bytes of the optimizer's state that ZeRO-1 cuts, and of the master copy of the weights."""
    wide = statistics_bytes(layouts.dtype)
    rule = optimizer_rule(layouts.optimizer)
    has_master = DTYPE_BYTES[layouts.dtype] < wide  # fp32 and fp64 weights need no separate master copy

    def of_state(one: Parameter, degrees: Mapping[str, Number]) -> Number:
        element_bytes = rates.optimizer_state_bytes or rule.bytes_per_element(one, wide)
        return (element_bytes - (0 if has_master else wide)) * one.rank_numel(degrees)

    dense, experts = _dense_and_experts(model, layouts, contents, of_state)
    is_cut = cut(layouts, 1)
    return dense / np.where(is_cut, layouts.shards, 1) + experts / np.where(is_cut, layouts.edp, 1)


def _statistics_bytes(model: ModelConfig, layouts: Layout, contents: _Contents) -> Number:
    """Return the bytes of the optimizer's statistics, which ZeRO-1 does not cut."""
    wide = statistics_bytes(layouts.dtype)
    rule = optimizer_rule(layouts.optimizer)

    def of_statistics(one: Parameter, degrees: Mapping[str, Number]) -> Number:
        return wide * sum(tensor.rank_numel(degrees) for tensor in rule.statistics(one))

    return sum(_dense_and_experts(model, layouts, contents, of_statistics))


def _update_lines(
    model: ModelConfig, layouts: Layout, rates: Rates, contents: _Contents, parameters: Number, has_statistics: bool
) -> Lines:
    """Return purpose → bytes of the buffers of an optimizer whose update needs more than one element at a time."""
    lines: Lines = {}
    wide = statistics_bytes(layouts.dtype)
    size = DTYPE_BYTES[layouts.dtype]
    rule = optimizer_rule(layouts.optimizer)
    owners = np.where(cut(layouts, 1), layouts.replicas, 1)
    if has_statistics:
        # the update processes one bucket at a time, with two buffers: the scaled gradient, and squares or second
        # moments
        bucket = np.minimum(np.maximum(_largest_block_numel(model, layouts), BUCKET_ELEMENTS), parameters)
        lines["update of a bucket"] = 2 * wide * bucket / owners
    if rule.gathers:
        update = whole_update(model, layouts, rates, contents.layers, contents.routed)
        # Padding of buckets needs memory for weights, gradients and state too. In addition, one bucket at a time has
        # its gathered 16-bit tensors and its update direction in 32 bits.
        padded = update.padding * (size + rates.gradient_bytes + 2 * wide / owners)
        gathered = np.where(update.gathered > 0, update.largest * size, 0.0)
        lines["whole matrices"] = padded + gathered + update.largest * wide / owners
    return lines


def _largest_block_numel(model: ModelConfig, layouts: Layout) -> Number:
    """Return the number of elements of a block's largest parameter on one rank."""
    degrees = {"tp": layouts.tp, "ep": layouts.ep, "etp": layouts.etp}
    return reduce(
        np.maximum,
        (one.rank_numel(degrees) for layer, _ in layer_kinds(model) for one in block_parameters(model, layer)),
    )


def memory_by_rank(
    model: ModelConfig,
    layout: Layout,
    rates: Rates,
    stages: tuple[StageSpec, ...],
) -> tuple[dict[str, float], ...]:
    """Return purpose → bytes for every pipeline rank of one layout with these virtual stages."""
    ranks = np.arange(layout.pp)
    layers, routed, embeds, ends = (by_rank(column, layout) for column in stage_columns(model, stages))
    lines = stage_memory(
        model=model,
        layouts=layout,
        rates=rates,
        stage=ranks,
        layers=layers,
        embedding=embeds > 0,
        head=ends > 0,
        routed=routed,
    )
    lines |= _activation_lines(model, layout, rates, stages, lines["recompute working set"])
    lines = {name: np.broadcast_to(values, ranks.shape) for name, values in lines.items()}
    return tuple({name: float(values[rank]) for name, values in lines.items()} for rank in ranks)


def _activation_lines(
    model: ModelConfig, layout: Layout, rates: Rates, stages: tuple[StageSpec, ...], working: Number
) -> Lines:
    """Return the activations and logits of every pipeline rank, summed on the schedule's list of actions.

    The sums contain the real number of layers of each virtual stage, which may differ between the stages of a rank.
    """
    parts = of_stages(model, stages, lambda layers: held(model, layout, rates, layers))

    def peaks(logits: bool) -> Number:
        kept = []
        waiting = []
        for stage, part in zip(stages, parts, strict=True):
            layers = stage.num_layers * rates.fragmentation
            has_logits = stage.head and logits
            kept.append(layers * part.block + has_logits * part.logits)
            waiting.append(layers * part.block_waiting + has_logits * part.logits_waiting)
        return np.array(peak_bytes(layout.schedule, layout.pp, layout.chunks, layout.microbatches, kept, waiting))

    activations = peaks(logits=False)
    logits = peaks(logits=True) - activations
    return {"activations": activations, "logits": _beside_recomputation(logits, parts[-1], working)}


def total(lines: Lines) -> Number:
    """Return the sum of the bytes of all purposes."""
    return sum(lines.values())


def peak_memory(model: ModelConfig, layouts: Layout, rates: Rates) -> Number:
    """Return the bytes of the fullest rank if layers are spread evenly.

    The fullest is the first rank (embedding, most microbatches in flight) or the last rank (head, logits). Both are
    assumed to have as many layers with experts as a rank can have, because a rank between them may have.
    """
    layers = np.stack(stage_layers(model, layouts))
    alone = layouts.pp == 1
    yes = np.ones_like(layouts.pp, dtype=bool)
    both = by_schedule(layouts, one_end) > 0
    ends = (0 * layouts.pp, layouts.pp - 1), (yes, alone), (alone | both, alone | ~both)
    stage, embedding, head = map(np.stack, ends)
    return total(
        stage_memory(
            model=model,
            layouts=layouts,
            rates=rates,
            stage=stage,
            layers=layers,
            embedding=embedding,
            head=head,
            routed=np.minimum(layers, len(model.routed_layers)),
        )
    ).max(axis=0)
