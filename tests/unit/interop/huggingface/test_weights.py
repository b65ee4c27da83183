"""Training checkpoints of any layout, converted to and from Hugging Face directories through files only."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from frontier_llm.checkpoint.manifest import DamagedCheckpoint
from frontier_llm.checkpoint.weights import CheckpointWeights, compare_models, write_checkpoint
from frontier_llm.comm import build_mesh, serial_mesh
from frontier_llm.config import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
    load_model,
)
from frontier_llm.config.load import parse_overrides
from frontier_llm.data.loader import open_batches
from frontier_llm.errors import CheckpointError
from frontier_llm.interop.huggingface import HuggingFaceModel, export_huggingface
from frontier_llm.model import initial_rows
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import TrainState, build_state
from frontier_llm.training.step import train_step
from tests.harness.pool import RankPool
from tests.harness.saving import checkpoints_of, save_step
from tests.unit.interop.huggingface.families import saved

LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 1, 2)]


def run_config(
    model: ModelConfig, run_dir: Path, layout: tuple[int, int, int] = (1, 1, 1), dtype: str = "fp32"
) -> RunConfig:
    tensor, pipeline, data = layout
    return RunConfig(
        model=model,
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline, data=data),
        batch=BatchConfig(global_batch=4),
        precision=PrecisionConfig(dtype=dtype),
        data=DataConfig(train="synthetic"),
        train=TrainConfig(run_dir=str(run_dir), steps=2, device="cpu"),
    )


def state_on(rank: int, config: RunConfig) -> TrainState:
    layout = config.parallel
    world_size = layout.tensor * layout.pipeline * (layout.data or 1)
    plan = make_plan(config, world_size)
    mesh = (
        serial_mesh() if world_size == 1 else build_mesh(plan.grid, rank, plan.placement, config.model.tied_embeddings)
    )
    batches = open_batches(config, mesh.dp.rank, mesh.dp.size)
    return build_state(config, plan, mesh, torch.device("cpu"), batches)


def save(rank: int, config: RunConfig, steps: int) -> None:
    state = state_on(rank, config)
    for _ in range(steps):
        train_step(state)
    save_step(state, Path(config.train.run_dir), steps)


def global_weights(rank: int, config: RunConfig) -> dict[str, tuple[tuple[int, ...], torch.Tensor]]:
    """Load the newest checkpoint, continue training, and return this rank's loaded rectangles."""
    state = state_on(rank, config)
    checkpoints = checkpoints_of(state, Path(config.train.run_dir))
    assert checkpoints.newest() is not None
    checkpoints.close()
    parameters = [parameter for bucket in state.optimizer.buckets for parameter in bucket.parameters]
    loaded = {parameter.spec.name: (parameter.spec.offset, parameter.detach().clone()) for parameter in parameters}
    assert math.isfinite(train_step(state).loss)
    return loaded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_come_back_whatever_layout_saved_them(
    ranks: RankPool, layout: tuple[int, int, int], tmp_path: Path
) -> None:
    config = run_config(load_model("gpt-tiny"), tmp_path, layout)
    ranks.run(torch.Size(layout).numel(), save, config, 0)
    source = CheckpointWeights(tmp_path / "checkpoints" / "step_00000000", verified=True)
    assert source.model == config.model
    state = state_on(0, run_config(config.model, tmp_path / "serial"))
    specs = {
        parameter.spec.name: parameter.spec for bucket in state.optimizer.buckets for parameter in bucket.parameters
    }
    for name, spec in specs.items():
        found = source.rectangle(name, spec.offset, spec.shape)
        expected = torch.empty(spec.shape)
        initial_rows(spec, config.train.seed, expected)
        assert torch.equal(found, expected), name
    part = source.rectangle("layers.1.attention.qkv.weight", (1, 0, 3, 5), (2, 3, 4, 7))
    everything = source.rectangle("layers.1.attention.qkv.weight", (0, 0, 0, 0), (4, 3, 16, 64))
    assert torch.equal(part, everything[1:3, :, 3:7, 5:12])


def test_export_of_a_trained_checkpoint_is_the_same_for_every_layout(ranks: RankPool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    exported = []
    for layout in LAYOUTS[:2]:
        run_dir = tmp_path / "x".join(map(str, layout))
        config = run_config(load_model("llama-tiny"), run_dir, layout, "fp64")
        ranks.run(torch.Size(layout).numel(), save, config, 2)
        export_huggingface(CheckpointWeights(run_dir / "checkpoints" / "step_00000002"), run_dir / "hf", torch.float64)
        exported.append(transformers.AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype="auto").state_dict())
    for name, tensor in exported[0].items():
        assert tensor.dtype == torch.float64
        assert torch.allclose(tensor, exported[1][name], rtol=0, atol=1e-12), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", ["llama-gqa", "mpt-power-of-two-heads"])
def test_an_imported_model_is_trained_on_any_layout(
    ranks: RankPool, variant: str, layout: tuple[int, int, int], tmp_path: Path
) -> None:
    saved(variant, tmp_path / "hf")
    source = HuggingFaceModel(tmp_path / "hf", vocab_multiple=16)
    config = run_config(source.model, tmp_path / "run", layout)
    path = write_checkpoint(source, config, shard_bytes=100_000)
    assert len(list(path.glob("shard_*.safetensors"))) > 2
    for rectangles in ranks.run(torch.Size(layout).numel(), global_weights, config):
        assert rectangles
        for name, (offset, values) in rectangles.items():
            assert torch.equal(values, source.rectangle(name, offset, values.shape)), name


def test_import_export_gives_the_same_bytes(tmp_path: Path) -> None:
    saved("neox", tmp_path / "hf")
    source = HuggingFaceModel(tmp_path / "hf")
    path = write_checkpoint(source, run_config(source.model, tmp_path / "run"), 1 << 30)
    export_huggingface(CheckpointWeights(path, verified=True), tmp_path / "back", torch.float32)
    theirs, back = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert sorted(back) == sorted(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(back[name], tensor), name


def test_a_run_that_has_begun_is_not_overwritten(tmp_path: Path) -> None:
    saved("llama-gqa", tmp_path / "hf")
    source = HuggingFaceModel(tmp_path / "hf")
    config = run_config(source.model, tmp_path / "run")
    write_checkpoint(source, config, 1 << 30)
    with pytest.raises(CheckpointError, match="already contains step_00000000"):
        write_checkpoint(source, config, 1 << 30)


LLAMA_3_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_sequence_length": 8}


def test_every_field_in_which_a_run_differs_is_named() -> None:
    imported = load_model("llama-tiny", {"heads": 8, "rope_theta": 500.0})
    problems = compare_models(
        load_model("llama-tiny", {"vocab_multiple": 128, "sequence_length": 64, "init_std": 0.1}), imported
    )
    assert {problem.where for problem in problems} == {"model.heads", "model.head_dim", "model.rope_theta"}
    stretched = load_model("llama-tiny", {"rope_scaling": LLAMA_3_SCALING})
    (problem,) = compare_models(stretched, load_model("llama-tiny"))
    assert problem.fix == "set model.rope_scaling=null"  # in YAML's spelling
    (problem,) = compare_models(load_model("llama-tiny"), stretched)
    key, _, value = problem.fix.removeprefix("set ").partition("=")
    assert stretched.rope_scaling is not None
    assert parse_overrides([f"{key}={value}"]) == {"model": {"rope_scaling": stretched.rope_scaling.model_dump()}}
    assert compare_models(load_model("gpt-tiny", {"sequence_length": 64}), load_model("gpt-tiny"))  # learned positions


def test_a_run_may_train_an_imported_model_with_its_own_dropout_and_balancing(tmp_path: Path) -> None:
    """Regression: the import was refused, and for `balance: global` no other settings made it possible."""
    saved("mixtral", tmp_path / "hf")
    source = HuggingFaceModel(tmp_path / "hf")
    assert source.model.moe is not None
    training = {"balance": "global", "balance_weight": 0.3, "z_weight": 0.1, "expert_hidden": source.model.ffn_hidden}
    moe = source.model.moe.model_copy(update=training)
    model = source.model.model_copy(update={"dropout": 0.1, "moe": moe})
    assert compare_models(model, source.model) == []
    path = write_checkpoint(source, run_config(model, tmp_path / "run"), 1 << 30)
    weights = CheckpointWeights(path, verified=True)
    assert torch.equal(weights.rectangle("layers.0.moe.router.load", (0,), (4,)), torch.ones(4))
    other = model.model_copy(update={"moe": moe.model_copy(update={"top_k": 1})})
    (problem,) = compare_models(other, source.model)
    key, _, value = problem.fix.removeprefix("set ").partition("=")
    advised = parse_overrides([f"{key}={value}"])["model"]["moe"]
    assert (key, advised["top_k"], advised["balance"]) == ("model.moe", 2, "global")


def test_damage_is_named(tmp_path: Path) -> None:
    saved("llama-gqa", tmp_path / "hf")
    source = HuggingFaceModel(tmp_path / "hf")
    path = write_checkpoint(source, run_config(source.model, tmp_path / "run"), 100_000)
    shard = sorted(path.glob("shard_*"))[1]
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=shard.name):
        CheckpointWeights(path, verified=True)
    shard.unlink()
    with pytest.raises(DamagedCheckpoint, match=shard.name):
        CheckpointWeights(path)


@pytest.mark.parametrize("names", list(permutations(("gpt-tiny", "llama-tiny", "mpt-tiny"), 2)), ids="->".join)
def test_the_advice_of_a_model_that_does_not_fit_makes_it_fit(names: tuple[str, str]) -> None:
    imported, run = map(load_model, names)
    advice = [problem.fix.removeprefix("set model.") for problem in compare_models(run, imported)]
    assert advice
    assert compare_models(load_model(names[1], parse_overrides(advice)), imported) == []
