"""What the tensors of each family of Hugging Face models are called, and which of ours holds the same numbers."""

from __future__ import annotations

from dataclasses import dataclass

from frontier_llm.checkpoint.rules import Packing, TensorRule, gate_and_up, qkv, same, turned, vocabulary
from frontier_llm.config import ModelConfig


@dataclass(frozen=True)
class FusedNames:
    """Of a family that keeps q, k and v in one tensor and whose MLP has no gate."""

    embedding: str
    final_norm: str
    head: str
    layers: str
    norms: tuple[str, str]  # before attention, before the MLP
    matrices: tuple[str, str, str, str]  # qkv, attention's output, MLP's up and down
    packing: Packing
    positions: str | None = None
    turned: bool = False  # matrices are kept as (in, out)

    def rules(self, m: ModelConfig) -> list[TensorRule]:
        """One for each of our parameters."""
        first, last = _ends(m, self.embedding, self.final_norm, self.head)
        rules = [first]
        if self.positions:
            rules.append(same("embedding.position.weight", (m.sequence_length, m.hidden), self.positions))
        H, F = m.hidden, m.ffn_hidden
        for i in range(m.layers):
            ours, theirs = f"layers.{i}", f"{self.layers}.{i}"
            for norm, name in zip(("attention_norm", "mlp_norm"), self.norms, strict=True):
                rules += _norms(m, f"{ours}.{norm}", f"{theirs}.{name}")
            fused, output, up, down = (f"{theirs}.{name}" for name in self.matrices)
            for leaf in ("weight", "bias") if m.bias else ("weight",):
                bias = leaf == "bias"
                rules.append(qkv(f"{ours}.attention.qkv.{leaf}", m, (f"{fused}.{leaf}",), self.packing, bias, self.turned and not bias))
            rules += _linear(m, f"{ours}.attention.output", (H, H), output, self.turned)
            rules += _linear(m, f"{ours}.mlp.up", (F, H), up, self.turned) + _linear(m, f"{ours}.mlp.down", (H, F), down, self.turned)
        return rules + last


GPT2 = FusedNames(
    "transformer.wte.weight", "transformer.ln_f", "lm_head.weight", "transformer.h", ("ln_1", "ln_2"),
    ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), "blocks", "transformer.wpe.weight", turned=True,
)  # fmt: skip
NEOX = FusedNames(
    "gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm", "embed_out.weight", "gpt_neox.layers",
    ("input_layernorm", "post_attention_layernorm"),
    ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), "per_head",
)  # fmt: skip
MPT = FusedNames(
    "transformer.wte.weight", "transformer.norm_f", "lm_head.weight", "transformer.blocks", ("norm_1", "norm_2"),
    ("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj"), "blocks",
)  # fmt: skip


def llama_rules(m: ModelConfig) -> list[TensorRule]:
    """Llama and what is named like it: q, k and v in three tensors, gate and up in two."""
    first, last = _ends(m, "model.embed_tokens.weight", "model.norm", "lm_head.weight")
    rules = [first]
    for i in range(m.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        rules += _norms(m, f"{ours}.attention_norm", f"{theirs}.input_layernorm")
        for leaf, in_attention, in_mlp in (("weight", True, True), ("bias", m.has_qkv_bias, m.bias)):
            bias = leaf == "bias"
            if in_attention:
                parts = tuple(f"{theirs}.self_attn.{part}_proj.{leaf}" for part in "qkv")
                rules.append(qkv(f"{ours}.attention.qkv.{leaf}", m, parts, "separate", bias))
            if in_mlp:
                pair = (f"{theirs}.mlp.gate_proj.{leaf}", f"{theirs}.mlp.up_proj.{leaf}")
                rules.append(gate_and_up(f"{ours}.mlp.up.{leaf}", m, pair, bias))
        rules += _linear(m, f"{ours}.attention.output", (m.hidden, m.heads * m.dim_per_head), f"{theirs}.self_attn.o_proj")
        rules += _norms(m, f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm")
        rules += _linear(m, f"{ours}.mlp.down", (m.hidden, m.ffn_hidden), f"{theirs}.mlp.down_proj")
    return rules + last


def _norms(model: ModelConfig, ours: str, theirs: str) -> list[TensorRule]:
    leaves = ("weight", "bias") if model.norm_bias else ("weight",)
    return [same(f"{ours}.{leaf}", (model.hidden,), f"{theirs}.{leaf}") for leaf in leaves]


def _linear(model: ModelConfig, ours: str, shape: tuple[int, int], theirs: str, turn: bool = False) -> list[TensorRule]:
    weight = (turned if turn else same)(f"{ours}.weight", shape, f"{theirs}.weight")
    return [weight, same(f"{ours}.bias", shape[:1], f"{theirs}.bias")] if model.bias else [weight]


def _ends(model: ModelConfig, embedding: str, final_norm: str, head: str) -> tuple[TensorRule, list[TensorRule]]:
    """Embedding in front; final norm and head behind."""
    last = _norms(model, "final_norm", final_norm)
    if not model.tied_embeddings:
        last.append(vocabulary("head.weight", model, head))
    return vocabulary("embedding.token.weight", model, embedding), last
