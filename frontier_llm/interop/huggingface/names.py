"""Maps our parameters to the tensors of each family of Hugging Face models: names, and layout of the values.

Our model has few, fused parameters (blueprint/parameters.py). Other formats have a tensor for each piece of a fused
parameter. In a name, `*` stands for the layer's number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from frontier_llm.blueprint.parameters import (
    VOCABULARY,
    Parameter,
    ParameterKind,
    model_parameters,
)
from frontier_llm.config import ModelConfig


@dataclass(frozen=True)
class TensorRule:
    """One of our parameters, and the tensors of the other format that hold the same values."""

    parameter: Parameter
    # Name of one tensor, or one name for each piece of the fused parameter (such as q, k and v). Tensors of experts
    # have such names for each expert.
    theirs: tuple[str, ...]
    # Number of rows (dim 0) of our tensor that the other format also has. Our further rows are padding of the
    # vocabulary and are zeros.
    rows: int
    stacked: bool  # True: their fused tensor contains our pieces one after another; False: its rows are in our order
    turned: bool  # their matrix is stored as (in, out), ours as (out, in)

    def experts(self, first: int, stop: int) -> tuple[str, ...]:
        """Return the names of their tensors that hold our experts [first, stop)."""
        each = len(self.theirs) // self.parameter.shape[0]
        return self.theirs[first * each : stop * each]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Convert their tensors to ours. For experts, any number of experts may be given."""
        if self.parameter.kind is ParameterKind.EXPERTS:
            return torch.stack(list(parts)).view(-1, *self.parameter.shape[1:])
        shape = self.parameter.shape
        pieces = self.parameter.pieces
        rows = [part.T if self.turned else part for part in parts]
        if self.stacked and pieces:
            (whole,) = rows
            rows = list(whole.split([len(whole) * prod(piece.shape_in(shape)) // prod(shape) for piece in pieces]))
        if len(rows) > 1:
            return torch.cat(
                [part.reshape(piece.shape_in(shape)) for part, piece in zip(rows, pieces, strict=True)],
                pieces[0].dim,
            )
        (whole,) = rows
        if self.rows == shape[0]:
            return whole.reshape(shape)
        return torch.nn.functional.pad(whole, (0, 0, 0, shape[0] - self.rows))

    def cut(self, x: Tensor) -> list[Tensor]:
        """Convert this project's tensor `x` to the tensors of the other format."""
        if self.parameter.kind is ParameterKind.EXPERTS:
            return list(x.flatten(0, -3).unbind())
        apart = self.stacked or len(self.theirs) > 1
        pieces = [x.narrow(piece.dim, piece.start, piece.size) for piece in self.parameter.pieces if apart] or [
            x[: self.rows]
        ]
        rows = [
            piece.flatten() if self.parameter.kind is ParameterKind.VECTOR else piece.flatten(0, -2) for piece in pieces
        ]
        rows = [torch.cat(rows)] if len(rows) > len(self.theirs) else rows
        return [part.T if self.turned else part for part in rows]

    def their_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of `theirs` without allocating memory."""
        return [tuple(part.shape) for part in self.cut(torch.empty(self.parameter.shape, device="meta"))]


@dataclass(frozen=True)
class Names:
    """Tensor names of one family: our parameter without ".weight" and ".bias" → one name, or one name per piece.

    A `#` stands for an expert's number. A key with an ending (".weight" or ".bias") maps to complete names.
    """

    theirs: Mapping[str, str | tuple[str, ...]]
    stacked: bool = False  # meaning as in TensorRule
    turned: bool = False  # matrices are stored as (in, out)

    def rules(self, model: ModelConfig) -> list[TensorRule]:
        """Return one rule for each of our parameters that the forward pass uses."""
        return [
            self._rule(parameter, model) for parameter in model_parameters(model).values() if not parameter.of_training
        ]

    def _rule(self, parameter: Parameter, model: ModelConfig) -> TensorRule:
        ours, _, leaf = parameter.name.rpartition(".")
        number = re.search(r"\d+", ours)
        key = re.sub(r"\d+", "*", ours)
        theirs = self.theirs.get(f"{key}.{leaf}", self.theirs[key])
        names = (theirs,) if isinstance(theirs, str) else theirs
        if f"{key}.{leaf}" not in self.theirs:
            names = tuple(f"{name}.{leaf}" for name in names)
        if parameter.kind is ParameterKind.EXPERTS:
            names = tuple(name.replace("#", str(expert)) for expert in range(parameter.shape[0]) for name in names)
        return TensorRule(
            parameter,
            tuple(name.replace("*", number[0] if number else "") for name in names),
            model.vocab_size if parameter.name in VOCABULARY else parameter.shape[0],
            self.stacked,
            self.turned and parameter.kind is ParameterKind.MATRIX,
        )


LLAMA = Names({
    "embedding.token": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.qkv": tuple(f"model.layers.*.self_attn.{piece}_proj" for piece in "qkv"),
    "layers.*.attention.output": "model.layers.*.self_attn.o_proj",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp.up": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
})  # fmt: skip
LLAMA_NORMED = Names({
    **LLAMA.theirs, **{f"layers.*.attention.{piece}_norm": f"model.layers.*.self_attn.{piece}_norm" for piece in "qk"},
})  # fmt: skip
OLMO2 = Names(
    {
        **{
            ours: theirs
            for ours, theirs in LLAMA_NORMED.theirs.items()
            if ours not in ("layers.*.attention_norm", "layers.*.mlp_norm")
        },
        "layers.*.attention_output_norm": "model.layers.*.post_attention_layernorm",
        "layers.*.mlp_output_norm": "model.layers.*.post_feedforward_layernorm",
    }
)
PHI3 = Names(
    {
        **LLAMA.theirs,
        "layers.*.attention.qkv": "model.layers.*.self_attn.qkv_proj",
        "layers.*.mlp.up": "model.layers.*.mlp.gate_up_proj",
    },
    stacked=True,
)
GEMMA2 = Names({
    **LLAMA.theirs,
    "layers.*.attention_output_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm",
    "layers.*.mlp_output_norm": "model.layers.*.post_feedforward_layernorm",
})  # fmt: skip
EXPERTS = Names(
    {
        **LLAMA_NORMED.theirs,
        "layers.*.moe.router": "model.layers.*.mlp.gate",
        "layers.*.moe.router.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
        "layers.*.moe.experts.up": ("model.layers.*.mlp.experts.#.gate_proj", "model.layers.*.mlp.experts.#.up_proj"),
        "layers.*.moe.experts.down": "model.layers.*.mlp.experts.#.down_proj",
        "layers.*.moe.shared.up": (
            "model.layers.*.mlp.shared_experts.gate_proj",
            "model.layers.*.mlp.shared_experts.up_proj",
        ),
        "layers.*.moe.shared.down": "model.layers.*.mlp.shared_experts.down_proj",
    }
)
MIXTRAL = Names(
    {
        **LLAMA.theirs,
        "layers.*.moe.router": "model.layers.*.block_sparse_moe.gate",
        "layers.*.moe.experts.up": (
            "model.layers.*.block_sparse_moe.experts.#.w1",
            "model.layers.*.block_sparse_moe.experts.#.w3",
        ),
        "layers.*.moe.experts.down": "model.layers.*.block_sparse_moe.experts.#.w2",
    }
)
GPT2 = Names({
    "embedding.token": "transformer.wte",
    "embedding.position": "transformer.wpe",
    "layers.*.attention_norm": "transformer.h.*.ln_1",
    "layers.*.attention.qkv": "transformer.h.*.attn.c_attn",
    "layers.*.attention.output": "transformer.h.*.attn.c_proj",
    "layers.*.mlp_norm": "transformer.h.*.ln_2",
    "layers.*.mlp.up": "transformer.h.*.mlp.c_fc",
    "layers.*.mlp.down": "transformer.h.*.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}, stacked=True, turned=True)  # fmt: skip
NEOX = Names({  # rows: q, k, v of each head; our order is the same if every head has its own key and value
    "embedding.token": "gpt_neox.embed_in",
    "layers.*.attention_norm": "gpt_neox.layers.*.input_layernorm",
    "layers.*.attention.qkv": "gpt_neox.layers.*.attention.query_key_value",
    "layers.*.attention.output": "gpt_neox.layers.*.attention.dense",
    "layers.*.mlp_norm": "gpt_neox.layers.*.post_attention_layernorm",
    "layers.*.mlp.up": "gpt_neox.layers.*.mlp.dense_h_to_4h",
    "layers.*.mlp.down": "gpt_neox.layers.*.mlp.dense_4h_to_h",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
})  # fmt: skip
MPT = Names({
    "embedding.token": "transformer.wte",
    "layers.*.attention_norm": "transformer.blocks.*.norm_1",
    "layers.*.attention.qkv": "transformer.blocks.*.attn.Wqkv",
    "layers.*.attention.output": "transformer.blocks.*.attn.out_proj",
    "layers.*.mlp_norm": "transformer.blocks.*.norm_2",
    "layers.*.mlp.up": "transformer.blocks.*.ffn.up_proj",
    "layers.*.mlp.down": "transformer.blocks.*.ffn.down_proj",
    "final_norm": "transformer.norm_f",
    "head": "lm_head",
}, stacked=True)  # fmt: skip
