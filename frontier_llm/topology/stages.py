"""Layers → virtual stages, with the embedding and the head weighed in as fractions of a layer."""

from __future__ import annotations

from frontier_llm.blueprint.items import Software
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.stages import StageSpec
from frontier_llm.blueprint.work import block_work, flops, head_work
from frontier_llm.config import ModelConfig


def head_cost_in_layers(model: ModelConfig) -> float:
    """FLOPs of the output head over FLOPs of one layer, attention counted causally."""
    layout = Layout()
    software = Software()
    layer = flops(block_work(model, layout, software), causal=True, forward_only=True)
    return flops(head_work(model, layout, software), forward_only=True) / layer


def balanced(model: ModelConfig, virtual_stages: int) -> tuple[int, ...]:
    """Layers of each virtual stage so that the busiest has as little to do as possible, the head counted on the last.

    Leftovers fill the front; then layers leave the head's stage while that makes the busiest stage lighter. Large
    models stay even (the head is V/12h layers: 0.17 for the 1T model, 0.69 for 22B); a small model with a large
    vocabulary does not (L8 H384 V8192 on two stages: 5 + 3 layers, because the head costs as much as 1.7).
    """
    base, remainder = divmod(model.layers, virtual_stages)
    counts = [base + (stage < remainder) for stage in range(virtual_stages)]
    head = head_cost_in_layers(model)
    while virtual_stages > 1 and counts[-1] > 1:
        lightest = min(range(virtual_stages - 1), key=lambda stage: counts[stage])
        if counts[lightest] + 1 >= counts[-1] + head:
            break
        counts[lightest] += 1
        counts[-1] -= 1
    return tuple(counts)


def split_layers(
    model: ModelConfig, virtual_stages: int, counts: tuple[int, ...] | None = None
) -> tuple[StageSpec, ...]:
    """One StageSpec per virtual stage in model order; `counts` overrides the balanced split."""
    counts = counts or balanced(model, virtual_stages)
    last = virtual_stages - 1
    first_layers = [sum(counts[:index]) for index in range(virtual_stages)]
    return tuple(
        StageSpec(first, count, embedding=index == 0, head=index == last)
        for index, (first, count) in enumerate(zip(first_layers, counts, strict=True))
    )
