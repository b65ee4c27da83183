"""Parameters of a stage and tensor-parallel rank, of one layout or of thousands at once, counted on what the
blueprint declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.parameters import (
    Parameter,
    ParameterKind,
    StageSpec,
    block_parameters,
    layer_kinds,
    stage_parameters,
)
from frontier_llm.config import ModelConfig
from frontier_llm.planner.costs.layouts import Number
from frontier_llm.schedule import rule

Size = Callable[[Parameter, Mapping[str, Number]], Number]  # of what a rank holds of a parameter at these degrees


def stage_numel(
    model: ModelConfig,
    tp: Number,
    layers: Number,
    embedding: Number,
    head: Number,
    size: Size = Parameter.rank_numel,
) -> Number:
    """Elements that a rank holds of `layers` layers, with the embedding and/or the head where true; all but the model
    may be arrays.

    Without experts, which other ranks share out (`expert_numel`). Layers of two kinds count as their mean. A tied head
    on another rank than the embedding is a second copy. `size` may count something else of a parameter, say bytes.
    """

    def held(parameters: Iterable[Parameter]) -> Number:
        return sum(size(one, {"tp": values}) for one in parameters)

    values, each = np.unique(tp, return_inverse=True)  # thousands of layouts have a handful of degrees
    ends = StageSpec(0, 0, embedding=False, head=True)
    layer_numel = [
        (list(block_parameters(model, layer, False)), count / model.layers) for layer, count in layer_kinds(model)
    ]
    block = sum(
        share * held(one for one in parameters if one.kind is not ParameterKind.EXPERTS)
        for parameters, share in layer_numel
    )
    front = held(stage_parameters(model, StageSpec(0, 0, embedding=True, head=False)))
    alone, beside = (held(stage_parameters(model, ends, embedding_elsewhere=shared)) for shared in (False, True))
    block, front, alone, beside = (
        np.broadcast_to(numel, values.shape)[each].reshape(np.shape(tp)) for numel in (block, front, alone, beside)
    )
    return block * layers + np.where(embedding, front, 0) + np.where(head, np.where(embedding, beside, alone), 0)


def expert_numel(model: ModelConfig, layouts: Layout, layers: Number, size: Size = Parameter.rank_numel) -> Number:
    """Elements of experts that a rank holds in `layers` layers; see `stage_numel`."""
    total = sum(
        count / model.layers * size(one, {"ep": layouts.ep, "etp": layouts.etp})
        for layer, count in layer_kinds(model)
        for one in block_parameters(model, layer, False)
        if one.kind is ParameterKind.EXPERTS
    )
    return total * layers


def stage_columns(stages: tuple[StageSpec, ...]) -> np.ndarray:
    """Rows layers, embedding, head over virtual stages."""
    return np.array([(stage.num_layers, stage.embedding, stage.head) for stage in stages], dtype=float).T


def by_rank(values: Sequence[float] | np.ndarray, layout: Layout) -> np.ndarray:
    """Sums over the virtual stages of each pipeline rank."""
    holders = np.array(rule(layout.schedule).placement(layout.pp, layout.chunks).rank_of)
    return np.bincount(holders, weights=np.asarray(values, dtype=float), minlength=layout.pp)
