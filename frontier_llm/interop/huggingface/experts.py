"""Configuration of families with experts, beyond the keys that families.py lists.

Coefficients of auxiliary losses are not converted, because their meaning differs between programs.
"""

from __future__ import annotations

from typing import Any

from frontier_llm.config import ModelConfig
from frontier_llm.interop.huggingface.llama import ConfigJson, read_llama_like, read_windowed, write_llama_like


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
