"""Write checkpoints as Megatron-LM and Megatron-DeepSpeed do, from models of transformers, for any layout, naming and
version.

The code follows the formats' description and uses torch.save. It shares no code with the reader.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.unit.interop.huggingface.families import build

TRUE_VOCAB = 61
PADDED_VOCAB = 64
LEGACY = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "qkv": "self_attention.query_key_value",
    "out": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
CORE = {
    "attention_norm": "input_layernorm", "mlp_norm": "pre_mlp_layernorm", "qkv": "self_attention.linear_qkv",
    "out": "self_attention.linear_proj", "up": "mlp.linear_fc1", "down": "mlp.linear_fc2",
}  # fmt: skip
TRANSFORMER_ENGINE = {
    **CORE,
    "attention_norm": "self_attention.linear_qkv.layer_norm",
    "mlp_norm": "mlp.linear_fc1.layer_norm",
}


class Natural:
    """A model's weights in their plainest form: q, k, v by head; gate and up separate; the padded vocabulary."""

    def __init__(self, variant: str) -> None:
        self.witness = build(variant)
        self.llama = not variant.startswith("gpt2")
        self.config = self.witness.config
        state = self.witness.state_dict()
        prefix = "model.layers" if self.llama else "transformer.h"
        layers = self.config.num_hidden_layers
        self.layers = [(self._llama if self.llama else self._gpt2)(state, f"{prefix}.{i}") for i in range(layers)]
        embedding = state["model.embed_tokens.weight" if self.llama else "transformer.wte.weight"]
        self.ends = {"embedding": pad(embedding)}
        if self.llama:
            self.ends["final_norm.weight"] = state["model.norm.weight"]
            if not self.config.tie_word_embeddings:
                self.ends["head"] = pad(state["lm_head.weight"])
        else:
            self.ends |= {f"final_norm.{leaf}": state[f"transformer.ln_f.{leaf}"] for leaf in ("weight", "bias")}
            self.ends["positions"] = state["transformer.wpe.weight"]

    def _llama(self, state: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
        D = self.config.hidden_size // self.config.num_attention_heads
        parts = {
            name: state[f"{layer}.self_attn.{name}_proj.weight"].reshape(-1, D, self.config.hidden_size)
            for name in "qkv"
        }
        parts |= {name: state[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")}
        biases = {name: f"{layer}.self_attn.{name}_proj.bias" for name in "qkv"}
        parts |= {f"{name}_bias": state[bias].reshape(-1, D) for name, bias in biases.items() if bias in state}
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        parts |= {f"{ours}.weight": state[f"{layer}.{theirs}.weight"] for ours, theirs in norms.items()}
        return {**parts, "out": state[f"{layer}.self_attn.o_proj.weight"]}

    def _gpt2(self, state: dict[str, Tensor], layer: str) -> dict[str, Tensor]:
        heads = self.config.n_head
        H = self.config.n_embd
        parts = dict(zip("qkv", state[f"{layer}.attn.c_attn.weight"].T.reshape(3, heads, H // heads, H), strict=True))
        parts |= {
            f"{n}_bias": b
            for n, b in zip("qkv", state[f"{layer}.attn.c_attn.bias"].reshape(3, heads, H // heads), strict=True)
        }
        for ours, theirs in {"out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}.items():
            parts |= {ours: state[f"{layer}.{theirs}.weight"].T, f"{ours}_bias": state[f"{layer}.{theirs}.bias"]}
        for ours, theirs in {"attention_norm": "ln_1", "mlp_norm": "ln_2"}.items():
            parts |= {f"{ours}.{leaf}": state[f"{layer}.{theirs}.{leaf}"] for leaf in ("weight", "bias")}
        return parts

    def arguments(self, tp: int, pp: int, **over: Any) -> argparse.Namespace:
        """Return the arguments with which Megatron would have been started."""
        c = self.config
        common = {
            "num_layers": len(self.layers),
            "hidden_size": c.hidden_size,
            "num_attention_heads": c.num_attention_heads,
            "seq_length": 24,
            "max_position_embeddings": 24,
            "padded_vocab_size": PADDED_VOCAB,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "params_dtype": torch.float32,
            "iteration": 1000,
            "data_path": ["a", 0.5],
        }
        if self.llama:
            common |= {
                "ffn_hidden_size": c.intermediate_size,
                "group_query_attention": True,
                "num_query_groups": c.num_key_value_heads,
                "position_embedding_type": "rope",
                "rotary_base": 500,
                "normalization": "RMSNorm",
                "swiglu": True,
                "add_bias_linear": False,
                "add_qkv_bias": "q_bias" in self.layers[0],
                "untie_embeddings_and_output_weights": "head" in self.ends,
                "norm_epsilon": c.rms_norm_eps,
            }
        else:
            common |= {
                "ffn_hidden_size": c.n_inner,
                "bias_gelu_fusion": True,
                "layernorm_epsilon": c.layer_norm_epsilon,
            }
        return argparse.Namespace(**(common | over))

    def layer(self, index: int, rank: int, tp: int, names: dict[str, str], version: float) -> dict[str, Tensor]:
        """Return one tensor rank's part of a layer."""
        layer = self.layers[index]
        cut = {name: layer[name].chunk(tp)[rank] for name in layer if name[0] in "qkv"}
        result = {f"{names['qkv']}.weight": interleaved(cut["q"], cut["k"], cut["v"], version)}
        up = [layer[name].chunk(tp)[rank] for name in ("gate", "up") if name in layer]
        result |= {
            f"{names['up']}.weight": torch.cat(up),
            f"{names['down']}.weight": layer["down"].chunk(tp, dim=1)[rank],
        }
        result[f"{names['out']}.weight"] = layer["out"].chunk(tp, dim=1)[rank]
        if "q_bias" in layer:
            result[f"{names['qkv']}.bias"] = interleaved(cut["q_bias"], cut["k_bias"], cut["v_bias"], version)
        if "up_bias" in layer:
            result[f"{names['up']}.bias"] = layer["up_bias"].chunk(tp)[rank]
            result |= {f"{names[name]}.bias": layer[f"{name}_bias"] for name in ("out", "down")}
        for name, value in layer.items():
            norm, _, leaf = name.partition(".")
            if leaf:
                result[f"{names[norm]}{'_' if names[norm].endswith('layer_norm') else '.'}{leaf}"] = value
        return {name: value.contiguous() for name, value in result.items()}


def pad(rows: Tensor) -> Tensor:
    """Append the rows that Megatron adds. They are trained too, so they get large values here."""
    return torch.cat([rows, torch.full((PADDED_VOCAB - len(rows), rows.shape[1]), 7.0)])


def interleaved(q: Tensor, k: Tensor, v: Tensor, version: float) -> Tensor:
    """Return the heads' q (a, D, …), k and v (g, D, …) as rows of query_key_value."""
    rest = q.shape[2:]
    if version == 0:
        rows = torch.stack([q, k, v])
    elif version == 1:
        rows = torch.stack([q, k, v], dim=2)
    else:
        per_group = q.reshape(len(k), -1, *q.shape[1:])
        rows = torch.cat([per_group, k[:, None], v[:, None]], dim=1)
    return rows.reshape(-1, *rest)


def write_megatron(
    directory: Path,
    weights: Natural,
    tp: int,
    pp: int,
    version: float = 3.0,
    names: dict[str, str] = LEGACY,
    chunks: int = 1,
    **over: Any,
) -> None:
    """Write iter_0001000/mp_rank_*, with the layers divided evenly over stages and chunks."""
    step = directory / "iter_0001000"
    per_chunk = len(weights.layers) // (pp * chunks)
    for stage in range(pp):
        for rank in range(tp):
            content: dict[str, Any] = {
                "args": weights.arguments(tp, pp, **over),
                "iteration": 1000,
                "rng_state": [{"torch": torch.get_rng_state()}],
            }
            if version:
                content["checkpoint_version"] = version
            for chunk in range(chunks):
                first = (chunk * pp + stage) * per_chunk
                layers = {
                    f"layers.{n}.{name}": value
                    for n in range(per_chunk)
                    for name, value in weights.layer(first + n, rank, tp, names, version).items()
                }
                is_first = stage == chunk == 0
                is_last = stage == pp - 1 and chunk == chunks - 1
                make = _legacy_model if names is LEGACY else _core_model
                content[f"model{chunk}" if chunks > 1 else "model"] = make(weights, layers, rank, tp, is_first, is_last)
            folder = step / (f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}")
            folder.mkdir(parents=True)
            torch.save(content, folder / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("1000")


def _legacy_model(
    weights: Natural, layers: dict[str, Tensor], rank: int, tp: int, is_first: bool, is_last: bool
) -> dict[str, Any]:
    language: dict[str, Any] = {"encoder": OrderedDict(layers)}
    result: dict[str, Any] = {"language_model": language}
    embedding = weights.ends["embedding"].chunk(tp)[rank].clone()
    if is_first:
        language["embedding"] = {"word_embeddings": {"weight": embedding}}
        if "positions" in weights.ends:
            language["embedding"]["position_embeddings"] = {"weight": weights.ends["positions"]}
    if is_last:
        language["encoder"] |= {
            f"final_layernorm.{k[11:]}": v for k, v in weights.ends.items() if k.startswith("final_norm")
        }
        if "head" in weights.ends:
            language["output_layer"] = {"weight": weights.ends["head"].chunk(tp)[rank].clone()}
        elif not is_first:
            result["word_embeddings_for_head"] = {"weight": embedding}
    return result


def _core_model(
    weights: Natural, layers: dict[str, Tensor], rank: int, tp: int, is_first: bool, is_last: bool
) -> dict[str, Any]:
    result: dict[str, Any] = OrderedDict((f"decoder.{name}", value) for name, value in layers.items())
    result["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
    if is_first:
        result["embedding.word_embeddings.weight"] = weights.ends["embedding"].chunk(tp)[rank].clone()
        if "positions" in weights.ends:
            result["embedding.position_embeddings.weight"] = weights.ends["positions"]
    if is_last:
        result |= {
            f"decoder.final_layernorm.{k[11:]}": v for k, v in weights.ends.items() if k.startswith("final_norm")
        }
        if "head" in weights.ends:
            result["output_layer.weight"] = weights.ends["head"].chunk(tp)[rank].clone()
    return result


def write_deepspeed(
    directory: Path, weights: Natural, tp: int, first_layer: int = 3, change: Callable[[dict], None] = lambda c: None
) -> None:
    """Write global_step1000/layer_*. Transformer layers begin at number `first_layer` (3 in older versions, 2 in newer
    ones).
    """
    step = directory / "global_step1000"
    step.mkdir(parents=True)
    last = first_layer + len(weights.layers)
    for rank in range(tp):
        files: dict[int, dict[str, Tensor]] = {
            1: {"word_embeddings.weight": weights.ends["embedding"].chunk(tp)[rank].clone()}
        }
        if "positions" in weights.ends:
            files[1]["position_embeddings.weight"] = weights.ends["positions"]
        for index in range(len(weights.layers)):
            files[first_layer + index] = weights.layer(index, rank, tp, LEGACY, 3.0)
        files[last + 1] = {k[11:]: v for k, v in weights.ends.items() if k.startswith("final_norm")}
        if "head" in weights.ends:
            files[last + 2] = {"lm_head.weight": weights.ends["head"].chunk(tp)[rank].clone()}
        for layer, content in files.items():
            torch.save(OrderedDict(content), step / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    content = {
        "args": weights.arguments(tp, 1, num_experts=[1]),
        "checkpoint_version": 3.0,
        "module": None,
        "iteration": 1000,
    }
    content["args"].__dict__.pop("pipeline_model_parallel_size")
    change(content)
    torch.save(content, step / "mp_rank_00_model_states.pt")
    (directory / "latest").write_text("global_step1000")
