"""Converts the arguments in Megatron's checkpoints to the configuration of a model that computes the same function.

Sources: the argument definitions and the GPT model of Megatron-LM (2020 to core 0.16), Microsoft's and BigScience's
Megatron-DeepSpeed.
"""

from __future__ import annotations

from typing import Any

from frontier_llm.config import ModelConfig
from frontier_llm.interop.fields import Fields
from frontier_llm.interop.megatron.archive import Opaque

# kind of position embedding → our name: values of BigScience's enum, and Megatron-LM's names
_POSITIONS = {1: "rope", 2: "learned", 3: "alibi", "rope": "rope", "learned_absolute": "learned", "alibi": "alibi"}
_NORMS = {"LayerNorm": "layernorm", "layernorm": "layernorm", "RMSNorm": "rmsnorm", "rmsnorm": "rmsnorm"}
# constants in Megatron's code for --use-rope-scaling; the factor is an argument
_ROPE_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_sequence_length": 8192}
_ROPE_SCALING_FACTOR = 8.0
# arguments that change the model in ways that are not supported, with the values that disable them
_OFF: dict[str, tuple[Any, ...]] = {
    "apply_layernorm_1p": (False,), "apply_residual_connection_post_layernorm": (False,), "qk_layernorm": (False,),
    "rotary_interleaved": (False,), "squared_relu": (False,), "glu_activation": (None,), "embed_layernorm": (False,),
    "rotary_seq_len_interpolation_factor": (None, 1), "multi_latent_attention": (False,),
    "num_experts": (None, 0, 1, [1]), "mtp_num_layers": (None, 0), "window_size": (None,), "softcap": (None,),
    # The following arguments add no tensor, so only this table refuses them.
    "no_rope_freq": (None, 0), "qk_l2_norm": (False,), "softmax_type": ("vanilla",), "softmax_scale": (None,),
    "quick_geglu": (False,), "glu_linear_offset": (0,), "activation_func_clamp_value": (None,),
    "use_mup": (False,), "scaling_recipe": ("none",),
}  # fmt: skip


def read_model(arguments: dict[str, Any], where: str, vocab_size: int | None) -> ModelConfig:
    """Return the model's configuration. `vocab_size` is the tokenizer's size; None means Megatron's padded size.

    Raises CheckpointError with every argument that is missing or has no counterpart.
    """
    f = Fields({key: _plain(value) for key, value in arguments.items()}, where)
    if isinstance(layers := f.content.get("no_rope_freq"), list) and not any(layers):
        del f.content["no_rope_freq"]  # one number per layer, and no layer skips the rotation
    for key, allowed in _OFF.items():
        f.only(key, *allowed, default=allowed[0])
    position = _POSITIONS.get(f.only("position_embedding_type", *_POSITIONS, default="learned_absolute"), "rope")
    if f.get("use_rotary_position_embeddings", False):
        position = "rope"
    norm = _NORMS.get(f.only("normalization", *_NORMS, default="LayerNorm"), "layernorm")
    bias = f.get("add_bias_linear", True)
    scaling = {**_ROPE_SCALING, "factor": float(f.get("rope_scaling_factor", _ROPE_SCALING_FACTOR))}
    padded = f.need("padded_vocab_size")
    if vocab_size is not None and vocab_size > padded:
        f.refuse("padded_vocab_size", padded, f"at least the {vocab_size} ids of the tokenizer")
    heads = f.need("num_attention_heads")
    groups = f.get("num_query_groups" if f.get("group_query_attention", False) else "num_key_value_heads", None)
    return f.model(
        layers=f.need("num_layers"),
        hidden=f.need("hidden_size"),
        heads=heads,
        kv_heads=groups or heads,
        head_dim=f.get("kv_channels", None),
        ffn_hidden=f.need("ffn_hidden_size"),
        vocab_size=vocab_size or padded,
        position=position,
        norm=norm,
        sequence_length=f.need("max_position_embeddings" if position == "learned" else "seq_length"),
        norm_eps=f.get("norm_epsilon", f.get("layernorm_epsilon", 1e-5)),
        activation=_activation(f, bias),
        bias=bias,
        qkv_bias=(True if not bias and f.get("add_qkv_bias", False) else None),
        rope_scaling=scaling if f.get("use_rope_scaling", False) else None,
        norm_bias=norm == "layernorm",
        tied_embeddings=not f.get("untie_embeddings_and_output_weights", False),
        rope_theta=float(f.get("rotary_base", f.get("rope_theta", 10000.0))),
        rope_fraction=float(f.get("rotary_percent", 1.0)),
        init_std=f.get("init_method_std", 0.02),
    )


def _activation(f: Fields, bias: bool) -> str:
    """Return our activation.

    Megatron's default, the fused bias and GELU, is the tanh approximation. Without the fusion GELU is exact.
    """
    if f.get("swiglu", False):
        return "swiglu"
    return "gelu_tanh" if f.get("openai_gelu", False) or (bias and f.get("bias_gelu_fusion", True)) else "gelu"


def _plain(value: Any) -> Any:
    """Return an enum's value, and any other value unchanged."""
    return value.arguments[0] if isinstance(value, Opaque) and len(value.arguments) == 1 else value
