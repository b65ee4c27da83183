"""Every tensor-parallel mapping and layer equals the unsharded operation.

The tests compare value, input gradient and weight gradients in float64. Linear, norm, embedding and cross-entropy are
compared with torch's own functions on the gathered weights. Attention, MLP and block are compared with themselves on
one rank (tests/parity/test_layouts.py compares them with the oracle).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frontier_llm import log
from frontier_llm.blueprint.optimizers import ADAMW
from frontier_llm.blueprint.parameters import StageSpec, stage_parameters
from frontier_llm.comm import build_mesh
from frontier_llm.config import ModelConfig, OpsConfig
from frontier_llm.model import initial_rows
from frontier_llm.model.layers import Attention, Block, Mlp, Norm
from frontier_llm.model.positions import Positions, rope_table
from frontier_llm.ops import select_ops
from frontier_llm.optim import GradientSync, build_buckets
from frontier_llm.parallel.tensor import (
    ColumnLinear,
    Declared,
    LayerContext,
    RowLinear,
    WeightGradients,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from frontier_llm.topology.grid import Grid
from tests.harness.marks import thorough
from tests.harness.pool import RankPool
from tests.parity.compare import Tensors, assemble
from tests.parity.three_steps import Piece, whole_piece

S = 8
B = 3
H = 16
V = 24
MODEL = ModelConfig(
    layers=1,
    hidden=H,
    heads=8,
    kv_heads=4,
    ffn_hidden=20,
    vocab_size=V,
    vocab_multiple=4,
    sequence_length=S,
    norm="layernorm",
    norm_bias=True,
    bias=True,
)


NARROW = MODEL.model_copy(update={"ffn_hidden": 12})  # a gated MLP: its up projection has the global shape (2, 12, H)
GELU = MODEL.model_copy(update={"activation": "gelu", "ffn_hidden": 24})
PARALLEL = MODEL.model_copy(update={"parallel_residual": True})


def declare(context: LayerContext, model: ModelConfig) -> Declared:
    """Declare all parameters of a model."""
    whole = StageSpec(0, model.layers, embedding=True, head=True)
    return {p.name: context.declare(p) for p in stage_parameters(model, whole, context.sequence_parallel)}


class Embedding(nn.Module):
    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.context = context
        self.weight = declare(context, MODEL)["embedding.token.weight"].accumulated_by_layer()

    def forward(self, tokens_SB: Tensor) -> Tensor:
        return vocab_parallel_embedding(tokens_SB, self.weight, self.context)


class CrossEntropy(nn.Module):
    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.context = context

    def forward(self, logits_SBv: Tensor) -> Tensor:
        first = V // self.context.tp.size * self.context.tp.rank
        # The backward of the loss overwrites its logits.
        return vocab_parallel_cross_entropy(logits_SBv.clone(), tokens(), first, self.context)[0]


class Positioned(nn.Module):
    """Attention or a block, with rotary tables."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.positions = Positions(rope_table(MODEL, torch.device("cpu"), torch.float64), None, None)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, Attention):
            return self.layer(x, self.positions)
        # a block takes and returns the residual stream as two summands
        return sum(self.layer(x / 2, x / 2, self.positions)[:2])


class Kind(NamedTuple):
    """The function that builds a layer, how its input and output are split over tp, and the input's shape.

    "last" splits the last dim, "sequence" splits dim 0 if sequence parallelism is on.
    """

    make: Callable[[LayerContext], nn.Module]
    cut_in: str
    cut_out: str
    shape: tuple[int, ...] = (S, B, H)


KINDS = {
    "column": Kind(lambda c: ColumnLinear(c, declare(c, NARROW), "layers.0.mlp.up"), "sequence", "last-of-two"),
    "row": Kind(lambda c: RowLinear(c, declare(c, GELU), "layers.0.mlp.down"), "last", "sequence", (S, B, 24)),
    "norm": Kind(lambda c: Norm(MODEL, c, declare(c, MODEL), "final_norm"), "sequence", "sequence"),
    "embedding": Kind(Embedding, "none", "sequence"),
    "cross-entropy": Kind(CrossEntropy, "last", "none", (S, B, V)),
    "attention": Kind(lambda c: Positioned(Attention(MODEL, c, declare(c, MODEL), 0, False)), "sequence", "sequence"),
    "attention-recomputed": Kind(
        lambda c: Positioned(Attention(MODEL, c, declare(c, MODEL), 0, True)), "sequence", "sequence"
    ),
    "mlp": Kind(lambda c: Mlp(MODEL, c, declare(c, MODEL), "layers.0.mlp"), "sequence", "sequence"),
    "mlp-gelu": Kind(lambda c: Mlp(GELU, c, declare(c, GELU), "layers.0.mlp"), "sequence", "sequence"),
    "block": Kind(lambda c: Positioned(Block(MODEL, c, declare(c, MODEL), 0, False)), "sequence", "sequence"),
    "block-parallel": Kind(
        lambda c: Positioned(Block(PARALLEL, c, declare(c, PARALLEL), 0, False)), "sequence", "sequence"
    ),
}


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def tokens() -> Tensor:
    return torch.from_numpy(np.random.default_rng(9).integers(0, V, (S, B)))


def cut(x: Tensor, how: str, rank: int, tp: int, sequence_parallel: bool) -> Tensor:
    """Return a rank's part of a global tensor."""
    if how == "last":
        return x.chunk(tp, -1)[rank]
    if how == "last-of-two":  # global shape (2, 12): both rows are split
        return x.unflatten(-1, (2, -1)).chunk(tp, -1)[rank].flatten(-2)
    return x.chunk(tp, 0)[rank] if how == "sequence" and sequence_parallel else x


class Layer(NamedTuple):
    """A rank's part of all values that a layer computes."""

    output: np.ndarray
    input_gradient: np.ndarray | None
    weights: list[Piece]
    gradients: list[Piece]


def run_layer(rank: int, name: str, tp: int, sequence_parallel: bool) -> Layer:
    """Run forward and backward of one layer on one rank, with random weights, biases and norms."""
    log.set_rank(1, 2)
    kind = KINDS[name]
    mesh = build_mesh(Grid(tp, 1, 1), rank)
    accumulation = WeightGradients()
    ops = select_ops(OpsConfig(), "cpu", torch.float64)
    layer = kind.make(LayerContext(mesh.tp, sequence_parallel and tp > 1, ops, accumulation, torch.float64))
    buckets = build_buckets([layer], ADAMW, mesh.dp, 1, torch.device("cpu"), 10**6) if list(layer.parameters()) else []
    parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
    for parameter in parameters:
        with torch.no_grad():
            initial_rows(
                replace(parameter.spec, parameter=replace(parameter.spec.parameter, init_std=1.0)), 7, parameter
            )
        if not parameter.layer_accumulates:
            accumulation.collect_from_autograd(parameter, ops)
    sync = GradientSync(buckets, mesh, microbatches=1)
    accumulation.on_accumulated = sync.accumulated

    sync.begin()
    x = (
        tokens()
        if name == "embedding"
        else cut(random(kind.shape, 1), kind.cut_in, rank, tp, sequence_parallel).clone().requires_grad_()
    )
    y = layer(x)
    whole_shape = (S, B) if name == "cross-entropy" else (S, B, 24) if name == "column" else (S, B, H)
    y.backward(cut(random(whole_shape, 2), kind.cut_out, rank, tp, sequence_parallel))
    sync.finish()

    input_gradient = None if x.grad is None else x.grad.numpy()
    weights = [whole_piece(p.spec, p) for p in parameters]
    return Layer(y.detach().numpy(), input_gradient, weights, [whole_piece(p.spec, p.main_grad) for p in parameters])


def join(parts: list[np.ndarray], how: str, sequence_parallel: bool) -> np.ndarray:
    """Join the ranks' parts to the global tensor. Parts that are not split must be bitwise equal."""
    if how == "last":
        return np.concatenate(parts, -1)
    if how == "last-of-two":
        return np.concatenate([part.reshape(*part.shape[:-1], 2, -1) for part in parts], -1).reshape(S, B, -1)
    if how == "sequence" and sequence_parallel:
        return np.concatenate(parts, 0)
    assert all(np.array_equal(part, parts[0]) for part in parts)
    return parts[0]


class Whole(NamedTuple):
    output: np.ndarray
    input_gradient: np.ndarray | None
    weights: Tensors
    gradients: Tensors


def gathered(ranks: RankPool, name: str, tp: int, sequence_parallel: bool) -> Whole:
    kind = KINDS[name]
    results = ranks.run(tp, run_layer, name, tp, sequence_parallel)
    weights, drift = assemble([part.weights for part in results], "weight")
    gradients, also = assemble([part.gradients for part in results], "gradient")
    assert drift + also == []
    inputs = [part.input_gradient for part in results if part.input_gradient is not None]
    return Whole(
        join([part.output for part in results], kind.cut_out, sequence_parallel),
        join(inputs, kind.cut_in, sequence_parallel) if inputs else None,
        weights,
        gradients,
    )


def unsharded(name: str, weights: Tensors) -> Whole:
    """Compute torch's own operation with the global weights."""
    leaves = {key: torch.from_numpy(value.copy()).requires_grad_() for key, value in weights.items()}
    layer = next(iter(leaves), "").rpartition(".")[0]
    x: Any = tokens() if name == "embedding" else random(KINDS[name].shape, 1).requires_grad_()
    if name == "column":
        y = F.linear(x, leaves[f"{layer}.weight"].flatten(0, 1), leaves[f"{layer}.bias"].flatten())
    elif name == "row":
        y = F.linear(x, leaves[f"{layer}.weight"], leaves[f"{layer}.bias"])
    elif name == "norm":
        y = F.layer_norm(x, (H,), leaves[f"{layer}.weight"], leaves[f"{layer}.bias"], MODEL.norm_eps)
    elif name == "embedding":
        y = F.embedding(x, leaves[f"{layer}.weight"])
    else:
        y = F.cross_entropy(x.flatten(0, 1), tokens().flatten(), reduction="none").view(S, B)
    y.backward(random(tuple(y.shape), 2))
    gradients = {key: leaf.grad.numpy() for key, leaf in leaves.items()}
    return Whole(y.detach().numpy(), None if name == "embedding" else x.grad.numpy(), weights, gradients)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [thorough(2, False), thorough(2, True), thorough(4, False), (4, True)]
)
@pytest.mark.parametrize("name", KINDS)
def test_layer_equals_the_unsharded_one(ranks: RankPool, name: str, tp: int, sequence_parallel: bool) -> None:
    sharded = gathered(ranks, name, tp, sequence_parallel)
    plain = name in ("column", "row", "norm", "embedding", "cross-entropy")
    whole = unsharded(name, sharded.weights) if plain else gathered(ranks, name, 1, False)
    close = {"rtol": 1e-10, "atol": 1e-11}
    np.testing.assert_allclose(sharded.output, whole.output, **close)
    if whole.input_gradient is not None:
        np.testing.assert_allclose(sharded.input_gradient, whole.input_gradient, **close)
    assert sharded.gradients.keys() == whole.gradients.keys()
    for key, gradient in whole.gradients.items():
        assert np.array_equal(sharded.weights[key], whole.weights[key])
        np.testing.assert_allclose(sharded.gradients[key], gradient, **close, err_msg=key)
