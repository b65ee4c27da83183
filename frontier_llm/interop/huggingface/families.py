"""Families of Hugging Face models that compute the same function as one of our models, with their configuration keys.

The names of their tensors are in names.py. Sources: the configuration and modelling files of transformers 4.30 to 5.23
for llama, mistral, qwen2, qwen3, olmo2, phi3, gemma2, gpt2, gpt_neox and mpt. If a configuration has a value that our
model does not compute, an error names the value. No value is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from frontier_llm.config import ModelConfig
from frontier_llm.interop.huggingface.dense import (
    MPT_ALIBI_MAX_BIAS,
    MPT_EXPANSION,
    read_foundry_mpt,
    read_gemma2,
    read_gpt2,
    read_llama,
    read_mpt,
    read_neox,
    read_phi3,
    write_gemma2,
    write_gpt2,
    write_mpt,
    write_neox,
    write_phi3,
)
from frontier_llm.interop.huggingface.llama import (
    MISTRAL_DEFAULT_WINDOW,
    ConfigJson,
    read_dots1,
    read_llama_like,
    read_mixtral,
    read_qwen3_moe,
    read_windowed,
    write_dots1,
    write_llama_like,
    write_mixtral,
    write_qwen3_moe,
)
from frontier_llm.interop.huggingface.names import (
    EXPERTS,
    GEMMA2,
    GPT2,
    LLAMA,
    LLAMA_NORMED,
    MIXTRAL,
    MPT,
    NEOX,
    OLMO2,
    PHI3,
    Names,
)

# Values of our fields in a model that uses none of the features that only few architectures have. An architecture with
# such a feature lists its field in `always` or `free`.
_USUAL: dict[str, Any] = {
    "sliding_window": None, "qk_norm": None, "norm_placement": "pre", "norm_plus_one": False, "scaled_embedding": False,
    "full_attention_every": None, "score_width": None, "score_softcap": None, "logit_softcap": None,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One architecture of Hugging Face and its counterpart here."""

    architecture: str
    model_type: str
    names: Names
    always: Mapping[str, Any]  # our fields that have only one value in this architecture.
    # Our field → their key and, unless the key is required, its default; `vocab_size` is read for every family
    keys: Mapping[str, tuple[Any, ...]]
    # returns our fields that are not in `keys`, and refuses values that our model does not support
    read: Callable[[ConfigJson], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]  # returns the other keys of config.json
    ignored: tuple[str, ...]  # endings of the names of buffers, which older files contain and which are not read
    prefix: str  # prefix of tensor names; files saved from the bare model do not have it.
    # Our fields for which the architecture supports only these values
    either: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    grouped: bool = False  # supports fewer key/value heads than heads, and a head_dim of its own
    free: tuple[str, ...] = ()  # fields in _USUAL for which the architecture supports every value.
    # Keys of the architecture that may have only this value; export writes this value
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # fields of `moe` that a family with experts fixes; None: the family has no experts
    routing: Mapping[str, Any] | None = None
    moe_keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # same as `keys`, but for fields of `moe`

    def read_model(self, f: ConfigJson) -> ModelConfig:
        """Return our configuration of a config.json.

        Raises CheckpointError with every key that is missing or has no counterpart.
        """
        f.fixed(**self.fixed)
        values = {**self.always, **f.values(self.keys), "vocab_size": f.need("vocab_size"), **self.read(f)}
        if self.routing is not None:
            # transformers 5 may write a different name for the number of experts than transformers 4
            renamed = {"experts": ("num_local_experts",)} if f.get("num_local_experts", 0) else {}
            values["moe"] = {**self.routing, **f.values({**self.moe_keys, **renamed}), **values.get("moe", {})}
        return f.model(**values)

    def config_json(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json that are specific to this family."""
        theirs = {key[0]: getattr(model, ours) for ours, key in self.keys.items()}
        if model.moe is not None:
            moe = model.moe.model_copy(update={"expert_hidden": model.expert_hidden})
            theirs |= {key[0]: getattr(moe, ours) for ours, key in self.moe_keys.items()}
        return {**theirs, **self.fixed, **self.write(model)}

    def refusals(self, model: ModelConfig) -> list[str]:
        """Return the reasons for which this architecture cannot compute `model`; empty if it can."""
        fixed = {**{ours: value for ours, value in _USUAL.items() if ours not in self.free}, **self.always}
        needs = {**{ours: (value,) for ours, value in fixed.items()}, **self.either}
        reasons = [
            f"{ours} is {getattr(model, ours)!r}, but must be {' or '.join(map(repr, allowed))}"
            for ours, allowed in needs.items()
            if getattr(model, ours) not in allowed
        ]
        if not self.grouped and model.num_kv_heads != model.heads:
            reasons.append(f"kv_heads is {model.kv_heads}, but must be {model.heads}")
        if not self.grouped and model.heads * model.dim_per_head != model.hidden:
            reasons.append(f"head_dim is {model.head_dim}, but must be {model.hidden / model.heads:g}")
        if "qkv_bias" not in self.always and model.has_qkv_bias != model.bias:
            reasons.append(f"qkv_bias is {model.qkv_bias}, but must be {model.bias}")
        if model.rope_scaling is not None and model.rope_scaling.kind != "llama3":
            reasons.append(f"rope_scaling.kind is {model.rope_scaling.kind!r}, but must be 'llama3'")
        if (model.moe is None) != (self.routing is None):
            reasons.append("the model has experts" if model.moe else "the model has no experts")
        elif model.moe is not None and self.routing is not None:
            reasons += [
                f"moe.{ours} is {getattr(model.moe, ours)!r}, but must be {value!r}"
                for ours, value in self.routing.items()
                if getattr(model.moe, ours) != value
            ]
        if self.model_type == "mpt" and model.ffn_hidden != MPT_EXPANSION * model.hidden:
            reasons.append(f"ffn_hidden is {model.ffn_hidden}, but must be {MPT_EXPANSION} x {model.hidden}")
        return reasons


LLAMA_KEYS = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "ffn_hidden": ("intermediate_size",),
    "sequence_length": ("max_position_embeddings", 2048),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tied_embeddings": ("tie_word_embeddings", False),
    "init_std": ("initializer_range", 0.02),
}
_NEOX_KEYS = {**LLAMA_KEYS, "norm_eps": ("layer_norm_eps", 1e-5), "parallel_residual": ("use_parallel_residual", True)}
_GPT2_KEYS = {
    "layers": ("n_layer",),
    "hidden": ("n_embd",),
    "heads": ("n_head",),
    "sequence_length": ("n_positions", 1024),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "tied_embeddings": ("tie_word_embeddings", True),
    "init_std": ("initializer_range", 0.02),
}
_MPT_KEYS = {
    "layers": ("n_layers",), "hidden": ("d_model",), "heads": ("n_heads",), "sequence_length": ("max_seq_len", 2048),
    "norm_eps": ("layer_norm_epsilon", 1e-5), "init_std": ("initializer_range", 0.02),
}  # fmt: skip
_LLAMA = {
    "position": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "rope_fraction": 1.0,
    "parallel_residual": False,
}
_UNBIASED = {**_LLAMA, "bias": False, "qkv_bias": None}
_BIASED = {"norm": "layernorm", "bias": True, "norm_bias": True}
_MPT = {
    "position": "alibi",
    "norm": "layernorm",
    "activation": "gelu",
    "bias": False,
    "norm_bias": False,
    "tied_embeddings": True,
    "parallel_residual": False,
    "alibi_max_bias": MPT_ALIBI_MAX_BIAS,
}
_GELUS = ("gelu", "gelu_tanh")
_PLAIN = {"score": "softmax", "selection_bias": False, "scale": 1.0, "shared_hidden": 0, "shared_gate": False}
_QWEN3 = {"use_sliding_window": False, "attention_bias": False}
_MOE_KEYS = {"experts": ("num_experts",), "top_k": ("num_experts_per_tok",), "normalise": ("norm_topk_prob", False)}

FAMILIES = [
    Family(
        "LlamaForCausalLM",
        "llama",
        LLAMA,
        _LLAMA,
        LLAMA_KEYS,
        read_llama,
        lambda m: {**write_llama_like(m), "attention_bias": m.bias, "mlp_bias": m.bias},
        ("rotary_emb.inv_freq",),
        "model.",
        grouped=True,
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        LLAMA,
        {**_LLAMA, "bias": False, "qkv_bias": True},
        LLAMA_KEYS,
        read_llama_like,
        write_llama_like,
        ("rotary_emb.inv_freq",),
        "model.",
        grouped=True,
        fixed={"use_sliding_window": False},
    ),
    # Listed after Llama, because a model without a window computes the same function as a Llama and is exported as one.
    # A Mistral model whose window covers its complete context has no window after reading.
    Family(
        "MistralForCausalLM",
        "mistral",
        LLAMA,
        {**_LLAMA, "bias": False},
        LLAMA_KEYS,
        lambda f: read_windowed(f, MISTRAL_DEFAULT_WINDOW),
        lambda m: {**write_llama_like(m), "sliding_window": m.sliding_window},
        ("rotary_emb.inv_freq",),
        "model.",
        grouped=True,
        free=("sliding_window",),
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        LLAMA_NORMED,
        {**_UNBIASED, "qk_norm": "head"},
        LLAMA_KEYS,
        read_llama_like,
        write_llama_like,
        ("rotary_emb.inv_freq",),
        "model.",
        grouped=True,
        fixed=_QWEN3,
    ),
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        OLMO2,
        {**_UNBIASED, "head_dim": None, "qk_norm": "full", "norm_placement": "post"},
        {**LLAMA_KEYS, "norm_eps": ("rms_norm_eps", 1e-5)},
        read_llama_like,
        write_llama_like,
        ("rotary_emb.inv_freq",),
        "model.",
        grouped=True,
        fixed={"attention_bias": False},
    ),
    # A model with neither a window nor a partial rotation is written as a Llama, which computes the same.
    Family(
        "Phi3ForCausalLM",
        "phi3",
        PHI3,
        {**{ours: value for ours, value in _UNBIASED.items() if ours != "rope_fraction"}, "rope_scaling": None},
        {**LLAMA_KEYS, "sequence_length": ("max_position_embeddings", 4096), "norm_eps": ("rms_norm_eps", 1e-5)},
        read_phi3,
        write_phi3,
        ("rotary_emb.inv_freq",),
        "model.",
        grouped=True,
        free=("sliding_window",),
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        GEMMA2,
        {
            **_UNBIASED,
            "activation": "geglu_tanh",
            "norm_placement": "both",
            "norm_plus_one": True,
            "scaled_embedding": True,
        },
        {
            **LLAMA_KEYS,
            "sequence_length": ("max_position_embeddings", 8192),
            "tied_embeddings": ("tie_word_embeddings", True),
        },
        read_gemma2,
        write_gemma2,
        ("rotary_emb.inv_freq",),
        "model.",
        grouped=True,
        fixed={"attention_bias": False},
        free=("sliding_window", "full_attention_every", "score_width", "score_softcap", "logit_softcap"),
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        MIXTRAL,
        _UNBIASED,
        LLAMA_KEYS,
        read_mixtral,
        write_mixtral,
        ("rotary_emb.inv_freq",),
        "model.",
        grouped=True,
        routing={**_PLAIN, "normalise": True, "dense_layers": 0},
        moe_keys={"experts": ("num_local_experts", 8), "top_k": ("num_experts_per_tok", 2)},
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        EXPERTS,
        {**_UNBIASED, "qk_norm": "head"},
        LLAMA_KEYS,
        read_qwen3_moe,
        write_qwen3_moe,
        ("rotary_emb.inv_freq",),
        "model.",
        grouped=True,
        fixed={**_QWEN3, "decoder_sparse_step": 1},
        routing=_PLAIN,
        moe_keys={**_MOE_KEYS, "expert_hidden": ("moe_intermediate_size",)},
    ),
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        EXPERTS,
        {**_UNBIASED, "head_dim": None, "qk_norm": "full"},
        LLAMA_KEYS,
        read_llama_like,
        lambda m: {**write_llama_like(m), "intermediate_size": m.expert_hidden},
        ("rotary_emb.inv_freq",),
        "model.",
        grouped=True,
        fixed={"attention_bias": False, "clip_qkv": None},
        routing={**_PLAIN, "dense_layers": 0},
        moe_keys=_MOE_KEYS,
    ),
    # dots.llm1 (rednote-hilab/dots.llm1) has DeepSeek's experts, but ordinary attention.
    Family(
        "Dots1ForCausalLM",
        "dots1",
        EXPERTS,
        {**_UNBIASED, "qk_norm": "head"},
        LLAMA_KEYS,
        read_dots1,
        write_dots1,
        ("rotary_emb.inv_freq",),
        "model.",
        grouped=True,
        fixed={"attention_bias": False, "n_group": 1, "topk_group": 1},
        routing={"score": "sigmoid", "selection_bias": True, "shared_gate": False},
        moe_keys={
            **_MOE_KEYS,
            "experts": ("n_routed_experts",),
            "expert_hidden": ("moe_intermediate_size",),
            "dense_layers": ("first_k_dense_replace", 0),
            "scale": ("routed_scaling_factor", 1.0),
        },
    ),
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        GPT2,
        {**_BIASED, "position": "learned", "parallel_residual": False},
        _GPT2_KEYS,
        read_gpt2,
        write_gpt2,
        (".attn.bias", ".attn.masked_bias"),
        "transformer.",
        {"activation": _GELUS},
    ),
    Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        NEOX,
        {**_BIASED, "position": "rope", "rope_scaling": None},
        _NEOX_KEYS,
        read_neox,
        write_neox,
        (".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
        "gpt_neox.",
        {"activation": _GELUS},
        fixed={"attention_bias": True},
    ),
    Family("MptForCausalLM", "mpt", MPT, _MPT, _MPT_KEYS, read_mpt, write_mpt, (), "transformer."),
    # MPT as written by LLM Foundry's convert_composer_to_hf.py and in the hub's mosaicml/mpt-*. It is exported with
    # the keys of transformers' own class.
    Family("MPTForCausalLM", "mpt", MPT, _MPT, _MPT_KEYS, read_foundry_mpt, write_mpt, (), "transformer."),
]


def register_family(family: Family) -> None:
    """Add an architecture. Models of this architecture can then be imported.

    An export uses this architecture if it computes the model and no earlier registered family does.
    """
    FAMILIES.append(family)
