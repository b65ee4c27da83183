"""Tensor- and sequence-parallel layers over parameters that the blueprint declares."""

from frontier_llm.parallel.tensor.context import LayerContext
from frontier_llm.parallel.tensor.gradients import AutogradGradients, Factor, WeightGradients
from frontier_llm.parallel.tensor.heads import norm_over_heads
from frontier_llm.parallel.tensor.linear import ColumnLinear, RowLinear, column_linear
from frontier_llm.parallel.tensor.parameter import Declared, ShardedParameter, materialise
from frontier_llm.parallel.tensor.vocabulary import (
    mean_over_global_batch,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

__all__ = [
    "AutogradGradients",
    "ColumnLinear",
    "Declared",
    "Factor",
    "LayerContext",
    "RowLinear",
    "ShardedParameter",
    "WeightGradients",
    "column_linear",
    "materialise",
    "mean_over_global_batch",
    "norm_over_heads",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]
