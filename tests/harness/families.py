"""Model families that the parity tests compare and that `first_gpu.sh` trains: their settings without sizes."""

from __future__ import annotations

from typing import Any

# One of a head's two rotations is between fast and slow, the other is slow.
SLOWER = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.5, "original_sequence_length": 12}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {
        "position": "learned",
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "bias": True,
        "norm_bias": True,
        "tied_embeddings": True,
    },
    "llama": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "kv_heads": 4,
        "qkv_bias": True,
        "rope_scaling": SLOWER,
    },
    "mpt": {"position": "alibi", "norm": "layernorm", "activation": "gelu", "tied_embeddings": True},
    "neox": {
        "position": "rope",
        "rope_fraction": 0.5,
        "norm": "layernorm",
        "activation": "gelu",
        "bias": True,
        "norm_bias": True,
        "parallel_residual": True,
    },
}

_EXPERTS = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "kv_heads": 4, "layers": 4}
# The weights of the router losses are large enough to change the compared gradients. test_experts.py runs these
# families.
EXPERT_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**_EXPERTS, "moe": {"experts": 8, "top_k": 2, "expert_hidden": 16, "balance_weight": 0.3}},
    "olmoe": {
        **_EXPERTS,
        "qk_norm": "full",
        "moe": {
            "experts": 8,
            "top_k": 3,
            "expert_hidden": 16,
            "normalise": False,
            "balance_weight": 0.1,
            "z_weight": 0.1,
        },
    },
    "deepseek": {
        **_EXPERTS,
        "qk_norm": "head",
        "moe": {
            "experts": 8,
            "top_k": 3,
            "expert_hidden": 16,
            "dense_layers": 1,
            "shared_hidden": 16,
            "shared_gate": True,
            "score": "sigmoid",
            "selection_bias": True,
            "bias_rate": 0.05,
            "scale": 1.5,
            "balance_weight": 0.1,
        },
    },
}

# test_families.py runs these families.
FURTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "olmo2": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "kv_heads": 4,
        "qk_norm": "full",
        "norm_placement": "post",
    },
    "gemma2": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "geglu_tanh",
        "kv_heads": 4,
        "head_dim": 6,
        "norm_placement": "both",
        "norm_plus_one": True,
        "sliding_window": 5,
        "full_attention_every": 2,
        "score_width": 4,
        "score_softcap": 1.0,
        "logit_softcap": 3.0,
        "scaled_embedding": True,
        "tied_embeddings": True,
    },
}

ALL_FAMILIES = {**FAMILIES, **EXPERT_FAMILIES, **FURTHER_FAMILIES}
