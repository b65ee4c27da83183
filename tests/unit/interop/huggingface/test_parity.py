"""Models of transformers against this package with the same weights, exchanged as files in both directions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from frontier_llm.comm import build_mesh, serial_mesh
from frontier_llm.config import OpsConfig
from frontier_llm.inference.model import InferenceModel, build_inference_model, inference_plan
from frontier_llm.inference.score import token_scores
from frontier_llm.interop.huggingface import HuggingFaceModel, export_huggingface
from frontier_llm.units import GIB
from tests.harness.pool import RankPool
from tests.unit.interop.huggingface.families import VARIANTS, S, V, llama, saved

transformers = pytest.importorskip("transformers")


def imported(directory: Path, dtype: str, vocab_multiple: int | None = None) -> InferenceModel:
    source = HuggingFaceModel(directory, vocab_multiple)
    plan = inference_plan(source.model, 1, 1, 1)
    return build_inference_model(source, plan, serial_mesh(), torch.device("cpu"), dtype, OpsConfig())


def tokens(rows: int = 3) -> torch.Tensor:
    return torch.randint(0, V, (rows, S), generator=torch.Generator().manual_seed(2))


def rounding_limit(ours: InferenceModel, expected_BSV: torch.Tensor) -> float:
    """Return six standard deviations of the difference between two computations of the logits in fp32.

    A logit passes through sums of `terms` products in all. Each rounding has a relative error of at most the unit
    roundoff, with either sign, so that the error of one computation grows with the square root of `terms`. This limit
    does not depend on the order in which a CPU adds. The errors of the logits do.
    """
    model = ours.config
    terms = model.layers * (3 * model.hidden + S + model.ffn_hidden) + model.hidden
    unit_roundoff = torch.finfo(torch.float32).eps / 2
    typical_logit = float(expected_BSV.square().mean().sqrt())
    return 6 * unit_roundoff * math.sqrt(2 * terms) * typical_logit


def compare(ours: InferenceModel, theirs: torch.nn.Module, tolerance: float | None = None) -> None:
    """Compare logits, loss and greedy choices. Without a tolerance, the limit is that of fp32."""
    tokens_BS = tokens()
    with torch.inference_mode():
        expected_BSV = theirs(tokens_BS).logits
        x_SBH = ours.hidden(tokens_BS.T.contiguous())
        assert x_SBH is not None
        logits_BSV = ours.whole_logits(x_SBH).transpose(0, 1)
        expected_loss = theirs(tokens_BS, labels=tokens_BS).loss
    assert logits_BSV.shape == expected_BSV.shape
    assert expected_BSV.abs().max() > 1  # not all zeros
    limit = rounding_limit(ours, expected_BSV) if tolerance is None else tolerance
    assert (logits_BSV - expected_BSV).abs().max() <= limit
    scores = token_scores(ours, tokens_BS.tolist())
    assert scores is not None
    loss = -torch.cat([log_probabilities for log_probabilities, _ in scores]).mean()
    assert abs(loss - expected_loss) <= limit
    for row, (_, greedy) in enumerate(scores):
        assert greedy.tolist() == (expected_BSV[row].argmax(-1)[:-1] == tokens_BS[row, 1:]).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_loss_equal_transformers_in_float32(variant: str, tmp_path: Path) -> None:
    theirs = saved(variant, tmp_path)
    compare(imported(tmp_path, "fp32"), theirs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_loss_equal_transformers_in_float64(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = saved(variant, tmp_path, torch.float64)
    ours = imported(tmp_path, "fp64")
    # transformers casts norms, softmax and rotary tables to float32 by name; here that name means float64
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    again = type(theirs)(theirs.config).double().eval()  # its rotary tables were computed when it was built
    again.load_state_dict(theirs.state_dict())
    compare(ours, again, 1e-11)


def logits_on_rank(rank: int, directory: Path) -> torch.Tensor | None:
    """Return the logits of the complete vocabulary on the last stage, and None on other stages."""
    source = HuggingFaceModel(directory, vocab_multiple=2)
    plan = inference_plan(source.model, 2, 2, 4)
    mesh = build_mesh(plan.grid, rank, plan.placement, source.model.tied_embeddings)
    ours = build_inference_model(source, plan, mesh, torch.device("cpu"), "fp64", OpsConfig())
    with torch.inference_mode():
        x_SBH = ours.hidden(tokens().T.contiguous())
        return None if x_SBH is None else ours.whole_logits(x_SBH).transpose(0, 1)


@pytest.mark.parametrize("variant", ["olmo2", "phi3-window-tied", "gemma2"])
def test_logits_of_two_by_two_ranks_are_those_of_one(ranks: RankPool, variant: str, tmp_path: Path) -> None:
    """TP2 x PP2 splits tensors that the file has fused, and sums the statistics of norms over all heads."""
    saved(variant, tmp_path, torch.float64)
    ours = imported(tmp_path, "fp64")
    with torch.inference_mode():
        x_SBH = ours.hidden(tokens().T.contiguous())
        assert x_SBH is not None
        expected_BSV = ours.whole_logits(x_SBH).transpose(0, 1)
    results = [logits for logits in ranks.run(4, logits_on_rank, tmp_path) if logits is not None]
    assert len(results) == 2
    assert all((logits_BSV - expected_BSV).abs().max() <= 1e-11 for logits_BSV in results)


def test_a_phi_3_without_window_goes_out_as_the_llama_that_it_is(tmp_path: Path) -> None:
    theirs = llama("Phi3", pad_token_id=None, eos_token_id=None).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    assert (
        export_huggingface(HuggingFaceModel(tmp_path / "theirs"), tmp_path / "ours", torch.float32).model_type
        == "llama"
    )
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.inference_mode():
        assert torch.allclose(back(tokens()).logits, theirs(tokens()).logits, rtol=0, atol=1e-6)


def test_a_swapped_key_and_value_is_noticed(tmp_path: Path) -> None:
    theirs = saved("llama-gqa", tmp_path)
    ours = imported(tmp_path, "fp32")
    with torch.no_grad():
        qkv = ours.stage.blocks[1].attention.qkv.weight
        qkv[:, -2:] = qkv[:, -2:].flip(1).clone()
    with pytest.raises(AssertionError):
        compare(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_import_then_export_gives_back_the_same_bytes_and_configuration(
    variant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = saved(variant, tmp_path / "theirs", dtype)
    family = export_huggingface(HuggingFaceModel(tmp_path / "theirs"), tmp_path / "ours", dtype)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(back).__name__ == family.architecture and back.dtype == dtype
    expected = theirs.state_dict()
    assert list(back.state_dict()) == list(expected)
    # Compare with a reloaded model, because .to(bf16) has also rounded the rotary table of `theirs`.
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    for name, tensor in back.state_dict().items():
        # transformers loads some parameters (router weights, depending on its version) as float32
        wanted = expected[name].to(reloaded.state_dict()[name].dtype)
        assert torch.equal(tensor.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)), name
    with torch.inference_mode():
        assert torch.equal(back.eval()(tokens()).logits, reloaded.eval()(tokens()).logits)
    assert HuggingFaceModel(tmp_path / "ours").model.model_dump(exclude={"name"}) == HuggingFaceModel(
        tmp_path / "theirs"
    ).model.model_dump(exclude={"name"})


@pytest.mark.parametrize("variant", ["llama-gqa", "gpt2", "neox", "mpt"])
def test_shards_are_read_and_written(variant: str, tmp_path: Path) -> None:
    theirs = saved(variant, tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    export_huggingface(HuggingFaceModel(tmp_path / "theirs"), tmp_path / "ours", torch.float32, shard_gib=40_000 / GIB)
    shards = sorted((tmp_path / "ours").glob("model-*.safetensors"))
    assert len(shards) > 2 and all(path.stat().st_size < 50_000 for path in shards)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name


def test_padding_of_the_vocabulary_changes_nothing_and_is_not_exported(tmp_path: Path) -> None:
    theirs = saved("llama-gqa", tmp_path / "theirs")
    ours = imported(tmp_path / "theirs", "fp32", vocab_multiple=50)
    assert ours.stage.output_head is not None and ours.stage.output_head.weight.shape[0] == 100
    compare(ours, theirs, 1e-5)
    export_huggingface(HuggingFaceModel(tmp_path / "theirs", 50), tmp_path / "ours", torch.float32)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert back.lm_head.weight.shape[0] == V
