"""Memory of a pipeline rank in bytes: weights, gradients, optimizer state, activations, logits, buffers, reserve.

Functions return purpose → bytes (`Lines`), so that a plan can list each purpose. All values are for one device of a
pipeline rank, which holds `chunks` virtual stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, reduce
from typing import NamedTuple

import numpy as np

from frontier_llm.blueprint.items import EXCHANGE, Collective, Item, Keep, Phase
from frontier_llm.blueprint.layout import DTYPE_BYTES, Layout, mode_shares, statistics_bytes
from frontier_llm.blueprint.optimizers import optimizer_rule
from frontier_llm.blueprint.parameters import Parameter, StageSpec, block_parameters, layer_kinds
from frontier_llm.blueprint.work import block_work, head_work
from frontier_llm.config import ModelConfig
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.layouts import Layouts, Number, by_schedule, cut, over_layouts, stage_length
from frontier_llm.planner.costs.parameters import by_rank, expert_numel, stage_columns, stage_numel
from frontier_llm.planner.costs.seconds import mean_of_layers
from frontier_llm.planner.costs.time import p2p_bytes, stage_layers
from frontier_llm.planner.costs.update import BUCKET_ELEMENTS, whole_update
from frontier_llm.schedule import one_end, peak_in_flight, peak_waiting

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

    block: Number
    # Bytes that a block keeps from its input gradients to its weight gradients: the operands of its products, but
    # nothing of the attention core.
    block_waiting: Number
    block_working: Number  # working memory of a block while it is recomputed, in bytes
    logits: Number
    logits_waiting: Number
    exchanged: Number  # gathered keys and values of the complete sequence (context parallelism)


def held(model: ModelConfig, layouts: Layout, rates: Rates, layers: int | None = None) -> Held:
    """Return the bytes that a block and the head keep per microbatch. `layers` is passed to `mode_shares`.

    The bytes agree with Korthikanti et al. 2022, table 2: S·B·H·(10 + 24/t) bytes per block, with the two masks of
    dropout.
    """

    @cache
    def lists(layer: int, part: Layout) -> tuple[list[Item], list[Item]]:
        return block_work(model, part, rates, layer=layer), head_work(model, part, rates)

    def of_layer(layer: int, layout: Layout) -> Held:
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
        modes = mode_shares(model, layout, layers)
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
        return mean_of_layers(model, lambda layer: of_layer(layer, layout))

    parts: Held = over_layouts(layouts, fold, stage_length(model.layers, layouts))
    return parts


def stage_memory(
    model: ModelConfig,
    layouts: Layout,
    rates: Rates,
    stage: Number,
    layers: Number,
    embedding: Number,
    head: Number,
) -> Lines:
    """Return purpose → bytes of one pipeline rank, or of several ranks as arrays.

    A rank holds `layers` layers in all its chunks, and the embedding or the head if the flags are true.
    """
    dense = stage_numel(model, layouts.tp, layers, embedding, head)
    experts = expert_numel(model, layouts, layers)
    parameters = dense + experts
    parts = held(model, layouts, rates)
    if not isinstance(layouts, Layouts) and "," in layouts.recompute:  # shares of modes depend on a stage's layers
        of_stages = [
            held(model, layouts, rates, math.ceil(number / layouts.chunks)).block for number in np.ravel(layers)
        ]
        parts = parts._replace(block=np.reshape(of_stages, np.shape(layers)))
    size = DTYPE_BYTES[layouts.dtype]
    replicas = layouts.replicas
    chunks = layouts.chunks
    cut_weights = cut(layouts, 3)
    cut_gradients = cut(layouts, 2)
    # with a pipeline, ZeRO-2 keeps complete gradients of one chunk: the chunk whose backwards are accumulated
    whole = np.where(cut_weights | (layouts.pp == 1), 0.0, 1 / chunks)
    gradient_bytes = rates.gradient_bytes + rates.further_gradient_bytes
    gradients = parameters * gradient_bytes * np.where(cut_gradients, np.minimum(1 / layouts.shards + whole, 1.0), 1.0)
    # Buffers of sharded weights (FSDP): the gradients of one layer, and the gathered weights of this layer and the next
    # layer. A rank keeps its own shard of the weights only as the fp32 master copy. With "weights-gathered-once" the
    # gathered 16-bit weights exist from forward to backward.
    twice = layouts.sharding == "weights"
    gathered = stage_numel(model, layouts.tp, 1, False, False) * (rates.gradient_bytes + np.where(twice, 2 * size, 0))
    wide = statistics_bytes(layouts.dtype)
    rule = optimizer_rule(layouts.optimizer)
    master = 0 if size < wide else wide  # fp32 and fp64 weights need no separate master copy

    def of_state(without: int = 0) -> Number:
        def kept(one: Parameter, degrees: Mapping[str, Number]) -> Number:
            element_bytes = rates.optimizer_state_bytes or rule.bytes_per_element(one, wide)
            return (element_bytes - without) * one.rank_numel(degrees)

        dense = stage_numel(
            model=model,
            tp=layouts.tp,
            layers=layers,
            embedding=embedding,
            head=head,
            size=kept,
        ) / np.where(cut(layouts, 1), layouts.shards, 1)
        return (
            dense + expert_numel(model, layouts, layers, kept) / np.where(cut(layouts, 1), layouts.edp, 1) + statistics
        )

    def of_statistics(one: Parameter, degrees: Mapping[str, Number]) -> Number:
        return wide * sum(tensor.rank_numel(degrees) for tensor in rule.statistics(one))

    dense_statistics = stage_numel(
        model=model,
        tp=layouts.tp,
        layers=layers,
        embedding=embedding,
        head=head,
        size=of_statistics,
    )
    statistics = dense_statistics + expert_numel(model, layouts, layers, of_statistics)
    state = of_state(without=master)
    in_flight, waiting = (
        by_schedule(
            layouts,
            of,
            "pp",
            "chunks",
            "microbatches",
            stage=stage,
        )
        for of in (peak_in_flight, peak_waiting)
    )
    activations = (parts.block * (in_flight - waiting) + parts.block_waiting * waiting) * layers / chunks
    working = parts.block_working * rates.fragmentation
    logits = np.where(head, parts.logits + parts.logits_waiting * waiting, 0.0)
    sent = p2p_bytes(model, layouts, replace(rates, p2p_split=False))
    lines = {
        "weights": np.where(twice, 0.0, parameters * size),
        "gradients": gradients,
        "optimizer": state,
        "activations": activations * rates.fragmentation,
        "recompute working set": working,
        "logits": np.maximum(logits - working, 0.0),  # freed before the first layer is recomputed
        "gathered keys and values": parts.exchanged,
        "pipeline buffers": np.where(layouts.pp > 1, 4 * sent, 0.0),
        "communication buffers": np.where(
            cut_weights,
            gathered,
            np.minimum(np.where(replicas > 1, BUCKET_BYTES, 0.0), parameters * size),
        ),
        "reserve": rates.reserve_bytes + 0.0 * parameters,
    }
    if np.any(statistics > 0):
        # the update processes one bucket at a time, with two buffers: the scaled gradient, and squares or second
        # moments
        bucket = np.minimum(np.maximum(_largest_block_numel(model, layouts), BUCKET_ELEMENTS), parameters)
        lines["update of a bucket"] = 2 * wide * bucket / np.where(cut(layouts, 1), replicas, 1)
    if rule.gathers:
        update = whole_update(model, layouts, rates, layers)
        owned = np.where(cut(layouts, 1), replicas, 1)
        # Padding of buckets needs memory for weights, gradients and state too. In addition, one bucket at a time has
        # its gathered 16-bit tensors and its update direction in 32 bits.
        padded = update.padding * (size + rates.gradient_bytes + 2 * wide / owned)
        gathered = np.where(update.gathered > 0, update.largest * size, 0.0)
        lines["whole matrices"] = padded + gathered + update.largest * wide / owned
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
    layers, embeds, ends = (by_rank(column, layout) for column in stage_columns(stages))
    lines = stage_memory(
        model=model,
        layouts=layout,
        rates=rates,
        stage=ranks,
        layers=layers,
        embedding=embeds > 0,
        head=ends > 0,
    )
    lines = {name: np.broadcast_to(values, ranks.shape) for name, values in lines.items()}
    return tuple({name: float(values[rank]) for name, values in lines.items()} for rank in ranks)


def total(lines: Lines) -> Number:
    """Return the sum of the bytes of all purposes."""
    return sum(lines.values())


def peak_memory(model: ModelConfig, layouts: Layout, rates: Rates) -> Number:
    """Return the bytes of the fullest rank if layers are spread evenly.

    The fullest is the first rank (embedding, most microbatches in flight) or the last rank (head, logits).
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
        )
    ).max(axis=0)
