"""Parameters of a stage and tensor-parallel rank, of one layout or of thousands at once, counted on what the blueprint declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from frontier_llm.blueprint import Parameter, StageSpec, block_parameters, stage_parameters
from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import ModelConfig
from frontier_llm.costs.layouts import Number
from frontier_llm.schedule import rule


def stage_numel(
    model: ModelConfig, tp: Number, layers: Number, embedding: Number, head: Number, weight: Callable[[Parameter], int] = lambda one: 1
) -> Number:
    """Elements that a rank holds of `layers` layers, with the embedding and/or the head where true; all but the model may be arrays.

    A tied head on another rank than the embedding is a second copy. Each element counts `weight` of its parameter, say bytes.
    """

    def held(parameters: Iterable[Parameter]) -> Number:
        return sum(weight(one) * one.rank_numel({"tp": values}) for one in parameters)

    values, each = np.unique(tp, return_inverse=True)  # thousands of layouts have a handful of degrees
    ends = StageSpec(0, 0, embedding=False, head=True)
    block = held(block_parameters(model, 0, False))
    front = held(stage_parameters(model, StageSpec(0, 0, embedding=True, head=False)))
    alone, beside = (held(stage_parameters(model, ends, embedding_elsewhere=shared)) for shared in (False, True))
    block, front, alone, beside = (
        np.broadcast_to(numel, values.shape)[each].reshape(np.shape(tp)) for numel in (block, front, alone, beside)
    )
    return block * layers + np.where(embedding, front, 0) + np.where(head, np.where(embedding, beside, alone), 0)


def stage_columns(stages: tuple[StageSpec, ...]) -> np.ndarray:
    """Rows layers, embedding, head over virtual stages."""
    return np.array([(stage.num_layers, stage.embedding, stage.head) for stage in stages], dtype=float).T


def by_rank(values: Sequence[float] | np.ndarray, layout: Layout) -> np.ndarray:
    """Sums over the virtual stages of each pipeline rank."""
    holders = np.array(rule(layout.schedule).placement(layout.pp, layout.chunks).rank_of)
    return np.bincount(holders, weights=np.asarray(values, dtype=float), minlength=layout.pp)
