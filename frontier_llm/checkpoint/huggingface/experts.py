"""The families with experts, key by key. Weights of their auxiliary losses are left alone: a coefficient means something else in every program."""

from __future__ import annotations

from typing import Any

from frontier_llm.checkpoint.huggingface.llama import ConfigJson, read_llama_like, read_windowed, write_llama_like
from frontier_llm.config import ModelConfig, MoeConfig


def read_mixtral(f: ConfigJson) -> dict[str, Any]:
    """Our fields of Mixtral."""
    f.fixed(router_jitter_noise=0.0)
    return {**read_windowed(f), "moe": {"experts": f.get("num_local_experts", 8), "top_k": f.get("num_experts_per_tok", 2)}}


def write_mixtral(m: ModelConfig) -> dict[str, Any]:
    """Mixtral's keys."""
    moe = _moe(m)
    sizes = {"num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k, "intermediate_size": m.expert_hidden}
    return {**write_llama_like(m), **sizes, "sliding_window": None}


def read_qwen3_moe(f: ConfigJson) -> dict[str, Any]:
    """Our fields of Qwen 3 MoE."""
    f.fixed(use_sliding_window=False, attention_bias=False, decoder_sparse_step=1)
    dense = f.get("mlp_only_layers", None) or []
    if dense != list(range(len(dense))):
        f.refuse("mlp_only_layers", dense, "the first layers, or none")
    moe = {**_chosen(f, "num_experts"), "expert_hidden": f.need("moe_intermediate_size"), "dense_layers": len(dense)}
    return {**read_llama_like(f), "moe": moe}


def write_qwen3_moe(m: ModelConfig) -> dict[str, Any]:
    """Qwen 3 MoE's keys."""
    moe = _moe(m)
    return {
        **write_llama_like(m), "attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1,
        "num_experts": moe.experts, "num_experts_per_tok": moe.top_k, "norm_topk_prob": moe.normalise,
        "moe_intermediate_size": m.expert_hidden, "mlp_only_layers": list(range(moe.dense_layers)),
    }  # fmt: skip


def read_olmoe(f: ConfigJson) -> dict[str, Any]:
    """Our fields of OLMoE."""
    f.fixed(clip_qkv=None, attention_bias=False)
    return {**read_llama_like(f), "moe": _chosen(f, "num_experts")}


def write_olmoe(m: ModelConfig) -> dict[str, Any]:
    """OLMoE's keys."""
    moe = _moe(m)
    sizes = {"num_experts": moe.experts, "num_experts_per_tok": moe.top_k, "norm_topk_prob": moe.normalise}
    return {**write_llama_like(m), **sizes, "intermediate_size": m.expert_hidden, "attention_bias": False, "clip_qkv": None}


def read_dots1(f: ConfigJson) -> dict[str, Any]:
    """Our fields of dots.llm1."""
    f.fixed(attention_bias=False, n_group=1, topk_group=1)
    kinds = set(f.get("layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        f.refuse("layer_types", sorted(kinds), "full_attention alone")
    width = f.need("moe_intermediate_size")
    moe = {
        **_chosen(f, "n_routed_experts"), "expert_hidden": width, "shared_hidden": width * f.need("n_shared_experts"),
        "dense_layers": f.get("first_k_dense_replace", 0), "score": "sigmoid", "selection_bias": True,
        "scale": float(f.get("routed_scaling_factor", 1.0)),
    }  # fmt: skip
    return {**read_llama_like(f), "moe": moe}


def write_dots1(m: ModelConfig) -> dict[str, Any]:
    """dots.llm1's keys."""
    moe = _moe(m)
    return {
        **write_llama_like(m), "attention_bias": False, "n_group": 1, "topk_group": 1, "sliding_window": None,
        "layer_types": ["full_attention"] * m.layers, "n_routed_experts": moe.experts, "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalise, "moe_intermediate_size": m.expert_hidden, "routed_scaling_factor": moe.scale,
        "n_shared_experts": moe.shared_hidden // m.expert_hidden, "first_k_dense_replace": moe.dense_layers,
    }  # fmt: skip


def _chosen(f: ConfigJson, experts: str) -> dict[str, Any]:
    """transformers 5 may write another name for the number of experts than 4 did."""
    number = f.get("num_local_experts", 0) or f.need(experts)
    return {"experts": number, "top_k": f.need("num_experts_per_tok"), "normalise": f.get("norm_topk_prob", False)}


def _moe(m: ModelConfig) -> MoeConfig:
    assert m.moe is not None
    return m.moe
