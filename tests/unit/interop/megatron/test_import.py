"""Megatron checkpoints of known weights. The imported model computes the same as transformers with those weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from frontier_llm.checkpoint.weights import CheckpointWeights
from frontier_llm.cli.main import main
from frontier_llm.comm import build_mesh, serial_mesh
from frontier_llm.config import OpsConfig, RopeScaling, dump
from frontier_llm.errors import CheckpointError
from frontier_llm.inference.model import build_inference_model, inference_plan
from frontier_llm.interop.megatron.archive import Opaque
from frontier_llm.interop.megatron.arguments import read_model
from frontier_llm.interop.megatron.weights import MegatronModel
from tests.harness.pool import RankPool
from tests.unit.interop.megatron.written import (
    CORE,
    LEGACY,
    TRANSFORMER_ENGINE,
    TRUE_VOCAB,
    Natural,
    write_deepspeed,
    write_megatron,
)

TOKENS_SB = torch.randint(0, TRUE_VOCAB, (20, 3), generator=torch.Generator().manual_seed(2))


def logits(source: object, rank: int = 0, tensor: int = 1, pipeline: int = 1) -> torch.Tensor | None:
    """Return logits (S, B, V) on the last stage, and None on others."""
    world = tensor * pipeline
    plan = inference_plan(source.model, tensor, pipeline, world)  # type: ignore[attr-defined]
    mesh = serial_mesh() if world == 1 else build_mesh(plan.grid, rank, plan.placement, False)
    model = build_inference_model(source, plan, mesh, torch.device("cpu"), "fp32", OpsConfig())  # type: ignore[arg-type]
    with torch.inference_mode():
        x_SBH = model.hidden(TOKENS_SB)
        return None if x_SBH is None else model.whole_logits(x_SBH)


def compare(found: torch.Tensor | None, weights: Natural) -> None:
    with torch.inference_mode():
        expected = weights.witness(TOKENS_SB.T).logits.transpose(0, 1)
    assert expected.abs().max() > 1
    assert found is not None and found.shape == expected.shape
    assert (found - expected).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("variant", "tp", "pp", "version", "names", "chunks"),
    [
        ("gpt2", 1, 1, 0, LEGACY, 1),
        ("gpt2", 2, 1, 0, LEGACY, 1),
        ("gpt2", 2, 1, 1.0, LEGACY, 1),
        ("gpt2", 2, 2, 2.0, LEGACY, 1),
        ("gpt2", 2, 1, 3.0, CORE, 1),
        ("llama-gqa", 2, 1, 3.0, LEGACY, 1),
        ("llama-gqa", 2, 2, 3.0, TRANSFORMER_ENGINE, 1),
        ("llama-gqa", 1, 1, 3.0, CORE, 2),
        ("qwen2", 2, 2, 3.0, CORE, 1),
    ],
)
def test_logits_equal_whatever_layout_wrote_it(
    variant: str, tp: int, pp: int, version: float, names: dict[str, str], chunks: int, tmp_path: Path
) -> None:
    weights = Natural(variant)
    write_megatron(tmp_path, weights, tp, pp, version, names, chunks)
    compare(logits(MegatronModel(tmp_path, TRUE_VOCAB, vocab_multiple=16)), weights)


@pytest.mark.parametrize(("variant", "tp", "first_layer"), [("gpt2", 2, 3), ("llama-gqa", 2, 2), ("llama-gqa", 1, 3)])
def test_deepspeeds_layer_files(variant: str, tp: int, first_layer: int, tmp_path: Path) -> None:
    weights = Natural(variant)
    write_deepspeed(tmp_path, weights, tp, first_layer)
    compare(logits(MegatronModel(tmp_path, TRUE_VOCAB, vocab_multiple=16)), weights)


def from_checkpoint(rank: int, path: Path, tensor: int, pipeline: int) -> torch.Tensor | None:
    return logits(CheckpointWeights(path), rank, tensor, pipeline)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_the_command_writes_a_checkpoint_for_any_layout(
    ranks: RankPool, tensor: int, pipeline: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = Natural("llama-gqa")
    write_megatron(tmp_path / "theirs", weights, 2, 2, 3.0, CORE)
    assert main(["checkpoint", "import-megatron", str(tmp_path / "theirs")]) == 0
    section = capsys.readouterr().out.replace("vocab_size: 64", f"vocab_size: {TRUE_VOCAB}")
    run = tmp_path / "run.yaml"
    run.write_text(f"{section}\nbatch: {{global_batch: 4}}\ntrain: {{run_dir: {tmp_path / 'run'}}}\n")
    assert main(["checkpoint", "import-megatron", str(tmp_path / "theirs"), str(run), "model.vocab_multiple=16"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.name == "step_00000000"
    found = [part for part in ranks.run(tensor * pipeline, from_checkpoint, path, tensor, pipeline) if part is not None]
    assert len(found) == tensor
    for part in found:
        compare(part, weights)


def test_without_a_vocabulary_the_padding_is_kept(tmp_path: Path) -> None:
    write_megatron(tmp_path, Natural("gpt2"), 1, 1)
    assert "vocab_size: 64" in dump(MegatronModel(tmp_path).model)


def test_the_gelu_is_the_one_that_ran(tmp_path: Path) -> None:
    for number, (over, expected) in enumerate(
        [({}, "gelu_tanh"), ({"bias_gelu_fusion": False}, "gelu"), ({"swiglu": False}, "gelu_tanh")]
    ):
        write_megatron(tmp_path / str(number), Natural("gpt2"), 1, 1, **over)
        assert MegatronModel(tmp_path / str(number)).model.activation == expected


def test_bigsciences_enum_names_the_positions() -> None:
    arguments = vars(Natural("gpt2").arguments(1, 1))
    for value, expected in {1: "rope", 2: "learned", 3: "alibi"}.items():
        kind = type("Opaque", (Opaque,), {"name": "megatron.enums.PositionEmbeddingType"})(value)
        assert read_model({**arguments, "position_embedding_type": kind}, "args", None).position == expected


def test_llama_3s_rope_scaling_is_read() -> None:
    arguments = vars(Natural("llama-gqa").arguments(1, 1, use_rope_scaling=True, rope_scaling_factor=32.0))
    expected = RopeScaling(factor=32, low_freq_factor=1, high_freq_factor=4, original_sequence_length=8192)
    assert read_model(arguments, "args", None).rope_scaling == expected
    assert read_model({**arguments, "use_rope_scaling": False}, "args", None).rope_scaling is None


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"num_experts": 8}, "num_experts: 8 is not supported"),
        ({"position_embedding_type": "relative"}, "position_embedding_type: 'relative' is not supported"),
        ({"apply_layernorm_1p": True, "qk_layernorm": True}, "qk_layernorm"),
        ({"no_rope_freq": 4}, "no_rope_freq: 4 is not supported"),
        ({"no_rope_freq": [0, 1]}, r"no_rope_freq: \[0, 1\] is not supported"),
        ({"qk_l2_norm": True}, "qk_l2_norm: True is not supported"),
        ({"softmax_type": "off-by-one"}, "softmax_type: 'off-by-one' is not supported"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset: 1.0 is not supported"),
        ({"use_mup": True}, "use_mup: True is not supported"),
        ({"hidden_size": None}, "hidden_size: is missing"),
        (
            {"tensor_model_parallel_size": 4},
            "4, but has files for a tensor_model_parallel_size of only 1",
        ),
        ({"ffn_hidden_size": 96}, r"layers.0.mlp.up.weight: is \[\(80, 48\)\], expected 1 parts of shape \[96, 48\]"),
        ({"num_layers": 3}, "layers.2.attention.qkv.weight: is missing"),
        ({"num_layers": 3}, "… and 4 more like these"),
        ({"num_layers": 1}, "layers.1.attention.output.bias: is in the checkpoint, but not in the model"),
    ],
)
def test_arguments_without_a_counterpart_are_named(over: dict[str, object], message: str, tmp_path: Path) -> None:
    write_megatron(tmp_path, Natural("gpt2"), 1, 1, **over)
    with pytest.raises(CheckpointError, match=message):
        MegatronModel(tmp_path)


def test_arguments_at_values_without_effect_are_accepted(tmp_path: Path) -> None:
    without_effect = {
        "no_rope_freq": [0, 0],
        "softmax_type": "vanilla",
        "glu_linear_offset": 0.0,
        "scaling_recipe": None,
    }
    write_megatron(tmp_path, Natural("gpt2"), 1, 1, **without_effect)
    assert MegatronModel(tmp_path).model.layers == 2


def test_a_vocabulary_larger_than_the_embedding(tmp_path: Path) -> None:
    write_megatron(tmp_path, Natural("gpt2"), 1, 1)
    with pytest.raises(CheckpointError, match="padded_vocab_size: 64 is not supported"):
        MegatronModel(tmp_path, 65)


def test_a_version_that_is_not_known(tmp_path: Path) -> None:
    write_megatron(tmp_path, Natural("gpt2"), 1, 1, version=4.0)
    with pytest.raises(
        CheckpointError, match="checkpoint_version 4; the order of query_key_value is known only for 0 to 3"
    ):
        MegatronModel(tmp_path)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    write_megatron(tmp_path, Natural("gpt2"), 2, 2)
    (tmp_path / "iter_0001000/mp_rank_00_001/model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match="mp_rank_00_001: is missing"):
        MegatronModel(tmp_path)


def test_a_missing_layer_file_is_named(tmp_path: Path) -> None:
    write_deepspeed(tmp_path, Natural("gpt2"), 2)
    (tmp_path / "global_step1000/layer_04-model_01-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"layer_04-model_01-model_states\.pt: is missing"):
        MegatronModel(tmp_path)


def test_copies_that_differ_are_named(tmp_path: Path) -> None:
    weights = Natural("gpt2")
    write_megatron(tmp_path, weights, 2, 1)
    path = tmp_path / "iter_0001000/mp_rank_01/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["model"]["language_model"]["encoder"]["layers.1.input_layernorm.weight"] += 0.25
    torch.save(content, path)
    with pytest.raises(
        CheckpointError, match=r"attention_norm.weight: differs by up to 0.25 between tensor ranks 0 and 1"
    ):
        logits(MegatronModel(tmp_path))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no checkpoint of Megatron"):
        MegatronModel(tmp_path)
    (tmp_path / "metadata.json").write_text("{}")
    with pytest.raises(CheckpointError, match="torch_dist format"):
        MegatronModel(tmp_path)
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(CheckpointError, match="names global_step7, which does not exist"):
        MegatronModel(tmp_path)
