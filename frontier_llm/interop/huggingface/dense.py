"""Converts the configuration of model families without experts, beyond the keys that families.py lists.

A reading function returns fields of our model and refuses values that the model does not compute. A writing function
returns keys of a config.json.
"""

from __future__ import annotations

from typing import Any

from frontier_llm.config import ModelConfig
from frontier_llm.interop.huggingface.llama import ConfigJson, read_llama_like, read_windowed, write_llama_like

# transformers' MPT has no key for the largest ALiBi bias. Its slopes always end at 2^-8.
MPT_ALIBI_MAX_BIAS = 8.0
# transformers' MPT ignores expansion_ratio. Its MLP is always four times as wide as the residual stream.
MPT_EXPANSION = 4
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_GEMMA2_CAPS = {"score_softcap": ("attn_logit_softcapping", 50.0), "logit_softcap": ("final_logit_softcapping", 30.0)}
_THEIR_GELU = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def read_llama(f: ConfigJson) -> dict[str, Any]:
    """Return our fields of a Llama configuration."""
    bias = f.get("attention_bias", False)
    if f.get("mlp_bias", False) != bias:
        f.refuse("attention_bias", bias, f"the same as mlp_bias, {not bias}")
    return {**read_llama_like(f), "bias": bias}


def read_phi3(f: ConfigJson) -> dict[str, Any]:
    """Return our fields of a Phi 3 configuration."""
    # `f.rope` refuses Llama 3.1's scaling, and the longrope of Phi 3's variants with long context
    f.rope("rope_theta", "partial_rotary_factor", 1.0)
    return read_windowed(f)


def write_phi3(m: ModelConfig) -> dict[str, Any]:
    """Return Phi 3's keys."""
    rope = {"rope_type": "default", "rope_theta": m.rope_theta, "partial_rotary_factor": m.rope_fraction}
    return {
        **write_llama_like(m),
        "rope_parameters": rope,
        "partial_rotary_factor": m.rope_fraction,
        "sliding_window": m.sliding_window,
        "original_max_position_embeddings": m.sequence_length,
        "pad_token_id": None,
    }


def read_gemma2(f: ConfigJson) -> dict[str, Any]:
    """Return our fields of a Gemma 2 configuration."""
    f.fixed(use_bidirectional_attention=None)
    values = read_llama_like(f, "hidden_activation", "gelu_pytorch_tanh")
    every = 2
    kinds = f.get("layer_types", None)
    if kinds is not None:
        every = kinds.index(_FULL) + 1 if _FULL in kinds else 0
        if kinds != [_FULL if every and (layer + 1) % every == 0 else _SLIDING for layer in range(len(kinds))]:
            f.refuse("layer_types", kinds, f"{_FULL} at every n-th layer, and at no other layer")
    window = f.content.get("sliding_window", 4096)
    if every == 1 or window is None or window >= f.get("max_position_embeddings", 8192):
        window = None
        every = 0
    # for a soft cap, null means no cap, and a missing key means the default cap
    caps = {ours: f.content.get(theirs, default) for ours, (theirs, default) in _GEMMA2_CAPS.items()}
    width = f.get("query_pre_attn_scalar", 256)
    head_dim = f.need("head_dim")
    scores = {
        "score_width": None if width == head_dim else width,
        "sliding_window": window,
        "full_attention_every": every or None,
    }
    return {**values, **scores, **caps}


def write_gemma2(m: ModelConfig) -> dict[str, Any]:
    """Return Gemma 2's keys."""
    return {
        **write_llama_like(m),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": m.score_width or m.dim_per_head,
        "sliding_window": m.sliding_window or m.sequence_length,
        "layer_types": [_SLIDING if m.window_of(layer) else _FULL for layer in range(m.layers)],
        **{theirs: getattr(m, ours) for ours, (theirs, _) in _GEMMA2_CAPS.items()},
    }


def read_gpt2(f: ConfigJson) -> dict[str, Any]:
    """Return our fields of a GPT-2 configuration."""
    f.fixed(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return {
        "ffn_hidden": f.get("n_inner", 4 * f.get("n_embd", 1)),
        "activation": f.gelu("activation_function", "gelu_new"),
    }


def write_gpt2(m: ModelConfig) -> dict[str, Any]:
    """Return GPT-2's keys."""
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return {"n_inner": m.ffn_hidden, "activation_function": _THEIR_GELU[m.activation], **dropouts}


def read_neox(f: ConfigJson) -> dict[str, Any]:
    """Return our fields of a GPT-NeoX configuration."""
    return {"activation": f.gelu("hidden_act", "gelu"), **f.rope("rotary_emb_base", "rotary_pct", 0.25)}


def write_neox(m: ModelConfig) -> dict[str, Any]:
    """Return GPT-NeoX's keys."""
    return {
        "hidden_act": _THEIR_GELU[m.activation],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "rotary_emb_base": m.rope_theta,
        "rotary_pct": m.rope_fraction,
        "rope_theta": m.rope_theta,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": m.rope_theta,
            "partial_rotary_factor": m.rope_fraction,
        },
    }


def read_mpt(f: ConfigJson) -> dict[str, Any]:
    """Return our fields of a configuration of transformers' MPT."""
    f.section("attn_config").fixed(
        alibi=True,
        alibi_bias_max=MPT_ALIBI_MAX_BIAS,
        attn_type="multihead_attention",
        clip_qkv=None,
        softmax_scale=None,
        qk_ln=False,
        prefix_lm=False,
    )
    f.fixed(no_bias=True, logit_scale=None, tie_word_embeddings=True)
    return {"ffn_hidden": f.get("d_model", 1) * f.only("expansion_ratio", MPT_EXPANSION, default=MPT_EXPANSION)}


def read_foundry_mpt(f: ConfigJson) -> dict[str, Any]:
    """Return our fields of LLM Foundry's MPT, which computes more than transformers' and has other defaults."""
    attention = f.section("attn_config")
    mlp = f.section("ffn_config")
    attention.only("alibi", True, default=False)
    attention.fixed(rope=False, qk_gn=False, sliding_window_size=-1)
    mlp.fixed(ffn_type="mptmlp")
    mlp.only("ffn_act_fn", None, {"name": "gelu", "approximate": "none"})
    f.only("no_bias", True, default=False)
    f.only("norm_type", "layernorm", "low_precision_layernorm", default="low_precision_layernorm")
    f.fixed(residual_modification=None, norm_eps=1e-5)
    return read_mpt(f)


def write_mpt(m: ModelConfig) -> dict[str, Any]:
    """Return MPT's keys."""
    attention = {
        "attn_type": "multihead_attention",
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "alibi": True,
        "alibi_bias_max": 8,
    }
    return {
        "expansion_ratio": MPT_EXPANSION,
        "no_bias": True,
        "learned_pos_emb": False,
        "emb_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "norm_type": "low_precision_layernorm",
        "attn_config": {"model_type": "", **attention},
    }
