"""Parameters: exact, by name and global shape, per stage and tensor-parallel rank, as the runtime allocates them."""

from __future__ import annotations

import numpy as np

from frontier_llm.blueprint import StageSpec
from frontier_llm.config import ModelConfig
from frontier_llm.costs.workload import Number, Workload


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model: name → global shape. A tied head has no entry of its own."""
    S, H, V = model.sequence_length, model.hidden, model.padded_vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.token.weight": (V, H)}
    if model.position == "learned":
        shapes["embedding.position.weight"] = (S, H)
    for index in range(model.layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer_shapes(model).items()})
    shapes.update(norm_shapes("final_norm", H, model))
    if not model.tied_embeddings:
        shapes["head.weight"] = (V, H)
    return shapes


def layer_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of one layer; the name's part after 'layers.N.' → global shape."""
    H, A, G, D, F = model.hidden, model.heads, model.num_kv_heads, model.dim_per_head, model.ffn_hidden
    shapes: dict[str, tuple[int, ...]] = norm_shapes("attention_norm", H, model)
    linears: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # weight, bias
        "attention.qkv": ((G, A // G + 2, D, H), (G, A // G + 2, D)),
        "attention.output": ((H, A * D), (H,)),
        "mlp.up": ((2, F, H), (2, F)) if model.gated else ((F, H), (F,)),
        "mlp.down": ((H, F), (H,)),
    }
    for name, (weight, bias) in linears.items():
        if name == "mlp.up":
            shapes.update(norm_shapes("mlp_norm", H, model))
        shapes[f"{name}.weight"] = weight
        if model.has_qkv_bias if name == "attention.qkv" else model.bias:
            shapes[f"{name}.bias"] = bias
    return shapes


def norm_shapes(name: str, H: int, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """A norm's weight and, for LayerNorm with norm_bias, its bias."""
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (H,)}
    if model.norm == "layernorm" and model.norm_bias:
        shapes[f"{name}.bias"] = (H,)
    return shapes


def total_parameters(model: ModelConfig) -> int:
    """All parameters of the model, padding rows included, a tied head once."""
    return sum(int(np.prod(shape)) for shape in parameter_shapes(model).values())


def rank_parameters(model: ModelConfig, stage: StageSpec, tp: int, last_holds_tied_copy: bool = True) -> int:
    """Parameters that one tensor-parallel rank of a stage allocates.

    Column- and row-parallel weights and vocabulary rows are cut by tp; norms, row-parallel biases and position embeddings are
    whole on every rank. A tied head on another stage than the embedding is a second copy.
    """
    layer = sum(int(np.prod(shape)) // (tp if _cut(name) else 1) for name, shape in layer_shapes(model).items())
    count = layer * stage.num_layers
    H = model.hidden
    vocabulary = model.padded_vocab_size * H // tp
    if stage.embedding:
        count += vocabulary + (model.sequence_length * H if model.position == "learned" else 0)
    if stage.head:
        count += sum(int(np.prod(shape)) for shape in norm_shapes("final_norm", H, model).values())
        if not model.tied_embeddings or (not stage.embedding and last_holds_tied_copy):
            count += vocabulary
    return count


def _cut(name: str) -> bool:
    """Whether tensor parallelism splits this parameter."""
    return not (name.endswith(("attention.output.bias", "mlp.down.bias")) or "norm" in name)


def stage_columns(stages: tuple[StageSpec, ...]) -> np.ndarray:
    """Rows layers, embedding, head over virtual stages; a row reshaped to (chunks, pp) has the pipeline ranks as its columns."""
    return np.array([(stage.num_layers, stage.embedding, stage.head) for stage in stages], dtype=float).T


def stage_parameters(w: Workload, layers: Number, embedding: Number, head: Number) -> Number:
    """`rank_parameters` for arrays: `layers` layers, with the embedding and/or the head where true."""
    H, tp = np.asarray(w.H, dtype=float), np.asarray(w.tp, dtype=float)
    heads, groups = np.asarray(w.A, dtype=float) * w.D, np.asarray(w.G, dtype=float) * w.D
    F, gates = np.asarray(w.F, dtype=float), 1 + np.asarray(w.gated)
    norm = H * (1 + np.asarray(w.norm_bias))
    cut = H * (heads + 2 * groups) + H * heads + H * F * gates + H * F
    biases = np.asarray(w.qkv_bias) * (heads + 2 * groups) / tp + np.asarray(w.bias) * (gates * F / tp + 2 * H)
    per_layer = cut / tp + biases + 2 * norm
    vocabulary = np.asarray(w.V, dtype=float) * H / tp
    front = np.where(embedding, vocabulary + np.asarray(w.learned_positions) * w.S * H, 0.0)
    own_head = (np.asarray(w.tied) == 0) | ~np.asarray(embedding, dtype=bool)
    back = np.where(head, norm + np.where(own_head, vocabulary, 0.0), 0.0)
    return per_layer * layers + front + back
