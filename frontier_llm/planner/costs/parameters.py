"""Number of parameter elements of a pipeline stage on one rank, counted from the declarations in `blueprint`.

Degrees and numbers of layers may be numbers (one layout) or arrays (many layouts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from frontier_llm.blueprint.layout import Layout, layer_kinds
from frontier_llm.blueprint.parameters import (
    Parameter,
    ParameterKind,
    StageSpec,
    block_parameters,
    stage_parameters,
)
from frontier_llm.config import ModelConfig
from frontier_llm.planner.costs.layouts import Number
from frontier_llm.schedule import rule

Size = Callable[[Parameter, Mapping[str, Number]], Number]  # size of a rank's part of a parameter at these degrees


def stage_numel(
    model: ModelConfig,
    tp: Number,
    layers: Number,
    embedding: Number,
    head: Number,
    size: Size = Parameter.rank_numel,
    routed: Number | None = None,
) -> Number:
    """Return the number of parameter elements that a rank holds of `layers` layers, the embedding and the head.

    The embedding and the head count if their flags are true. All arguments but the model and `size` may be arrays.
    Experts are not included, because another group of ranks splits them (`expert_numel`). `routed` is the number of the
    layers that have experts; None means the mean of all layers. If embedding and head are tied but on different ranks,
    the head is a second copy. `size` may return another size of a parameter than its elements, for example bytes.
    """

    def held(parameters: Iterable[Parameter]) -> Number:
        return sum(size(one, {"tp": values}) for one in parameters)

    values, each = np.unique(tp, return_inverse=True)  # thousands of layouts have only a few distinct tp degrees
    ends = StageSpec(0, 0, embedding=False, head=True)

    def of_block(layer: int) -> Number:
        numel = held(one for one in block_parameters(model, layer, False) if one.kind is not ParameterKind.EXPERTS)
        return np.broadcast_to(numel, values.shape)[each].reshape(np.shape(tp))

    blocks = sum(number * of_block(layer) for layer, number in layers_by_kind(model, layers, routed))
    front = held(stage_parameters(model, StageSpec(0, 0, embedding=True, head=False)))
    alone, beside = (held(stage_parameters(model, ends, embedding_elsewhere=shared)) for shared in (False, True))
    front, alone, beside = (
        np.broadcast_to(numel, values.shape)[each].reshape(np.shape(tp)) for numel in (front, alone, beside)
    )
    return blocks + np.where(embedding, front, 0) + np.where(head, np.where(embedding, beside, alone), 0)


def layers_by_kind(model: ModelConfig, layers: Number, routed: Number | None = None) -> list[tuple[int, Number]]:
    """Return (index of a layer, number of layers) of each kind in `layers` layers, of which `routed` have experts.

    None means the share of layers with experts in the model.
    """
    numbers = {layer: layers * count / model.layers for layer, count in layer_kinds(model)}
    if routed is not None and len(numbers) > 1:
        numbers = dict(zip(numbers, (layers - routed, routed), strict=True))
    return list(numbers.items())


def expert_numel(
    model: ModelConfig,
    layouts: Layout,
    layers: Number,
    size: Size = Parameter.rank_numel,
    routed: Number | None = None,
) -> Number:
    """Return the number of expert elements that a rank holds in `layers` layers. `size` and `routed` are used as in
    `stage_numel`.
    """
    experts = sum(
        number * size(one, {"ep": layouts.ep, "etp": layouts.etp})
        for layer, number in layers_by_kind(model, layers, routed)
        for one in block_parameters(model, layer, False)
        if one.kind is ParameterKind.EXPERTS
    )
    return experts + 0 * layers  # also a column if there are no experts


def stage_columns(model: ModelConfig, stages: tuple[StageSpec, ...]) -> np.ndarray:
    """Return an array with the rows layers, layers with experts, embedding and head, and one column per virtual
    stage.
    """
    columns = [
        (stage.num_layers, sum(layer in model.routed_layers for layer in stage.layers), stage.embedding, stage.head)
        for stage in stages
    ]
    return np.array(columns, dtype=float).T


def by_rank(values: Sequence[float] | np.ndarray, layout: Layout) -> np.ndarray:
    """Return the sum of `values`, one per virtual stage, for each pipeline rank."""
    holders = np.array(rule(layout.schedule).placement(layout.pp, layout.chunks).rank_of)
    return np.bincount(holders, weights=np.asarray(values, dtype=float), minlength=layout.pp)
