"""What a model is made of: every parameter's name, global shape, place on the mesh, start and decay, written once.

The torch modules hold these parameters, costs count them, optimizers slice them, checkpoints and converters name them.
A fused weight has a global shape in which every tensor-parallel part is a rectangle: QKV is (kv_heads, queries_per_kv +
2, head_dim, H), gate/up is (2, F, H); `pieces` names what it is fused of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

from frontier_llm.config import ModelConfig, MoeConfig


@dataclass(frozen=True)
class StageSpec:
    """A run of consecutive layers, with the embedding in front of the first one and the head behind the last one."""

    first_layer: int
    num_layers: int
    embedding: bool  # token (and learned position) embedding in front
    head: bool  # final norm, output head and loss behind

    @property
    def layers(self) -> range:
        """Global indices of its layers."""
        return range(self.first_layer, self.first_layer + self.num_layers)


VOCABULARY = (
    "embedding.token.weight",
    "head.weight",
)  # rows are tokens; past vocab_size padding, which no logit reads and no gradient reaches
Number = Any  # int, or a numpy array of ints: degrees of many layouts at once


class How(Enum):
    """How the ranks of an axis share a parameter that is not split over them."""

    REPLICATED = "replicated"  # the same tensor and the same gradient on each rank
    PARTIAL = "partial"  # the same tensor, and each rank's gradient is a summand


@dataclass(frozen=True)
class Split:
    """Cut evenly along `dim` over the ranks of an axis."""

    dim: int


class ParameterKind(Enum):
    """What a parameter is to an optimizer."""

    MATRIX = "matrix"
    EXPERTS = "experts"  # a matrix for each expert, one behind the other along dim 0
    EMBEDDING = "embedding"  # rows are looked up, or scored by the head
    VECTOR = "vector"  # norms and biases


@dataclass(frozen=True)
class Piece:
    """One of the tensors that a fused parameter is made of: entries [start, stop) along `dim` of the global shape."""

    name: str
    dim: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Entries along `dim`."""
        return self.stop - self.start

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, of a fused parameter of this shape."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class Parameter:
    """One global parameter. Axes of the mesh that `axes` does not name hold it replicated."""

    name: str  # dotted, unique in the model, the same on every layout: "layers.3.attention.qkv.weight"
    shape: tuple[int, ...]  # global
    kind: ParameterKind
    axes: Mapping[str, Split | How] = field(default_factory=dict)
    init_std: float | None = None  # normal(0, std) by (seed, name, position); None = constant `init_value`
    init_value: float = 0.0
    pieces: tuple[Piece, ...] = ()
    # gradient contributions per microbatch on a rank: 2 for an embedding that is also the rank's head; 0: no gradient
    uses: int = 1
    grouped: bool = False  # dim 0 counts key/value heads, each with its queries
    wide: bool = False  # kept in fp32 (fp64 under fp64) whatever the working type
    of_training: bool = False  # the model computes the same without it: no other format has it

    @property
    def tensor_axis(self) -> str:
        """The axis over which tensor parallelism would cut it."""
        return "etp" if self.kind is ParameterKind.EXPERTS else "tp"

    @property
    def replicas(self) -> str:
        """The axis whose ranks train the same part of it on other samples: gradients are summed over it, and ZeRO's
        slices cut over it.
        """
        return "edp" if "ep" in self.axes else "dp"

    @property
    def decay(self) -> bool:
        """Weight decay applies as in Megatron: to matrices and embeddings, not to biases and norms."""
        return self.kind is not ParameterKind.VECTOR

    @property
    def numel(self) -> int:
        """Elements of the global parameter."""
        return prod(self.shape)

    def rank_numel(self, degrees: Mapping[str, Number]) -> Number:
        """Elements that one rank holds; `degrees` may be arrays over many layouts."""
        parts = prod(degrees.get(axis, 1) for axis, how in self.axes.items() if isinstance(how, Split))
        return self.numel // parts

    def partial_axes(self) -> tuple[str, ...]:
        """Axes over which the ranks' gradients have to be summed before the sum over its replicas."""
        return tuple(axis for axis, how in self.axes.items() if how is How.PARTIAL)


def norm_parameters(model: ModelConfig, name: str, across: Mapping[str, How]) -> Iterator[Parameter]:
    """A norm's weight and, for LayerNorm with norm_bias, its bias."""
    yield Parameter(
        f"{name}.weight",
        (model.hidden,),
        ParameterKind.VECTOR,
        across,
        init_value=1.0 - model.norm_plus_one,
    )
    if model.norm_bias:
        yield Parameter(f"{name}.bias", (model.hidden,), ParameterKind.VECTOR, across)


def block_parameters(model: ModelConfig, layer: int, sequence_parallel: bool = False) -> Iterator[Parameter]:
    """One transformer block, in the order in which the forward pass uses it."""
    H = model.hidden
    A = model.heads
    G = model.num_kv_heads
    D = model.dim_per_head
    Q = A // G
    name = f"layers.{layer}"
    across = sequence_axes(sequence_parallel)
    # of what writes into the residual stream: scaled by depth as in GPT-2 and Megatron
    output_std = model.init_std / (2.0 * model.layers) ** 0.5

    def column(
        part: str,
        shape: tuple[int, ...],
        dim: int,
        bias: bool,
        pieces: tuple[Piece, ...] = (),
    ) -> Iterator[Parameter]:
        """Output features (all dims but the last) cut over tp along `dim`."""
        split = {"tp": Split(dim)}
        grouped = part == "attention.qkv"
        yield Parameter(
            name=f"{name}.{part}.weight",
            shape=shape,
            kind=ParameterKind.MATRIX,
            axes=split,
            init_std=model.init_std,
            pieces=pieces,
            grouped=grouped,
        )
        if bias:
            yield Parameter(f"{name}.{part}.bias", shape[:-1], ParameterKind.VECTOR, split, pieces=pieces)

    def row(part: str, shape: tuple[int, int]) -> Iterator[Parameter]:
        """Input features cut over tp; the bias is added once."""
        yield Parameter(f"{name}.{part}.weight", shape, ParameterKind.MATRIX, {"tp": Split(1)}, output_std)
        if model.bias:
            yield Parameter(f"{name}.{part}.bias", shape[:1], ParameterKind.VECTOR, across)

    def norm(part: str, *placements: str) -> Iterator[Parameter]:
        if model.norm_placement in placements:
            yield from norm_parameters(model, f"{name}.{part}", across)

    yield from norm("attention_norm", "pre", "both")
    qkv = (Piece("q", 1, 0, Q), Piece("k", 1, Q, Q + 1), Piece("v", 1, Q + 1, Q + 2))
    yield from column("attention.qkv", (G, Q + 2, D, H), 0, model.has_qkv_bias, qkv)
    if model.qk_norm is not None:
        for piece, heads in (("q", A), ("k", G)):
            # one weight for all heads sees on each tensor rank only that rank's heads
            shape, split = ((D,), How.PARTIAL) if model.qk_norm == "head" else ((heads, D), Split(0))
            yield Parameter(
                f"{name}.attention.{piece}_norm.weight",
                shape,
                ParameterKind.VECTOR,
                {"tp": split},
                init_value=1.0 - model.norm_plus_one,
            )
    yield from row("attention.output", (H, A * D))
    yield from norm("attention_output_norm", "post", "both")

    def mlp(part: str, F: int) -> Iterator[Parameter]:
        if model.gated:
            yield from column(f"{part}.up", (2, F, H), 1, model.bias, (Piece("gate", 0, 0, 1), Piece("up", 0, 1, 2)))
        else:
            yield from column(f"{part}.up", (F, H), 0, model.bias)
        yield from row(f"{part}.down", (H, F))

    yield from norm("mlp_norm", "pre", "both")
    if layer not in model.routed_layers:
        yield from mlp("mlp", model.ffn_hidden)
    else:
        moe = model.moe
        assert moe is not None
        yield from expert_parameters(model, moe, f"{name}.moe", output_std)
        if moe.shared_hidden:
            yield from mlp("moe.shared", moe.shared_hidden)
        if moe.shared_gate:
            yield Parameter(f"{name}.moe.shared_gate.weight", (1, H), ParameterKind.MATRIX, across, model.init_std)
    yield from norm("mlp_output_norm", "post", "both")


def expert_parameters(model: ModelConfig, moe: MoeConfig, name: str, output_std: float) -> Iterator[Parameter]:
    """The router and what it chooses from.

    Each tensor rank routes its own part of the sequence, with sequence parallelism or without: so the router's gradient
    is partial.
    """
    E = moe.experts
    H = model.hidden
    F = model.expert_hidden
    yield Parameter(
        name=f"{name}.router.weight",
        shape=(E, H),
        kind=ParameterKind.MATRIX,
        axes={"tp": How.PARTIAL},
        init_std=model.init_std,
        wide=True,
    )
    if moe.selection_bias:
        yield Parameter(f"{name}.router.bias", (E,), ParameterKind.VECTOR, uses=0, wide=True)
    if moe.balance == "global":
        yield Parameter(
            name=f"{name}.router.load",
            shape=(E,),
            kind=ParameterKind.VECTOR,
            init_value=1.0,
            uses=0,
            wide=True,
            of_training=True,
        )
    shape, pieces = ((E, 2, F, H), (Piece("gate", 1, 0, 1), Piece("up", 1, 1, 2))) if model.gated else ((E, F, H), ())
    across: dict[str, Split | How] = {"ep": Split(0), "etp": Split(len(shape) - 2)}
    yield Parameter(
        name=f"{name}.experts.up.weight",
        shape=shape,
        kind=ParameterKind.EXPERTS,
        axes=across,
        init_std=model.init_std,
        pieces=pieces,
    )
    across = {"ep": Split(0), "etp": Split(2)}
    yield Parameter(f"{name}.experts.down.weight", (E, H, F), ParameterKind.EXPERTS, across, output_std)


def stage_parameters(
    model: ModelConfig,
    stage: StageSpec,
    sequence_parallel: bool = False,
    tied_ranks: int = 1,
    embedding_elsewhere: bool = False,
) -> Iterator[Parameter]:
    """Everything that a virtual stage declares, in order.

    With tied weights the embedding and the head are one parameter. `tied_ranks` is how many pipeline ranks hold it (2:
    each has a copy, and gradients are summed over the axis "tied"); `embedding_elsewhere`: another virtual stage of
    this same rank has declared it.
    """
    across = sequence_axes(sequence_parallel)
    vocabulary = (model.padded_vocab_size, model.hidden)
    tied_head = stage.head and model.tied_embeddings
    if stage.embedding or (tied_head and not embedding_elsewhere):
        tied: dict[str, How] = {"tied": How.PARTIAL} if model.tied_embeddings and tied_ranks > 1 else {}
        uses = 2 if model.tied_embeddings and tied_ranks == 1 else 1
        yield Parameter(
            name=VOCABULARY[0],
            shape=vocabulary,
            kind=ParameterKind.EMBEDDING,
            axes={"tp": Split(0), **tied},
            init_std=model.init_std,
            uses=uses,
        )
    if stage.embedding and model.position == "learned":
        yield Parameter(
            "embedding.position.weight",
            (model.sequence_length, model.hidden),
            ParameterKind.EMBEDDING,
            across,
            model.init_std,
        )
    for layer in stage.layers:
        yield from block_parameters(model, layer, sequence_parallel)
    if stage.head:
        yield from norm_parameters(model, "final_norm", across)
        if not model.tied_embeddings:
            yield Parameter(VOCABULARY[1], vocabulary, ParameterKind.EMBEDDING, {"tp": Split(0)}, model.init_std)


def rank_parameters(
    model: ModelConfig,
    stages: Sequence[StageSpec],
    sequence_parallel: bool = False,
) -> Iterator[Parameter]:
    """Everything that one pipeline rank declares, its virtual stages in model order; an embedding that is also its
    own head stands once.
    """
    embeds = any(stage.embedding for stage in stages)
    heads = any(stage.head for stage in stages)
    for stage in stages:
        elsewhere = embeds and not stage.embedding
        yield from stage_parameters(model, stage, sequence_parallel, 1 if embeds and heads else 2, elsewhere)


def model_parameters(model: ModelConfig) -> dict[str, Parameter]:
    """All parameters of the model by name, padding rows included, a tied head once."""
    everything = StageSpec(0, model.layers, embedding=True, head=True)
    return {parameter.name: parameter for parameter in rank_parameters(model, [everything])}


def total_parameters(model: ModelConfig) -> int:
    """Elements of the model, padding rows included, a tied head once."""
    return sum(parameter.numel for parameter in model_parameters(model).values())


def layer_kinds(model: ModelConfig) -> list[tuple[int, int]]:
    """(the number of one, how many) of the layers that are alike: dense ones, then those with experts."""
    experts = len(model.routed_layers)
    kinds = ((0, model.layers - experts), (model.routed_layers.start, experts))
    return [(layer, count) for layer, count in kinds if count]


def sequence_axes(sequence_parallel: bool) -> dict[str, How]:
    """Of parameters that act between blocks: where the sequence is cut over tp, each rank's gradient sees only its
    tokens.
    """
    return {"tp": How.PARTIAL} if sequence_parallel else {}
