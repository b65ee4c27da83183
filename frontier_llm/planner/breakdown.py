"""Division of a step's predicted time by cause, and the constants of the machine file on which each cause depends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from frontier_llm.blueprint.expert_work import DISPATCH, EXPERTS, ROUTING
from frontier_llm.blueprint.items import (
    ADDING,
    ADDING_BYTES,
    ATTENTION,
    EMBEDDING,
    EXCHANGE,
    HEAD,
    LOSS,
    PASSES,
    PRODUCTS,
    SENDING,
    SHARDS,
    Item,
    WeightGradients,
)
from frontier_llm.blueprint.layout import layer_kinds, mode_shares
from frontier_llm.blueprint.work import block_work, embedding_work, head_work
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.seconds import LAUNCHES, added_share, by_cause, times
from frontier_llm.planner.costs.time import between_microbatches_s, layer_s, step_s
from frontier_llm.planner.search import Plan
from frontier_llm.schedule import rule, split_share

BUBBLE = "bubble and messages"
UNFUSED = "attention without a fused kernel"  # batched matrix products, and softmax passes over the scores

# cause in the breakdown → constants of the machine file (fields of `Rates`) on which its seconds depend
SOURCES = {
    PRODUCTS: ("gemm_efficiency", "peak_flops", "speed_variation"),
    ATTENTION: ("flash_efficiency", "peak_flops"),
    UNFUSED: ("gemm_efficiency", "hbm_efficiency"),
    PASSES: ("hbm_efficiency", "hbm_bytes_s"),
    SENDING: ("fabric_bytes_s", "fabric_latency_s", "fabric_share"),
    EXCHANGE: ("fabric_bytes_s", "node_network_bytes_s", "network_efficiency"),
    ROUTING: ("gemm_efficiency",),
    EXPERTS: ("gemm_efficiency", "grouped_share", "peak_flops"),
    DISPATCH: ("fabric_bytes_s", "node_network_bytes_s", "network_efficiency"),
    "recompute": ("gemm_efficiency",),
    LAUNCHES: ("launch_s",),
    EMBEDDING: ("hbm_efficiency",),
    HEAD: ("gemm_efficiency",),
    LOSS: ("hbm_efficiency",),
    SHARDS: ("node_network_bytes_s", "network_efficiency", "network_hop_s"),
    "host per microbatch": ("microbatch_s",),
    BUBBLE: ("node_network_bytes_s", "network_efficiency"),
    "gradient reduction": ("node_network_bytes_s", "network_efficiency", "network_share", "dp_overlap"),
    "optimizer": ("hbm_efficiency", "step_s"),
    "weight all-gather": ("node_network_bytes_s", "network_share", "network_hop_s"),
}
# constants that most stacks do not define → the value with which they have no effect
NEUTRAL = {"network_share": 1.0}


def breakdown(plan: Plan, rates: Rates) -> dict[str, float]:
    """Return cause → seconds of the step. The values add up to the step time.

    Compute times are those of the pipeline rank with the most compute. The remaining time of the pipeline has the cause
    "bubble and messages".
    """
    model = plan.model
    layout = plan.layout
    simulated = plan.simulated
    m = layout.microbatches
    busiest = max(range(layout.pp), key=lambda rank: simulated.busy_s[rank])
    placement = rule(layout.schedule).placement(layout.pp, layout.chunks)
    held = [plan.stages[position] for position in placement.positions_of(busiest)]
    split = float(split_share(layout.schedule, layout.pp, m))
    parts: dict[str, float] = {}

    def add(items: Sequence[Item], number: float, adding: str, modes: Mapping[str, float]) -> None:
        """Add the times of `items`, multiplied by `number`. Accumulation of gradients counts as the cause `adding`."""
        if not number:
            return
        for cause, both in by_cause(items, layout, rates, modes=modes, split=split).items():
            name = cause
            seconds = float(sum(both))
            if cause == ADDING:
                name = adding
                seconds = float(added_share(m) * sum(both))
            parts[name] = parts.get(name, 0.0) + m * number * seconds

    parts[LAUNCHES] = 0.0
    parts[SHARDS] = 0.0
    for stage in held:
        modes = mode_shares(model, layout, stage.num_layers)
        for layer, count in layer_kinds(model, stage.layers):
            add(block_work(model, layout, rates, layer), count, PRODUCTS, modes)
        add(embedding_work(model, layout), stage.embedding, EMBEDDING, modes)
        add(head_work(model, layout, rates), stage.head, HEAD, modes)
        block = times(model, layout, rates, stage.layers).block
        computed = sum(block.both(m, rates))
        launches = computed - block.forward_s - block.backward_s - block.adding_s * added_share(m)
        parts[LAUNCHES] += m * stage.num_layers * float(launches)
        parts[SHARDS] += m * stage.num_layers * float(sum(layer_s(block, layout, rates)) - computed)
    parts[DISPATCH] = parts.get(DISPATCH, 0.0) - simulated.hidden_s[busiest]
    parts["host per microbatch"] = m * float(between_microbatches_s(layout, rates))
    parts[BUBBLE] = simulated.pipeline_s - simulated.busy_s[busiest]
    parts["gradient reduction"] = simulated.reduce_s
    parts["optimizer"] = simulated.optimizer_s
    parts["weight all-gather"] = simulated.gather_s
    return parts


def adding_prices(plan: Plan, rates: Rates) -> dict[WeightGradients, float]:
    """Return the step's seconds with each method of adding weight gradients that torch may have.

    Empty if the measured times of products include the addition.
    """
    if rates.accumulate_bytes == 0:
        return {}
    scale = plan.step_s / plan.closed_form_s
    return {
        method: scale * float(step_s(plan.model, plan.layout, replace(rates, weight_gradients=method)))
        for method in ADDING_BYTES
    }
