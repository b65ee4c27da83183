"""Tiny random models of transformers, one per family and variant, saved to disk. Every parameter is random, including
norms and biases.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers

V = 61
S = 24
H = 48
L = 2
A = 6


LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
    "original_max_position_embeddings": S // 2,
}  # fmt: skip
ROPE_HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}


def llama(kind: str = "Llama", **over: object) -> transformers.PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    values = {
        "vocab_size": V,
        "max_position_embeddings": S,
        "hidden_size": H,
        "num_hidden_layers": L,
        "num_attention_heads": A,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    } | over
    config = getattr(transformers, f"{kind}Config")(**values)
    config._experts_implementation = "eager"  # its grouped product does not support float64
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def gpt2(**over: object) -> transformers.PreTrainedModel:
    values = {
        "vocab_size": V, "n_positions": S, "n_embd": H, "n_layer": L, "n_head": A, "n_inner": 80,
        "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0,
    } | over  # fmt: skip
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**values))


def neox(**over: object) -> transformers.PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
    values = {
        "vocab_size": V,
        "max_position_embeddings": S,
        "hidden_size": H,
        "num_hidden_layers": L,
        "num_attention_heads": A,
        "intermediate_size": 80,
        "rope_parameters": rope,
    } | over
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**values))


def mpt(**over: object) -> transformers.PreTrainedModel:
    values = {"vocab_size": V, "max_seq_len": S, "d_model": H, "n_layers": L, "n_heads": A} | over
    return transformers.MptForCausalLM(transformers.MptConfig(**values))


def gemma2(**over: object) -> transformers.PreTrainedModel:
    """Caps low enough to affect a tiny model's values, and three layers. The second layer has no sliding window.

    Embeddings are scaled by the root of the hidden size. This hidden size has a root that is exact in float32, because
    transformers stores it as float32.
    """
    values = {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "head_dim": 12,
        "query_pre_attn_scalar": 6,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }
    over = values | {"tie_word_embeddings": True, "num_hidden_layers": 3, "attn_implementation": "eager"} | over
    return llama("Gemma2", **over)


def experts(kind: str, **over: object) -> transformers.PreTrainedModel:
    """Routers whose logits differ so much that rounding cannot change a choice."""
    return llama(kind, **{"moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 3} | over)


VARIANTS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama-gqa": llama,
    "llama-mha-tied": lambda: llama(num_key_value_heads=A, tie_word_embeddings=True),
    "llama-bias-wide-heads": lambda: llama(attention_bias=True, mlp_bias=True, head_dim=16),
    "llama-3.1": lambda: llama(rope_parameters=LLAMA_3),
    "llama-3.2-tied": lambda: llama(rope_parameters=LLAMA_3, tie_word_embeddings=True, head_dim=12),
    "mistral": lambda: llama("Mistral", sliding_window=None, head_dim=12),
    "mistral-window": lambda: llama("Mistral", sliding_window=5, head_dim=12),
    "qwen2": lambda: llama("Qwen2", tie_word_embeddings=True),
    "qwen3": lambda: llama("Qwen3", head_dim=12),
    "olmo2": lambda: llama("Olmo2", pad_token_id=None),
    "olmo2-mha-tied": lambda: llama("Olmo2", num_key_value_heads=A, tie_word_embeddings=True, pad_token_id=None),
    # Only a part of each head rotates, as in Phi-4-mini. Otherwise it would be exported as a Llama or, with a window,
    # as a Mistral.
    "phi3": lambda: llama("Phi3", rope_parameters=ROPE_HALF, pad_token_id=None, eos_token_id=None),
    "phi3-window-tied": lambda: llama(
        "Phi3",
        rope_parameters=ROPE_HALF,
        sliding_window=5,
        tie_word_embeddings=True,
        pad_token_id=None,
        eos_token_id=None,
    ),
    "gemma2": gemma2,
    "gemma2-untied-wide-heads": lambda: gemma2(tie_word_embeddings=False, head_dim=16, query_pre_attn_scalar=8),
    "gemma2-without-caps": lambda: gemma2(
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
        num_hidden_layers=L,
        layer_types=["full_attention"] * L,
        query_pre_attn_scalar=144,
    ),
    "mixtral": lambda: llama("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: experts("Qwen3Moe", norm_topk_prob=True, mlp_only_layers=[0]),
    "olmoe": lambda: experts("Olmoe", num_key_value_heads=A),
    "dots1": lambda: experts(
        "Dots1",
        n_routed_experts=8,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        sliding_window=None,
        layer_types=["full_attention"] * L,
    ),
    "gpt2": gpt2,
    "gpt2-untied-gelu": lambda: gpt2(tie_word_embeddings=False, activation_function="gelu"),
    "neox": neox,
    "neox-serial-residual": lambda: neox(use_parallel_residual=False),
    "mpt": mpt,
    "mpt-power-of-two-heads": lambda: mpt(n_heads=8),
}


def build(variant: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    model = VARIANTS[variant]().to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64) + (parameter.dim() == 1)
            )
    return model


def saved(
    variant: str, directory: Path, dtype: torch.dtype = torch.float32, **options: object
) -> transformers.PreTrainedModel:
    model = build(variant, dtype)
    model.save_pretrained(directory, **options)
    return model
