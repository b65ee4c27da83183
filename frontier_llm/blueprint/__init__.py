"""What a model is made of and what it does, without torch: parameters, work, layouts, optimizer states."""

from frontier_llm.blueprint.parameters import (
    VOCABULARY,
    How,
    Parameter,
    ParameterKind,
    Piece,
    Split,
    block_parameters,
    matrix_parameters,
    model_parameters,
    rank_parameters,
    stage_parameters,
    total_parameters,
)
from frontier_llm.blueprint.stages import StageSpec

__all__ = [
    "VOCABULARY",
    "How",
    "Parameter",
    "ParameterKind",
    "Piece",
    "Split",
    "StageSpec",
    "block_parameters",
    "matrix_parameters",
    "model_parameters",
    "rank_parameters",
    "stage_parameters",
    "total_parameters",
]
