"""How each of our parameters is made from the tensors of another format, and back.

Ours are few and fused so that every tensor-parallel part is a rectangle: attention.qkv is (G, A/G + 2, D, H), for each key/value
head its queries, its key, its value; mlp.up of a gated MLP is (2, F, H), gate then up; the vocabulary is padded to Vp rows.
A trailing H is absent in biases. Letters: see model/dims.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from frontier_llm.config import ModelConfig


@dataclass(frozen=True)
class TensorRule:
    """One of our parameters, and the one or several tensors of the other format that hold the same numbers."""

    ours: str
    shape: tuple[int, ...]  # ours, global
    theirs: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]  # theirs → ours
    cut: Callable[[Tensor], Sequence[Tensor]]  # ours → theirs

    def their_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of `theirs`, without any memory."""
        return [tuple(part.shape) for part in self.cut(torch.empty(self.shape, device="meta"))]


def same(ours: str, shape: tuple[int, ...], theirs: str) -> TensorRule:
    """The same tensor under another name."""
    return TensorRule(ours, shape, (theirs,), lambda parts: parts[0], lambda x: [x])


def turned(ours: str, shape: tuple[int, int], theirs: str) -> TensorRule:
    """A matrix that the other format keeps as (in, out): GPT-2's Conv1D."""
    return TensorRule(ours, shape, (theirs,), lambda parts: parts[0].T, lambda x: [x.T])


def vocabulary(ours: str, model: ModelConfig, theirs: str) -> TensorRule:
    """(V, H) there, (Vp, H) here; the rows past V are zeros: no logit ever reads them and no gradient reaches them."""
    padding = model.padded_vocab_size - model.vocab_size

    def pad(parts: Sequence[Tensor]) -> Tensor:
        return torch.nn.functional.pad(parts[0], (0, 0, 0, padding))

    return TensorRule(ours, (model.padded_vocab_size, model.hidden), (theirs,), pad, lambda x: [x[: model.vocab_size]])


def gate_and_up(ours: str, model: ModelConfig, theirs: tuple[str, str], bias: bool = False) -> TensorRule:
    """Two matrices (F, H), or biases (F), here one of shape (2, F, H) or (2, F)."""
    shape = (2, model.ffn_hidden) if bias else (2, model.ffn_hidden, model.hidden)
    return TensorRule(ours, shape, theirs, lambda parts: torch.stack(list(parts)), lambda x: list(x.unbind(0)))


Packing = Literal["separate", "blocks", "per_head"]


def qkv(ours: str, model: ModelConfig, theirs: tuple[str, ...], packing: Packing, bias: bool = False, turn: bool = False) -> TensorRule:
    """The fused projection, or its bias.

    "separate": q (A·D, H), k and v (G·D, H) in three tensors (Llama); "blocks": [q; k; v] one below the other (MPT, and GPT-2 with
    `turn`, its (in, out) order); "per_head": for each head its q, k, v (GPT-NeoX). The last two need as many key/value heads as heads.
    """
    G, Q, D = model.num_kv_heads, model.heads // model.num_kv_heads, model.dim_per_head
    rest = () if bias else (model.hidden,)

    def join(parts: Sequence[Tensor]) -> Tensor:
        if packing == "separate":
            return torch.cat([part.reshape(G, -1, D, *rest) for part in parts], dim=1)
        whole = parts[0].T if turn else parts[0]
        if packing == "blocks":
            return whole.reshape(3, G, D, *rest).transpose(0, 1)
        return whole.reshape(G, 3, D, *rest)

    def cut(x: Tensor) -> Sequence[Tensor]:
        if packing == "separate":
            return [part.reshape(-1, *rest) for part in x.split((Q, 1, 1), dim=1)]
        whole = (x.transpose(0, 1) if packing == "blocks" else x).reshape(-1, *rest)
        return [whole.T if turn else whole]

    return TensorRule(ours, (G, Q + 2, D, *rest), theirs, join, cut)
