"""The matrix products of a layer and of the head, which the step's benchmark and the calibration time one by one."""

from __future__ import annotations

import torch

from frontier_llm.config import ModelConfig


def gemm_shapes(model: ModelConfig, tokens: int, tp: int) -> list[tuple[str, int, int, int, int]]:
    """(name, M, N, K, count per microbatch) of the forward products on one tensor-parallel rank; backward has twice as many FLOPs."""
    H, D, F = model.hidden, model.dim_per_head, model.ffn_hidden
    qkv = (model.heads + 2 * model.num_kv_heads) * D // tp
    return [
        ("qkv", tokens, qkv, H, model.layers),
        ("attention output", tokens, H, model.heads * D // tp, model.layers),
        ("mlp up", tokens, (2 if model.gated else 1) * F // tp, H, model.layers),
        ("mlp down", tokens, H, F // tp, model.layers),
        ("head", tokens, model.vocab_size // tp, H, 1),
    ]


def operands(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random input (M, K), weight (N, K) and output gradient (M, N) of a product."""
    x, w, g = (torch.randn(shape, dtype=dtype, device=device) for shape in ((M, K), (N, K), (M, N)))
    return x, w, g
