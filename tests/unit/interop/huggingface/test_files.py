"""Configurations in old and new spellings, names in old files, and refusals that name the fault and the expected
value.
"""

from __future__ import annotations

import errno
import json
import struct
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frontier_llm.blueprint.parameters import model_parameters
from frontier_llm.checkpoint.weights import write_checkpoint
from frontier_llm.comm import single
from frontier_llm.config import BatchConfig, ModelConfig, OpsConfig, RunConfig, TrainConfig, available, load_model
from frontier_llm.errors import CheckpointError
from frontier_llm.interop.huggingface import (
    Companions,
    HuggingFaceModel,
    export_huggingface,
    family_for,
    read_model_config,
)
from frontier_llm.interop.huggingface.export import write_config
from frontier_llm.interop.huggingface.families import FAMILIES
from frontier_llm.interop.huggingface.files import INDEX, SINGLE
from frontier_llm.model import build_stages
from frontier_llm.ops import select_ops
from frontier_llm.parallel.tensor import LayerContext, WeightGradients
from frontier_llm.topology.plan import split_layers
from tests.unit.interop.huggingface.families import LLAMA_3, saved


def edit(directory: Path, **values: Any) -> None:
    """Change keys of config.json. The value None removes a key."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def declared(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and global shapes as the model itself declares them."""
    ops = select_ops(OpsConfig(), "cpu", torch.float32)
    context = LayerContext(single("tp"), False, ops, WeightGradients(), torch.float32)
    (stage,) = build_stages(model, split_layers(model, 1), context, torch.device("cpu"))
    return {parameter.spec.name: parameter.spec.global_shape for parameter in stage.parameters()}


@pytest.mark.parametrize(
    "name",
    ["gpt-tiny", "llama-tiny", "llama-tiny qkv_bias", "mpt-tiny", "gpt-22b", "llama-3-8b", "mpt-1b", "bench-l8-h384"],
)
def test_rules_cover_exactly_what_the_model_declares(name: str) -> None:
    model = load_model(name.split()[0], dict.fromkeys(name.split()[1:], True))
    rules = [rule.parameter for rule in family_for(model).names.rules(model)]
    assert {parameter.name: parameter.shape for parameter in rules} == declared(model)


def test_every_shipped_model_has_a_family() -> None:
    # Experts of the xmoe models have two matrices, as X-MoE's authors counted them. No family has such experts.
    two_matrices = [name for name in available("models") if name.startswith("xmoe-")]
    shapes = set(available("models")) - set(two_matrices)
    assert len(two_matrices) == 4
    assert {family_for(load_model(name)).model_type for name in shapes} == {"llama", "gpt2", "mpt", "mixtral"}


def test_latent_attention_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 512}')
    with pytest.raises(CheckpointError, match=r"MLA(.|\n)*Dots1"):
        HuggingFaceModel(tmp_path)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_their_shapes_need_no_memory_and_join_undoes_cut(family: Any) -> None:
    changes: dict[str, dict[str, object]] = {
        "qwen2": {"qkv_bias": True},
        "gpt_neox": {"bias": True, "norm_bias": True, "norm": "layernorm", "activation": "gelu", "kv_heads": 4},
        "qwen3": {"qk_norm": "head"},
        "qwen3_moe": {"qk_norm": "head", "moe": {"normalise": False, "dense_layers": 2}},
        "olmoe": {"qk_norm": "full"},
        "olmo2": {"qk_norm": "full", "norm_placement": "post"},
        "gemma2": {
            "activation": "geglu_tanh",
            "norm_placement": "both",
            "norm_plus_one": True,
            "scaled_embedding": True,
        },
        "dots1": {
            "qk_norm": "head",
            "moe": {"score": "sigmoid", "selection_bias": True, "shared_hidden": 192, "dense_layers": 1},
        },
    }
    base = {"gpt2": "gpt-tiny", "mpt": "mpt-tiny"}.get(
        family.model_type, "moe-tiny" if family.routing is not None else "llama-tiny"
    )
    model = load_model(base, changes.get(family.model_type, {}))
    assert not family.refusals(model)
    for rule in family.names.rules(model):
        ours = torch.arange(rule.parameter.numel, dtype=torch.float64).view(rule.parameter.shape)
        if rule.parameter.name in ("embedding.token.weight", "head.weight"):
            ours[model.vocab_size :] = 0  # padding
        theirs = rule.cut(ours)
        assert [tuple(part.shape) for part in theirs] == rule.their_shapes()
        assert torch.equal(rule.join([part.contiguous() for part in theirs]), ours), rule.parameter.name


def test_what_only_training_keeps_is_not_written() -> None:
    written = [
        [rule.theirs for rule in family_for(model).names.rules(model)]
        for model in (load_model("moe-tiny", {"moe": {"balance": balance}}) for balance in ("sequence", "global"))
    ]
    assert written[0] == written[1]


def test_rope_theta_is_written_in_both_spellings_and_either_is_read(tmp_path: Path) -> None:
    model = load_model("llama-tiny", {"rope_theta": 500000.0})
    config = write_config(family_for(model), model, torch.bfloat16, eos_token_id=7)
    assert config["rope_theta"] == 500000.0 and config["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": 500000.0,
    }
    assert config["torch_dtype"] == config["dtype"] == "bfloat16" and config["eos_token_id"] == 7
    for dropped in ("rope_theta", "rope_parameters"):
        (tmp_path / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if key != dropped})
        )
        assert read_model_config(tmp_path).rope_theta == 500000.0


def test_llama_3s_scaling_is_written_in_both_spellings_and_either_is_read(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_sequence_length": 8192}
    model = load_model("llama-tiny", {"rope_theta": 500000.0, "rope_scaling": scaling})
    config = write_config(family_for(model), model, torch.bfloat16, eos_token_id=7)
    assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == "llama3"
    for dropped in ("rope_scaling", "rope_parameters"):
        (tmp_path / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if key != dropped})
        )
        assert read_model_config(tmp_path).rope_scaling == model.rope_scaling


def test_neox_keys_are_written_in_both_spellings_and_either_is_read(tmp_path: Path) -> None:
    saved("neox", tmp_path / "theirs")
    export_huggingface(HuggingFaceModel(tmp_path / "theirs"), tmp_path / "ours", torch.float32)
    for dropped in (["rope_parameters"], ["rotary_pct", "rotary_emb_base"]):
        config = json.loads((tmp_path / "ours" / "config.json").read_text())
        assert config["rotary_pct"] == 0.25 and config["rotary_emb_base"] == 500.0
        (tmp_path / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if key not in dropped})
        )
        model = read_model_config(tmp_path)
        assert (model.rope_theta, model.rope_fraction) == (500.0, 0.25)


def test_names_without_the_prefix_and_buffers_of_old_files_are_understood(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(tmp_path / SINGLE).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    source = HuggingFaceModel(tmp_path)
    up = source.rectangle("layers.1.mlp.up.weight", (0, 0), (80, 48))
    assert torch.equal(up, tensors["h.1.mlp.c_fc.weight"].T)


def test_each_rank_takes_its_rectangle(tmp_path: Path) -> None:
    saved("llama-gqa", tmp_path)
    source = HuggingFaceModel(tmp_path)
    whole = source.rectangle("layers.0.attention.qkv.weight", (0, 0, 0, 0), (2, 5, 8, 48))
    assert torch.equal(source.rectangle("layers.0.attention.qkv.weight", (1, 0, 0, 0), (1, 5, 8, 48)), whole[1:])


def test_export_is_whole_or_not_at_all(tmp_path: Path) -> None:
    saved("gpt2", tmp_path / "theirs")
    source = HuggingFaceModel(tmp_path / "theirs")

    class Broken:
        model = source.model

        def rectangle(self, name: str, offset: Any, shape: Any) -> torch.Tensor:
            if name == "layers.1.mlp.down.bias":
                raise OSError("the disk has gone")
            return source.rectangle(name, offset, shape)

    with pytest.raises(OSError, match="disk has gone"):
        export_huggingface(Broken(), tmp_path / "out", torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    with pytest.raises(CheckpointError, match="is not empty"):
        export_huggingface(source, tmp_path / "out", torch.float32)


def test_an_export_may_replace_an_empty_directory_and_is_not_deleted_if_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("gpt2", tmp_path / "theirs")
    source = HuggingFaceModel(tmp_path / "theirs")
    for name in ("real", "here", "busy"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    export_huggingface(source, tmp_path / "link", torch.float32)
    assert (tmp_path / "real" / SINGLE).is_file() and (tmp_path / "link").is_symlink()
    monkeypatch.chdir(tmp_path / "here")
    export_huggingface(source, ".", torch.float32)
    assert (tmp_path / "here" / SINGLE).is_file()

    def fails(path: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(CheckpointError, match=r"busy: cannot be replaced: .* the export is complete in .*busy\.tmp"):
        export_huggingface(source, tmp_path / "busy", torch.float32)
    (working,) = tmp_path.glob("busy.tmp.*")
    assert (working / SINGLE).is_file()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "busy")
    with pytest.raises(CheckpointError, match="busy: is a mount point"):
        export_huggingface(source, tmp_path / "busy", torch.float32)


def test_no_more_than_one_tensor_is_in_memory(tmp_path: Path) -> None:
    model = load_model("llama-tiny")
    shapes = [(name, parameter.shape) for name, parameter in model_parameters(model).items()]
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    class Counted:
        def __init__(self) -> None:
            self.model = model

        def rectangle(self, name: str, offset: Any, shape: Any) -> torch.Tensor:
            nonlocal most
            tensor = torch.ones(tuple(shape))
            alive.append(weakref.ref(tensor))
            most = max(most, sum(held() is not None for held in alive))
            return tensor

    export_huggingface(Counted(), tmp_path / "out", torch.float32)
    run = RunConfig(model=model, batch=BatchConfig(global_batch=1), train=TrainConfig(run_dir=str(tmp_path / "run")))
    write_checkpoint(Counted(), run, 1 << 30)
    assert len(alive) == 2 * len(shapes)
    assert most <= 2  # the tensor that is written, and the next tensor


def test_tokenizer_and_facts_go_along(tmp_path: Path) -> None:
    saved("gpt2", tmp_path / "theirs")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    companions = Companions({"tokenizer.json": tokenizer, "tokenizer_config.json": '{"a": 1}'}, 5, {"Tokens": "26B"})
    export_huggingface(HuggingFaceModel(tmp_path / "theirs"), tmp_path / "out", torch.bfloat16, companions)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"a": 1}'
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| Tokens | 26B |" in card and "GPT2LMHeadModel" in card and "bfloat16, 1 file" in card


def test_data_of_a_file_starts_on_eight_bytes(tmp_path: Path) -> None:
    saved("mpt", tmp_path / "theirs")
    export_huggingface(HuggingFaceModel(tmp_path / "theirs"), tmp_path / "out", torch.bfloat16)
    assert struct.unpack("<Q", (tmp_path / "out" / SINGLE).read_bytes()[:8])[0] % 8 == 0


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceModel(directory)
    return str(caught.value)


def test_an_unknown_architecture_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    saved("llama-gqa", tmp_path)
    edit(tmp_path, architectures=["PhimoeForCausalLM"])
    message = refusal(tmp_path)
    assert "PhimoeForCausalLM" in message
    assert all(family.architecture in message for family in FAMILIES)


def test_all_values_without_counterpart_are_named_at_once(tmp_path: Path) -> None:
    saved("llama-gqa", tmp_path)
    scaled = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0}
    edit(tmp_path, rope_parameters=scaled, hidden_act="relu", mlp_bias=True, intermediate_size=None)
    message = refusal(tmp_path)
    for word in (
        "rope_type",
        "'yarn'",
        "supported: 'default' or 'llama3'",
        "hidden_act",
        "'relu'",
        "mlp_bias",
        "intermediate_size: is missing",
    ):
        assert word in message


@pytest.mark.parametrize(
    ("variant", "values", "word"),
    [
        (
            "llama-gqa",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0, "partial_rotary_factor": 0.5}},
            "rope_fraction",
        ),
        (
            "llama-gqa",
            {"rope_parameters": None, "rope_scaling": {"factor": 2.0}},
            "rope_parameters.factor: 2.0 is not supported",
        ),
        ("llama-gqa", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            "llama-gqa",
            {"attention_bias": True},
            "attention_bias: True is not supported\n    fix: supported: the same as mlp_bias, False",
        ),
        ("llama-gqa", {"hidden_size": "48"}, "has an unexpected value"),
        ("llama-gqa", {"num_attention_heads": 0}, "has an unexpected value"),
        ("llama-gqa", {"num_key_value_heads": 4}, "kv_heads"),
        ("llama-3.1", {"rope_parameters": {**LLAMA_3, "low_freq_factor": None}}, "low_freq_factor: is missing"),
        ("llama-3.1", {"rope_parameters": {**LLAMA_3, "high_freq_factor": 1.0}}, "not above low_freq_factor"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ("olmo2", {"attention_bias": True}, "attention_bias"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("neox", {"rope_parameters": LLAMA_3}, "llama3"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
        ("neox", {"attention_bias": False}, "attention_bias"),
        ("mpt", {"attn_config": {"alibi": True, "qk_ln": True, "clip_qkv": 8.0}}, "clip_qkv"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi"),
        ("mpt", {"no_bias": False}, "no_bias"),
    ],
)
def test_what_our_model_does_not_compute_is_refused(
    variant: str, values: dict[str, Any], word: str, tmp_path: Path
) -> None:
    saved(variant, tmp_path)
    edit(tmp_path, **values)
    assert word in refusal(tmp_path)


FOUNDRY = {
    "architectures": ["MPTForCausalLM"],
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "learned_pos_emb": True,
    "attn_config": {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_impl": "flash",
        "attn_type": "multihead_attention",
        "clip_qkv": None,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
        "attn_uses_sequence_id": False,
        "rope": False,
        "sliding_window_size": -1,
    },
    "ffn_config": {"ffn_type": "mptmlp"},
    "resid_pdrop": 0,
    "residual_modification": None,
    "fc_type": "torch",
}


def test_an_mpt_of_llm_foundry_is_the_one_of_transformers(tmp_path: Path) -> None:
    saved("mpt", tmp_path)
    plain = HuggingFaceModel(tmp_path)
    edit(tmp_path, **FOUNDRY)
    assert HuggingFaceModel(tmp_path).model == plain.model
    family = export_huggingface(HuggingFaceModel(tmp_path), tmp_path / "out", torch.float32)
    assert family.architecture == "MptForCausalLM"


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"attn_config": {"alibi": False, "rope": True}}, "rope"),
        ({"attn_config": {"alibi": True, "clip_qkv": 6}}, "clip_qkv"),
        ({"attn_config": {"alibi": True, "attn_type": "grouped_query_attention", "kv_n_heads": 2}}, "attn_type"),
        ({"ffn_config": {"ffn_type": "mptglu"}}, "ffn_type"),
        ({"norm_type": "rmsnorm"}, "norm_type"),
        ({"no_bias": None}, "no_bias"),
        ({"expansion_ratio": 3}, "expansion_ratio"),
    ],
)
def test_what_llm_foundry_computes_beyond_that_is_refused(over: dict[str, Any], word: str, tmp_path: Path) -> None:
    saved("mpt", tmp_path)
    edit(tmp_path, **{**FOUNDRY, **over})
    assert word in refusal(tmp_path)


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    saved("llama-gqa", tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    shards[0].unlink()
    shards[2].unlink()
    message = refusal(tmp_path)
    assert shards[0].name in message and shards[2].name in message and shards[1].name not in message


def test_shards_without_their_index_and_an_index_that_points_elsewhere(tmp_path: Path) -> None:
    saved("llama-gqa", tmp_path, max_shard_size="40KB")
    index = (tmp_path / INDEX).read_text()
    (tmp_path / INDEX).unlink()
    assert f"fetch {INDEX} too" in refusal(tmp_path)
    first = min(tmp_path.glob("model-*.safetensors")).name
    (tmp_path / INDEX).write_text(index.replace(first, f"../{first}"))
    assert f"names '../{first}', which is not a file in the same directory" in refusal(tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    saved("llama-gqa", tmp_path)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:-100])
    assert "damaged" in refusal(tmp_path) and SINGLE in refusal(tmp_path)


def test_an_index_that_promises_too_much_is_named(tmp_path: Path) -> None:
    saved("llama-gqa", tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00007.safetensors"
    shards = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))
    index["weight_map"]["model.norm.weight"] = shards[0]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert "model.norm.weight" in refusal(tmp_path)


def test_missing_wrong_and_extra_tensors_are_named_with_the_expected_shape(tmp_path: Path) -> None:
    saved("llama-gqa", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(79, 48)
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(8)
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    message = refusal(tmp_path)
    assert "model.norm.weight: is missing; expected a tensor of shape [48]" in message
    assert "has shape [79, 48], but config.json requires [80, 48]" in message
    assert "q_norm" in message


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    saved("llama-gqa", tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / "pytorch_model.bin")
    assert "pickle" in refusal(tmp_path)


def test_a_model_of_no_family_is_told_what_each_would_need() -> None:
    odd = load_model("llama-tiny", {"norm": "layernorm", "position": "alibi"})
    with pytest.raises(CheckpointError) as caught:
        family_for(odd)
    message = str(caught.value)
    assert "cannot be exported as LlamaForCausalLM: position is 'alibi', but must be 'rope'" in message
    assert all(family.architecture in message for family in FAMILIES)
