"""The families of Hugging Face models that are the same function as one of ours, key by key; the names of their tensors are in names.py.

Sources: the configuration and modelling files of transformers 4.30 to 5.23 for llama, mistral, qwen2, gpt2, gpt_neox and mpt. Whatever a configuration
asks for that our model does not compute is refused by name; nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from frontier_llm.checkpoint.fields import Fields
from frontier_llm.checkpoint.huggingface.names import GPT2, MPT, NEOX, llama_rules
from frontier_llm.checkpoint.rules import TensorRule
from frontier_llm.config import ModelConfig

ROPE_DEFAULT_THETA = 10000.0
# transformers' Mistral without the key looks no further back than this
MISTRAL_DEFAULT_WINDOW = 4096
# Llama 3.1's scaling: their name → ours
_SCALING = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_sequence_length",
}  # fmt: skip
# transformers' MPT takes no maximum: its slopes always end at 2^-8
MPT_ALIBI_MAX_BIAS = 8.0
# nor does it look at expansion_ratio: its MLP is always four times as wide
MPT_EXPANSION = 4
_OUR_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}  # their name → ours


class ConfigJson(Fields):
    """A config.json."""

    def rope(self, theta_key: str, fraction_key: str, default_fraction: float, kinds: tuple[str, ...] = ("default",)) -> dict[str, Any]:
        """Our rope_ fields, from `rope_parameters` (transformers 5) or from the older keys; `kinds` of rotation are computed."""
        new, scaling = self.get("rope_parameters", {}), self.get("rope_scaling", {})
        kind = new.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
        if kind not in kinds:
            self.refuse("rope_parameters.rope_type", kind, " or ".join(map(repr, kinds)))
        factor = {**scaling, **new}.get("factor", 1)
        if kind == "default" and factor != 1:
            self.refuse("rope_parameters.factor", factor, "none without a rope_type")
        stretched = ConfigJson({**scaling, **new}, f"{self.where}: rope_parameters") if kind in kinds and kind != "default" else None
        theta = new.get("rope_theta", self.get(theta_key, ROPE_DEFAULT_THETA))
        fraction = new.get("partial_rotary_factor", self.get(fraction_key, default_fraction))
        values = {"rope_theta": float(theta), "rope_fraction": float(fraction)}
        if stretched is None:
            return values
        result = {**values, "rope_scaling": {ours: stretched.need(theirs) for theirs, ours in _SCALING.items()}}
        self.problems += stretched.problems
        return result

    def gelu(self, key: str, default: str) -> str:
        """Our name of a GELU."""
        return _OUR_GELU.get(self.only(key, *_OUR_GELU, default=default), "gelu")


@dataclass(frozen=True)
class Family:
    """One architecture of Hugging Face and its counterpart here."""

    architecture: str
    model_type: str
    read: Callable[[ConfigJson], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]  # keys beyond architectures, model_type, vocab_size, tie_word_embeddings, dtype
    needs: dict[str, tuple[Any, ...]]  # the values of ModelConfig's fields that this architecture can express
    rules: Callable[[ModelConfig], list[TensorRule]]
    ignored: tuple[str, ...]  # endings of buffers in older files that are no weights
    prefix: str = ""  # that files saved from the bare model lack
    grouped: bool = False  # takes fewer key/value heads than heads, and a head_dim of its own

    def refusals(self, model: ModelConfig) -> list[str]:
        """Why this architecture cannot be `model`; empty when it can."""
        reasons = [
            f"{field} is {getattr(model, field)!r}, needs {' or '.join(map(repr, allowed))}"
            for field, allowed in self.needs.items()
            if getattr(model, field) not in allowed
        ]
        if not self.grouped and model.num_kv_heads != model.heads:
            reasons.append(f"kv_heads is {model.kv_heads}, needs {model.heads}")
        if not self.grouped and model.heads * model.dim_per_head != model.hidden:
            reasons.append(f"head_dim is {model.head_dim}, needs {model.hidden / model.heads:g}")
        if "qkv_bias" not in self.needs and model.has_qkv_bias != model.bias:
            reasons.append(f"qkv_bias is {model.qkv_bias}, needs {model.bias}")
        if self.model_type == "mpt" and model.ffn_hidden != MPT_EXPANSION * model.hidden:
            reasons.append(f"ffn_hidden is {model.ffn_hidden}, needs {MPT_EXPANSION} x {model.hidden}")
        return reasons


def _read_llama(f: ConfigJson) -> ModelConfig:
    bias = f.get("attention_bias", False)
    if f.get("mlp_bias", False) != bias:
        f.refuse("attention_bias", bias, f"the same as mlp_bias, {not bias}")
    return _read_llama_like(f, bias)


def _read_mistral(f: ConfigJson) -> ModelConfig:
    window = f.content.get("sliding_window", MISTRAL_DEFAULT_WINDOW)
    if window is not None and window < f.get("max_position_embeddings", 131072):
        f.refuse("sliding_window", window, "null, or no less than max_position_embeddings")
    return _read_llama_like(f, bias=False)


def _read_qwen2(f: ConfigJson) -> ModelConfig:
    f.only("use_sliding_window", False, default=False)
    return _read_llama_like(f, bias=False, qkv_bias=True)


def _read_llama_like(f: ConfigJson, bias: bool, qkv_bias: bool | None = None) -> ModelConfig:
    f.only("hidden_act", "silu", default="silu")
    hidden, heads, head_dim = f.need("hidden_size"), f.need("num_attention_heads"), f.get("head_dim", None)
    return f.model(
        layers=f.need("num_hidden_layers"), hidden=hidden, heads=heads, kv_heads=f.get("num_key_value_heads", None),
        head_dim=None if head_dim == hidden / heads else head_dim, ffn_hidden=f.need("intermediate_size"),
        vocab_size=f.need("vocab_size"), sequence_length=f.get("max_position_embeddings", 2048), position="rope", norm="rmsnorm",
        norm_eps=f.get("rms_norm_eps", 1e-6), activation="swiglu", bias=bias, qkv_bias=qkv_bias,
        tied_embeddings=f.get("tie_word_embeddings", False), init_std=f.get("initializer_range", 0.02),
        **f.rope("rope_theta", "partial_rotary_factor", 1.0, ("default", "llama3")),
    )  # fmt: skip


def _write_llama(m: ModelConfig) -> dict[str, Any]:
    return {**_write_llama_like(m), "attention_bias": m.bias, "mlp_bias": m.bias}


def _write_llama_like(m: ModelConfig) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "default"}
    if m.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **{theirs: getattr(m.rope_scaling, ours) for theirs, ours in _SCALING.items()}}
    return {
        "hidden_size": m.hidden, "intermediate_size": m.ffn_hidden, "num_hidden_layers": m.layers, "num_attention_heads": m.heads,
        "num_key_value_heads": m.num_kv_heads, "head_dim": m.dim_per_head, "hidden_act": "silu", "rms_norm_eps": m.norm_eps,
        "max_position_embeddings": m.sequence_length, "initializer_range": m.init_std,
        "rope_theta": m.rope_theta, "rope_parameters": {**scaling, "rope_theta": m.rope_theta},
        "rope_scaling": scaling if m.rope_scaling else None,
    }  # fmt: skip


def _read_gpt2(f: ConfigJson) -> ModelConfig:
    f.only("scale_attn_weights", True, default=True)
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        f.only(key, False, default=False)
    hidden = f.need("n_embd")
    return f.model(
        layers=f.need("n_layer"), hidden=hidden, heads=f.need("n_head"), ffn_hidden=f.get("n_inner", 4 * hidden),
        vocab_size=f.need("vocab_size"), sequence_length=f.get("n_positions", 1024), position="learned", norm="layernorm",
        norm_eps=f.get("layer_norm_epsilon", 1e-5), activation=f.gelu("activation_function", "gelu_new"), bias=True, norm_bias=True,
        tied_embeddings=f.get("tie_word_embeddings", True), init_std=f.get("initializer_range", 0.02),
    )  # fmt: skip


def _write_gpt2(m: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": m.hidden, "n_layer": m.layers, "n_head": m.heads, "n_inner": m.ffn_hidden, "n_positions": m.sequence_length,
        "activation_function": "gelu_new" if m.activation == "gelu_tanh" else "gelu", "layer_norm_epsilon": m.norm_eps,
        "initializer_range": m.init_std, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip


def _read_neox(f: ConfigJson) -> ModelConfig:
    f.only("attention_bias", True, default=True)
    rope = f.rope("rotary_emb_base", "rotary_pct", 0.25)
    return f.model(
        layers=f.need("num_hidden_layers"), hidden=f.need("hidden_size"), heads=f.need("num_attention_heads"),
        ffn_hidden=f.need("intermediate_size"), vocab_size=f.need("vocab_size"), sequence_length=f.get("max_position_embeddings", 2048),
        position="rope", norm="layernorm", norm_eps=f.get("layer_norm_eps", 1e-5), activation=f.gelu("hidden_act", "gelu"), bias=True,
        norm_bias=True, parallel_residual=f.get("use_parallel_residual", True), tied_embeddings=f.get("tie_word_embeddings", False),
        init_std=f.get("initializer_range", 0.02), **rope,
    )  # fmt: skip


def _write_neox(m: ModelConfig) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": m.rope_theta, "partial_rotary_factor": m.rope_fraction}
    return {
        "hidden_size": m.hidden, "intermediate_size": m.ffn_hidden, "num_hidden_layers": m.layers, "num_attention_heads": m.heads,
        "hidden_act": "gelu_new" if m.activation == "gelu_tanh" else "gelu", "layer_norm_eps": m.norm_eps,
        "max_position_embeddings": m.sequence_length, "initializer_range": m.init_std, "use_parallel_residual": m.parallel_residual,
        "attention_bias": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "rotary_emb_base": m.rope_theta, "rotary_pct": m.rope_fraction, "rope_theta": m.rope_theta, "rope_parameters": rope,
    }  # fmt: skip


def _read_mpt(f: ConfigJson) -> ModelConfig:
    attention = ConfigJson(f.get("attn_config", {}), f"{f.where}: attn_config")
    attention.only("alibi", True, default=True)
    attention.only("alibi_bias_max", MPT_ALIBI_MAX_BIAS, default=MPT_ALIBI_MAX_BIAS)
    attention.only("attn_type", "multihead_attention", default="multihead_attention")
    for key in ("clip_qkv", "softmax_scale"):
        attention.only(key, None)
    for key in ("qk_ln", "prefix_lm"):
        attention.only(key, False, default=False)
    f.problems += attention.problems
    f.only("no_bias", True, default=True)
    f.only("logit_scale", None)
    hidden = f.need("d_model")
    return f.model(
        layers=f.need("n_layers"), hidden=hidden, heads=f.need("n_heads"), ffn_hidden=hidden * f.only("expansion_ratio", MPT_EXPANSION, default=MPT_EXPANSION),
        vocab_size=f.need("vocab_size"), sequence_length=f.get("max_seq_len", 2048), position="alibi", norm="layernorm",
        norm_eps=f.get("layer_norm_epsilon", 1e-5), activation="gelu", tied_embeddings=f.only("tie_word_embeddings", True, default=True),
        init_std=f.get("initializer_range", 0.02),
    )  # fmt: skip


def _read_foundry_mpt(f: ConfigJson) -> ModelConfig:
    """LLM Foundry's own class, which computes more than transformers' and has other defaults."""
    attention = ConfigJson(f.get("attn_config", {}), f"{f.where}: attn_config")
    attention.only("alibi", True, default=False)
    attention.only("rope", False, default=False)
    attention.only("qk_gn", False, default=False)
    attention.only("sliding_window_size", -1, default=-1)
    mlp = ConfigJson(f.get("ffn_config", {}), f"{f.where}: ffn_config")
    mlp.only("ffn_type", "mptmlp", default="mptmlp")
    mlp.only("ffn_act_fn", None, {"name": "gelu", "approximate": "none"})
    f.problems += attention.problems + mlp.problems
    f.only("no_bias", True, default=False)
    f.only("norm_type", "layernorm", "low_precision_layernorm", default="low_precision_layernorm")
    f.only("residual_modification", None)
    f.only("norm_eps", 1e-5, default=1e-5)
    return _read_mpt(f)


def _write_mpt(m: ModelConfig) -> dict[str, Any]:
    attention = {
        "model_type": "",
        "attn_type": "multihead_attention",
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "alibi": True,
        "alibi_bias_max": 8,
    }
    return {
        "d_model": m.hidden, "n_heads": m.heads, "n_layers": m.layers, "expansion_ratio": MPT_EXPANSION,
        "max_seq_len": m.sequence_length, "layer_norm_epsilon": m.norm_eps, "no_bias": True, "learned_pos_emb": False,
        "emb_pdrop": 0.0, "resid_pdrop": 0.0, "norm_type": "low_precision_layernorm", "initializer_range": m.init_std,
        "attn_config": attention,
    }  # fmt: skip


_GELUS = ("gelu", "gelu_tanh")
_LAYERNORM_WITH_BIAS = {"norm": ("layernorm",), "activation": _GELUS, "bias": (True,), "norm_bias": (True,)}
_LLAMA = {"position": ("rope",), "norm": ("rmsnorm",), "activation": ("swiglu",), "rope_fraction": (1.0,), "parallel_residual": (False,)}
_MPT = {
    "position": ("alibi",), "norm": ("layernorm",), "activation": ("gelu",), "bias": (False,), "norm_bias": (False,),
    "tied_embeddings": (True,), "parallel_residual": (False,), "alibi_max_bias": (MPT_ALIBI_MAX_BIAS,),
}  # fmt: skip

FAMILIES = (
    Family("LlamaForCausalLM", "llama", _read_llama, _write_llama, _LLAMA, llama_rules, ("rotary_emb.inv_freq",), "model.", grouped=True),
    Family(
        "Qwen2ForCausalLM", "qwen2", _read_qwen2, lambda m: {**_write_llama_like(m), "use_sliding_window": False},
        {**_LLAMA, "bias": (False,), "qkv_bias": (True,)}, llama_rules, ("rotary_emb.inv_freq",), "model.", grouped=True,
    ),
    # after Llama, which computes the same: a Mistral comes in, and goes out as a Llama
    Family(
        "MistralForCausalLM", "mistral", _read_mistral, lambda m: {**_write_llama_like(m), "sliding_window": None},
        {**_LLAMA, "bias": (False,)}, llama_rules, ("rotary_emb.inv_freq",), "model.", grouped=True,
    ),
    Family(
        "GPT2LMHeadModel", "gpt2", _read_gpt2, _write_gpt2,
        {"position": ("learned",), "parallel_residual": (False,), **_LAYERNORM_WITH_BIAS},
        GPT2.rules, (".attn.bias", ".attn.masked_bias"), "transformer.",
    ),
    Family(
        "GPTNeoXForCausalLM", "gpt_neox", _read_neox, _write_neox, {"position": ("rope",), "rope_scaling": (None,), **_LAYERNORM_WITH_BIAS},
        NEOX.rules, (".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"), "gpt_neox.",
    ),
    Family("MptForCausalLM", "mpt", _read_mpt, _write_mpt, _MPT, MPT.rules, (), "transformer."),
    # the same from LLM Foundry's convert_composer_to_hf.py and the hub's mosaicml/mpt-*; goes out as transformers' own
    Family("MPTForCausalLM", "mpt", _read_foundry_mpt, _write_mpt, _MPT, MPT.rules, (), "transformer."),
)  # fmt: skip
