"""Configuration keys of the families derived from Llama, and the reader of config.json.

Families with experts need keys beyond those that families.py lists. Coefficients of auxiliary losses are not converted,
because their meaning differs between programs.
"""

from __future__ import annotations

from typing import Any

from frontier_llm.config import ModelConfig
from frontier_llm.interop.fields import Fields

ROPE_DEFAULT_THETA = 10000.0
# window of transformers' Mistral if the key is missing
MISTRAL_DEFAULT_WINDOW = 4096
# Llama 3.1's scaling: their name → our name
_SCALING = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_sequence_length",
}  # fmt: skip
_OUR_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}  # their name → our name


class ConfigJson(Fields):
    """Fields of a model's config.json, with the keys of Llama-like families."""

    def rope(
        self, theta_key: str, fraction_key: str, default_fraction: float, kinds: tuple[str, ...] = ("default",)
    ) -> dict[str, Any]:
        """Return our rope_ fields, from `rope_parameters` (transformers 5) or from the older keys.

        `kinds` are the supported types of rotation.
        """
        new = self.get("rope_parameters", {})
        scaling = self.get("rope_scaling", {})
        kind = new.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
        if kind not in kinds:
            self.refuse("rope_parameters.rope_type", kind, " or ".join(map(repr, kinds)))
        factor = {**scaling, **new}.get("factor", 1)
        if kind == "default" and factor != 1:
            self.refuse("rope_parameters.factor", factor, "no factor if there is no rope_type")
        theta = new.get("rope_theta", self.get(theta_key, ROPE_DEFAULT_THETA))
        fraction = new.get("partial_rotary_factor", self.get(fraction_key, default_fraction))
        values = {"rope_theta": float(theta), "rope_fraction": float(fraction)}
        if kind == "default" or kind not in kinds:
            return values
        stretched = self.section("rope_parameters", {**scaling, **new})
        return {**values, "rope_scaling": {ours: stretched.need(theirs) for theirs, ours in _SCALING.items()}}

    def gelu(self, key: str, default: str) -> str:
        """Return our name of a GELU."""
        return _OUR_GELU.get(self.only(key, *_OUR_GELU, default=default), "gelu")


def read_llama_like(f: ConfigJson, activation: str = "hidden_act", function: str = "silu") -> dict[str, Any]:
    """Return our fields of a family that derives from Llama.

    `activation` is the key of the family's activation and `function` its only supported value.
    """
    f.only(activation, function, default=function)
    head_dim = f.get("head_dim", None)
    usual = f.get("hidden_size", 1) / f.get("num_attention_heads", 1)
    rope = f.rope("rope_theta", "partial_rotary_factor", 1.0, ("default", "llama3"))
    return {"kv_heads": f.get("num_key_value_heads", None), "head_dim": None if head_dim == usual else head_dim, **rope}


def write_llama_like(m: ModelConfig) -> dict[str, Any]:
    """Return the keys of a family that derives from Llama."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if m.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            **{theirs: getattr(m.rope_scaling, ours) for theirs, ours in _SCALING.items()},
        }
    return {
        "num_key_value_heads": m.num_kv_heads,
        "head_dim": m.dim_per_head,
        "hidden_act": "silu",
        "rope_theta": m.rope_theta,
        "rope_parameters": {**scaling, "rope_theta": m.rope_theta},
        "rope_scaling": scaling if m.rope_scaling else None,
    }


def read_windowed(f: ConfigJson, default_window: int | None = None, function: str = "silu") -> dict[str, Any]:
    """Return the fields of `read_llama_like`, and a window if it is shorter than the context.

    `default_window` is the window of a configuration without the key. `function` is the activation function that the
    family requires.
    """
    window = f.content.get("sliding_window", default_window)
    narrow = window is not None and window < f.get("max_position_embeddings", 131072)
    return {**read_llama_like(f, function=function), "sliding_window": window if narrow else None}


def read_mixtral(f: ConfigJson) -> dict[str, Any]:
    """Return our fields of a Mixtral configuration."""
    f.fixed(router_jitter_noise=0.0)
    return read_windowed(f)


def write_mixtral(m: ModelConfig) -> dict[str, Any]:
    """Return Mixtral's keys."""
    return {**write_llama_like(m), "intermediate_size": m.expert_hidden, "sliding_window": None}


def read_qwen3_moe(f: ConfigJson) -> dict[str, Any]:
    """Return our fields of a Qwen 3 MoE configuration."""
    dense = f.get("mlp_only_layers", None) or []
    if dense != list(range(len(dense))):
        f.refuse("mlp_only_layers", dense, "the first layers, or no layers")
    return {**read_llama_like(f), "moe": {"dense_layers": len(dense)}}


def write_qwen3_moe(m: ModelConfig) -> dict[str, Any]:
    """Return Qwen 3 MoE's keys."""
    return {**write_llama_like(m), "mlp_only_layers": list(range(m.routed_layers.start))}


def read_dots1(f: ConfigJson) -> dict[str, Any]:
    """Return our fields of a dots.llm1 configuration."""
    kinds = set(f.get("layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        f.refuse("layer_types", sorted(kinds), "only full_attention")
    return {
        **read_llama_like(f),
        "moe": {"shared_hidden": f.get("moe_intermediate_size", 1) * f.need("n_shared_experts")},
    }


def write_dots1(m: ModelConfig) -> dict[str, Any]:
    """Return dots.llm1's keys."""
    shared = 0 if m.moe is None else m.moe.shared_hidden // m.expert_hidden
    return {
        **write_llama_like(m),
        "sliding_window": None,
        "layer_types": ["full_attention"] * m.layers,
        "n_shared_experts": shared,
    }
