"""Tests the list of a model's parameters: the parts of all ranks cover each parameter once, and the pieces of fused
weights cover them.

A tied embedding appears on each rank that holds it.
"""

from __future__ import annotations

import numpy as np
import pytest

from frontier_llm.blueprint.parameters import model_parameters, rank_parameters
from frontier_llm.config import load_model
from frontier_llm.topology.plan import split_layers
from frontier_llm.topology.shards import shard

MODELS = ("gpt-tiny", "llama-tiny", "mpt-tiny", "gpt-22b", "llama-3-8b")


@pytest.mark.parametrize("name", MODELS)
def test_pieces_cover_a_fused_parameter_once(name: str) -> None:
    fused = [parameter for parameter in model_parameters(load_model(name)).values() if parameter.pieces]
    assert fused
    for parameter in fused:
        for dim in {piece.dim for piece in parameter.pieces}:
            seen = np.zeros(parameter.shape[dim], dtype=int)
            for piece in parameter.pieces:
                seen[piece.start : piece.stop] += 1
            assert (seen == 1).all() and len({piece.dim for piece in parameter.pieces}) == 1, parameter.name


@pytest.mark.parametrize("name", MODELS)
def test_a_tied_embedding_is_one_parameter_of_each_rank_that_uses_it(name: str) -> None:
    model = load_model(name)
    stages = split_layers(model, 4)
    tied = "embedding.token.weight"

    def on_rank(*held: int) -> list[tuple[int, tuple[str, ...]]]:
        """Return (uses, partial axes) of the token embedding on a rank that holds these stages."""
        parameters = rank_parameters(model, [stages[index] for index in held])
        return [(parameter.uses, parameter.partial_axes()) for parameter in parameters if parameter.name == tied]

    apart = (1, ("tied",)) if model.tied_embeddings else (1, ())
    assert (
        on_rank(0, 2) == [apart] and on_rank(1, 3) == ([apart] if model.tied_embeddings else []) and on_rank(1, 2) == []
    )
    # in a V-shaped placement both ends are on one rank
    assert on_rank(0, 3) == [(2, ()) if model.tied_embeddings else (1, ())]


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_holds_as_much_for_arrays_of_degrees_as_for_each(name: str) -> None:
    for parameter in model_parameters(load_model(name)).values():
        degrees = np.array([1, 2])
        assert np.broadcast_to(parameter.rank_numel({"tp": degrees}), 2).tolist() == [
            shard(parameter, {"tp": tp}).numel for tp in (1, 2)
        ]
