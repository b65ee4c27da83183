"""Compares the oracle with independent code: transformers' GPT-2, Llama, MPT and GPT-NeoX, and torch's AdamW."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle import gpt, moe, optimizers
from tests.oracle.optimizers import adamw

transformers = pytest.importorskip("transformers")

V = 61
S = 12
H = 48
L = 2
A = 6
F = 80
BASE: dict[str, Any] = {
    "layers": L,
    "hidden": H,
    "heads": A,
    "kv_heads": None,
    "head_dim": None,
    "ffn_hidden": F,
    "vocab_size": V,
    "sequence_length": S,
    "position": "learned",
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "activation": "gelu",
    "bias": True,
    "parallel_residual": False,
    "tied_embeddings": False,
    "rope_theta": 10000.0,
    "rope_fraction": 1.0,
    "alibi_max_bias": 8.0,
}


@pytest.fixture(autouse=True)
def float64_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers casts norms, softmax and rotary tables to float32 by name. Here that name means float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def random_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Make every parameter random, including norms and biases, so that each of them matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64) + (parameter.dim() == 1)
            )
    return dict(model.named_parameters())


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(0, V, (rows, S + 1), generator=torch.Generator().manual_seed(2))


def stack_heads(query: Tensor, key: Tensor, value: Tensor, groups: int) -> Tensor:
    """Stack separate projections (A D, …), (G D, …), (G D, …) to (G, A/G + 2, D, …)."""
    D = H // A
    parts = [part.reshape(groups, -1, D, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(parts, 1)


def norms(theirs: dict[str, Tensor], ours: str, name: str) -> dict[str, Tensor]:
    return {f"{ours}.{leaf}": theirs[f"{name}.{leaf}"] for leaf in ("weight", "bias") if f"{name}.{leaf}" in theirs}


def gpt2() -> tuple[torch.nn.Module, dict[str, Any], dict[str, Tensor]]:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=V,
            n_positions=S,
            n_embd=H,
            n_layer=L,
            n_head=A,
            n_inner=F,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
            activation_function="gelu_new",
        )
    ).double()
    theirs = random_weights(model)
    ours = {
        "embedding.token.weight": theirs["transformer.wte.weight"],
        "embedding.position.weight": theirs["transformer.wpe.weight"],
    }
    for i in range(L):
        h = f"transformer.h.{i}"
        layer = f"layers.{i}"
        ours |= norms(theirs, f"{layer}.attention_norm", f"{h}.ln_1") | norms(theirs, f"{layer}.mlp_norm", f"{h}.ln_2")
        mine = {"attn.c_proj": "attention.output", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
        for leaf in ("weight", "bias"):  # Conv1D stores its weight as (in, out)
            turned = {name: theirs[f"{h}.{name}.{leaf}"].transpose(0, -1) for name in ("attn.c_attn", *mine)}
            ours[f"{layer}.attention.qkv.{leaf}"] = stack_heads(*turned["attn.c_attn"].chunk(3), A)
            ours |= {f"{layer}.{name}.{leaf}": turned[other] for other, name in mine.items()}
    ours |= norms(theirs, "final_norm", "transformer.ln_f")
    return model, {**BASE, "activation": "gelu_tanh", "tied_embeddings": True}, ours


def llama() -> tuple[torch.nn.Module, dict[str, Any], dict[str, Tensor]]:
    G = 2
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=V,
            max_position_embeddings=S,
            hidden_size=H,
            num_hidden_layers=L,
            num_attention_heads=A,
            num_key_value_heads=G,
            intermediate_size=F,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            attn_implementation="eager",
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        )
    ).double()
    theirs = random_weights(model)
    ours = {"embedding.token.weight": theirs["model.embed_tokens.weight"], "head.weight": theirs["lm_head.weight"]}
    for i in range(L):
        h = f"model.layers.{i}"
        layer = f"layers.{i}"
        ours |= norms(theirs, f"{layer}.attention_norm", f"{h}.input_layernorm") | norms(
            theirs, f"{layer}.mlp_norm", f"{h}.post_attention_layernorm"
        )
        ours[f"{layer}.attention.qkv.weight"] = stack_heads(
            *(theirs[f"{h}.self_attn.{part}_proj.weight"] for part in "qkv"), G
        )
        ours[f"{layer}.attention.output.weight"] = theirs[f"{h}.self_attn.o_proj.weight"]
        ours[f"{layer}.mlp.up.weight"] = torch.stack(
            [theirs[f"{h}.mlp.gate_proj.weight"], theirs[f"{h}.mlp.up_proj.weight"]]
        )
        ours[f"{layer}.mlp.down.weight"] = theirs[f"{h}.mlp.down_proj.weight"]
    ours |= norms(theirs, "final_norm", "model.norm")
    return (
        model,
        {**BASE, "kv_heads": G, "position": "rope", "norm": "rmsnorm", "activation": "swiglu", "rope_theta": 500.0},
        ours,
    )


def mpt(heads: int = A) -> tuple[torch.nn.Module, dict[str, Any], dict[str, Tensor]]:
    model = transformers.MptForCausalLM(
        transformers.MptConfig(vocab_size=V, max_seq_len=S, d_model=H, n_layers=L, n_heads=heads, expansion_ratio=2)
    ).double()  # fmt: skip
    theirs = random_weights(model)
    ours = {"embedding.token.weight": theirs["transformer.wte.weight"]}
    for i in range(L):
        h = f"transformer.blocks.{i}"
        layer = f"layers.{i}"
        ours |= norms(theirs, f"{layer}.attention_norm", f"{h}.norm_1") | norms(
            theirs, f"{layer}.mlp_norm", f"{h}.norm_2"
        )
        query, key, value = theirs[f"{h}.attn.Wqkv.weight"].reshape(3, heads, 1, H // heads, H)
        ours[f"{layer}.attention.qkv.weight"] = torch.cat([query, key, value], 1)
        ours[f"{layer}.attention.output.weight"] = theirs[f"{h}.attn.out_proj.weight"]
        ours[f"{layer}.mlp.up.weight"] = theirs[f"{h}.ffn.up_proj.weight"]
        ours[f"{layer}.mlp.down.weight"] = theirs[f"{h}.ffn.down_proj.weight"]
    ours |= norms(theirs, "final_norm", "transformer.norm_f")
    return model, {**BASE, "heads": heads, "ffn_hidden": 2 * H, "position": "alibi", "tied_embeddings": True}, ours


def neox(parallel: bool = True) -> tuple[torch.nn.Module, dict[str, Any], dict[str, Tensor]]:
    model = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=V,
            max_position_embeddings=S,
            hidden_size=H,
            num_hidden_layers=L,
            num_attention_heads=A,
            intermediate_size=F,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            use_parallel_residual=parallel,
            attn_implementation="eager",
            hidden_dropout=0,
            attention_dropout=0,
        )
    ).double()
    theirs = random_weights(model)
    ours = {"embedding.token.weight": theirs["gpt_neox.embed_in.weight"], "head.weight": theirs["lm_head.weight"]}
    for i in range(L):
        h = f"gpt_neox.layers.{i}"
        layer = f"layers.{i}"
        ours |= norms(theirs, f"{layer}.attention_norm", f"{h}.input_layernorm") | norms(
            theirs, f"{layer}.mlp_norm", f"{h}.post_attention_layernorm"
        )
        for leaf in ("weight", "bias"):
            qkv = theirs[f"{h}.attention.query_key_value.{leaf}"]
            ours[f"{layer}.attention.qkv.{leaf}"] = qkv.reshape(A, 3, H // A, *qkv.shape[1:])
            ours[f"{layer}.attention.output.{leaf}"] = theirs[f"{h}.attention.dense.{leaf}"]
            ours[f"{layer}.mlp.up.{leaf}"] = theirs[f"{h}.mlp.dense_h_to_4h.{leaf}"]
            ours[f"{layer}.mlp.down.{leaf}"] = theirs[f"{h}.mlp.dense_4h_to_h.{leaf}"]
    ours |= norms(theirs, "final_norm", "gpt_neox.final_layer_norm")
    return model, {**BASE, "position": "rope", "rope_fraction": 0.5, "parallel_residual": parallel}, ours


FAMILIES = {
    "gpt2": gpt2,
    "llama": llama,
    "mpt": mpt,
    "mpt-8-heads": lambda: mpt(8),
    "neox": neox,
    "neox-serial": lambda: neox(False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers(family: str) -> None:
    """Compare logits and, through the mapping, the gradient of every parameter in float64."""
    model, config, ours = FAMILIES[family]()
    batch = tokens()
    theirs = model(batch[:, :-1], labels=None).logits
    mine = torch.stack([gpt.logits(config, ours, row) for row in batch[:, :-1]])
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)

    expected = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), batch[:, 1:].flatten())
    value = gpt.loss(config, ours, batch)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    parameters = list(model.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(value, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mpt"])
def test_documents_are_separate_sequences(family: str) -> None:
    """With resets, a sequence of two documents has the same logits as the two documents alone."""
    _, config, ours = FAMILIES[family]()
    row = tokens(1)[0, :-1]
    both = gpt.logits(config, ours, row, [0] * 5 + [1] * (S - 5))
    apart = torch.cat([gpt.logits(config, ours, row[:5]), gpt.logits(config, ours, row[5:])])
    torch.testing.assert_close(both, apart, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(both, gpt.logits(config, ours, row))


def test_padded_vocabulary_never_enters_a_logit() -> None:
    _, config, ours = llama()
    padding = torch.full((3, H), 100.0, dtype=torch.float64)
    padded = {**ours, "head.weight": torch.cat([ours["head.weight"], padding])}
    assert torch.equal(gpt.loss(config, padded, tokens()), gpt.loss(config, ours, tokens()))


def test_adamw_equals_torch() -> None:
    """Compare three updates, with clipping and decay groups, with torch.optim.AdamW and clip_grad_norm_."""
    _model, config, ours = gpt2()
    start = {name: value.detach().clone() for name, value in ours.items()}
    batches = [tokens(), tokens().roll(1, 1), tokens().roll(2, 1)]
    rates = [0.01, 0.02, 0.005]
    losses, norms, after = gpt.train(config, start, batches, adamw(), rate=lambda update: rates[update - 1])

    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    decayed = [name for name in leaves if gpt.decays(name)]
    groups = [
        {"params": [leaves[name] for name in decayed], "weight_decay": 0.1},
        {"params": [leaves[n] for n in leaves if n not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, lr=0.0)
    for rate, batch, value, norm in zip(rates, batches, losses, norms, strict=True):
        optimizer.zero_grad()
        expected = gpt.loss(config, leaves, batch)
        expected.backward()
        assert norm > 1  # otherwise clipping has no effect
        assert float(torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)) == pytest.approx(norm, rel=1e-12)
        assert float(expected.detach()) == pytest.approx(value, rel=1e-12)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    for name, leaf in leaves.items():
        torch.testing.assert_close(after[name], leaf.detach(), rtol=1e-10, atol=1e-12)
    assert {name for name, leaf in leaves.items() if leaf.dim() > 1 and "qkv.bias" not in name} == set(decayed)


def test_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    rates = [gpt.learning_rate(update, 1.0, 0.1, warmup=4, decay=12) for update in range(1, 15)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.55)
    assert rates[11:] == [0.1, 0.1, 0.1]
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_the_oracle_imports_nothing_of_the_package() -> None:
    modules: set[str] = set()
    for source in (gpt, moe, optimizers):
        tree = ast.parse(Path(source.__file__).read_text(encoding="utf-8"))
        modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name.startswith("frontier_llm")} == set()
    assert modules - {"__future__", "collections", "collections.abc", "dataclasses", "math", "torch", "typing"} <= {
        "tests.oracle",
        "tests.oracle.optimizers",
    }
