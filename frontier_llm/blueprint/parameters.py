"""The parameters of a model: name, global shape, sharding, initialisation and weight decay of each.

Torch modules, cost models, optimizers, checkpoints and converters all use these declarations. The global shape of a
fused weight is chosen so that every tensor-parallel part is a rectangle. QKV is (kv_heads, queries_per_kv + 2,
head_dim, H), and gate/up is (2, F, H). `pieces` names the tensors of a fused weight.
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
    """A virtual pipeline stage: consecutive layers, and optionally the embedding before or the head after them."""

    first_layer: int
    num_layers: int
    embedding: bool  # True: the stage has the token embedding and, if the model has one, the learned position embedding
    head: bool  # True: the stage has the final norm, the output head and the loss

    @property
    def layers(self) -> range:
        """Global indices of the layers."""
        return range(self.first_layer, self.first_layer + self.num_layers)


VOCABULARY = (
    "embedding.token.weight",
    "head.weight",
)  # One row per token. Rows from vocab_size on are padding, which is never read and gets no gradient.
Number = Any  # An int, or a numpy array of ints with one element per layout.


class How(Enum):
    """Relation between the copies of a parameter on the ranks of an axis that does not split it."""

    REPLICATED = "replicated"  # the same tensor and the same gradient on each rank
    PARTIAL = "partial"  # the same tensor, but the gradient is the sum of the ranks' gradients


@dataclass(frozen=True)
class Split:
    """Split of a parameter along `dim` into equal parts, one for each rank of an axis."""

    dim: int


class ParameterKind(Enum):
    """The role of a parameter in the model, by which optimizers choose an update."""

    MATRIX = "matrix"
    EXPERTS = "experts"  # one matrix per expert, stacked along dim 0
    EMBEDDING = "embedding"  # token or position embedding, or the output head
    VECTOR = "vector"  # norms and biases


@dataclass(frozen=True)
class Piece:
    """One tensor of a fused parameter (for example q in qkv): indices [start, stop) along `dim` of the global shape."""

    name: str
    dim: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of indices along `dim`."""
        return self.stop - self.start

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the global shape of this piece of a fused parameter of shape `shape`."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class Parameter:
    """Declaration of one parameter of the model. The parameter is replicated over all mesh axes that `axes` lacks."""

    name: str  # dotted, unique in the model, the same on every layout: "layers.3.attention.qkv.weight"
    shape: tuple[int, ...]  # global shape
    kind: ParameterKind
    axes: Mapping[str, Split | How] = field(default_factory=dict)
    init_std: float | None = None  # normal(0, std), random by (seed, name, position); None = constant `init_value`
    init_value: float = 0.0
    pieces: tuple[Piece, ...] = ()
    # Number of uses of the parameter per microbatch on a rank. Each use adds a gradient. 2: the rank uses the parameter
    # as embedding and as head. 0: no gradient.
    uses: int = 1
    grouped: bool = False  # The index of dim 0 is the key/value head, with its query heads in dim 1.
    wide: bool = False  # Always kept in fp32 (in fp64 if the model computes in fp64).
    # True: the parameter is used only in training. The parameter has no effect on outputs, and other formats do not
    # have it.
    of_training: bool = False

    @property
    def tensor_axis(self) -> str:
        """The tensor-parallel axis of this parameter: "etp" for experts, otherwise "tp"."""
        return "etp" if self.kind is ParameterKind.EXPERTS else "tp"

    @property
    def replicas(self) -> str:
        """The axis whose ranks hold the same part of the parameter and train it on different samples.

        Gradients are summed over this axis, and ZeRO slices the optimizer state over it.
        """
        return "edp" if "ep" in self.axes else "dp"

    @property
    def decay(self) -> bool:
        """True if weight decay applies. As in Megatron, matrices and embeddings decay, biases and norms do not."""
        return self.kind is not ParameterKind.VECTOR

    @property
    def numel(self) -> int:
        """Number of elements of the global parameter."""
        return prod(self.shape)

    def rank_numel(self, degrees: Mapping[str, Number]) -> Number:
        """Return the number of elements that one rank holds. `degrees` may be arrays over many layouts."""
        parts = prod(degrees.get(axis, 1) for axis, how in self.axes.items() if isinstance(how, Split))
        return self.numel // parts

    def partial_axes(self) -> tuple[str, ...]:
        """Return the axes over which gradients are summed before they are summed over the replicas."""
        return tuple(axis for axis, how in self.axes.items() if how is How.PARTIAL)


def norm_parameters(model: ModelConfig, name: str, across: Mapping[str, How]) -> Iterator[Parameter]:
    """Yield the weight of a norm and, if `model.norm_bias` is set, its bias. `across` becomes the `axes` of both
    parameters.
    """
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
    """Yield the parameters of one transformer block, in the order in which the forward pass uses them."""
    H = model.hidden
    A = model.heads
    G = model.num_kv_heads
    D = model.dim_per_head
    Q = A // G
    name = f"layers.{layer}"
    across = sequence_axes(sequence_parallel)
    # the initial weights of layers that add to the residual stream shrink with depth, as in GPT-2 and Megatron
    output_std = model.init_std / (2.0 * model.layers) ** 0.5

    def column(
        part: str,
        shape: tuple[int, ...],
        dim: int,
        bias: bool,
        pieces: tuple[Piece, ...] = (),
    ) -> Iterator[Parameter]:
        """Yield a layer whose output features (all dims but the last) are cut over tp along `dim`."""
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
        """Yield a layer whose input features are cut over tp. Its bias is not cut and is added once."""
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
            # If all heads share the weight, each rank has only the gradients from its own heads, so the gradients are
            # summed over tp.
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
    """Yield the parameters of the router and of the experts.

    Each tensor rank routes its own part of the sequence, with or without sequence parallelism. The router's gradient
    must therefore be summed over tp.
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
    """Yield the parameters of a virtual stage, in the order of the model.

    With tied weights the embedding and the head are one parameter, and `tied_ranks` pipeline ranks hold it. If two
    ranks hold it, each rank has a copy, and gradients are summed over the axis "tied". If `embedding_elsewhere` is set,
    another virtual stage of the same rank declares the tied parameter.
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
    """Yield the parameters of one pipeline rank, which holds `stages`, in model order.

    If the rank has both the embedding and a tied head, their parameter is yielded once.
    """
    embeds = any(stage.embedding for stage in stages)
    heads = any(stage.head for stage in stages)
    for stage in stages:
        elsewhere = embeds and not stage.embedding
        yield from stage_parameters(model, stage, sequence_parallel, 1 if embeds and heads else 2, elsewhere)


def model_parameters(model: ModelConfig) -> dict[str, Parameter]:
    """Return all parameters of the model by name. Padding rows are included, and a tied head is counted once."""
    everything = StageSpec(0, model.layers, embedding=True, head=True)
    return {parameter.name: parameter for parameter in rank_parameters(model, [everything])}


def total_parameters(model: ModelConfig) -> int:
    """Return the number of elements of the model. Padding rows are included, and a tied head is counted once."""
    return sum(parameter.numel for parameter in model_parameters(model).values())


def layer_kinds(model: ModelConfig) -> list[tuple[int, int]]:
    """Return (index of the first layer, number of layers) of each kind: dense layers, then layers with experts."""
    experts = len(model.routed_layers)
    kinds = ((0, model.layers - experts), (model.routed_layers.start, experts))
    return [(layer, count) for layer, count in kinds if count]


def sequence_axes(sequence_parallel: bool) -> dict[str, How]:
    """Return the `axes` of parameters that are applied to activations between blocks, for example norms.

    With sequence parallelism the gradient of a tp rank covers only its own tokens. The gradients must then be summed
    over tp (PARTIAL).
    """
    return {"tp": How.PARTIAL} if sequence_parallel else {}
