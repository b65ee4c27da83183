"""Untrusted checkpoints, tokenizers and datasets, and values that are not numbers.

Each is refused with a message that a user understands.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.checkpoint.weights import CheckpointWeights
from frontier_llm.cli.main import main
from frontier_llm.config import BatchConfig, RunConfig, load_run
from frontier_llm.data.indexed import IndexedDataset, idx_path
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.errors import CheckpointError, ConfigError, DataError
from tests.attacks.test_checkpoints import rewrite
from tests.unit.checkpoint.simulated import TINY, Layout, write


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A complete checkpoint of a tiny model. Its manifest holds the configuration of the run."""
    run = RunConfig(model=TINY, batch=BatchConfig(global_batch=8))
    write(TINY, Layout(), tmp_path / "checkpoints", config=run.model_dump(mode="json"))
    return tmp_path / "checkpoints" / "step_00000007"


def claim(**sizes: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that changes the model sizes in a manifest's configuration."""
    return lambda content: content["config"]["model"].update(sizes)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"layers": 60_000}, r"has 60,000 layers, more than the \d+ tensors of the checkpoint"),
        (
            {"hidden": 1 << 23, "ffn_hidden": 1 << 24},
            r"is a model of \d\S+T parameters, but the tensors have \S+K: \S+ should have the shape \(\d+, "
            r"8388608\), but is",
        ),
        ({"vocab_size": 1 << 30}, r"is a model of \S+B parameters, but the tensors have \S+K"),
        (
            {"tied_embeddings": not TINY.tied_embeddings},
            r"is a model of \S+ parameters, but the tensors have \S+: \S+ is not part of this model",
        ),
    ],
    ids=["layers", "width", "vocabulary", "head"],
)
def test_a_configuration_that_claims_another_model_is_refused_before_anything_is_built(
    sizes: dict[str, Any], said: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert CheckpointWeights(checkpoint).model == TINY
    rewrite(checkpoint, claim(**sizes))
    with pytest.raises(CheckpointError, match=said):
        CheckpointWeights(checkpoint).model  # noqa: B018
    assert main(["generate", str(checkpoint), "--prompt", "a", "--tokenizer", "bytes"]) == 2
    assert "the checkpoint was damaged or forged: use another one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("hf://../../etc", "hf://../../etc: is not the name of a tokenizer of the Hub"),
        ("hf:///etc/passwd", "is not the name of a tokenizer of the Hub"),
        ("hf://owner/name@../../x", "is not the name of a tokenizer of the Hub"),
        ("hf://owner/na me", "is not the name of a tokenizer of the Hub"),
        ("hf://", "is not the name of a tokenizer of the Hub"),
        ("/proc/self/mem", "/proc/self/mem: is empty"),
        ("/proc/kmsg", "/proc/kmsg: is empty"),
        ("/dev/zero", "/dev/zero: no such tokenizer"),
        ("/etc", "/etc: contains neither tokenizer.json nor tokenizer.model"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("a\0b", "no such tokenizer"),
    ],
)
def test_a_tokenizer_that_a_checkpoint_names(
    spec: str, said: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError) as caught:
        load_tokenizer(spec)
    assert said in str(caught.value)
    rewrite(checkpoint, lambda content: content["config"]["data"].update(tokenizer=spec))
    assert main(["generate", str(checkpoint), "--prompt", "a"]) == 2
    assert said in capsys.readouterr().err


def test_a_tokenizer_of_the_hub_is_fetched_only_for_the_user(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("huggingface_hub")
    rewrite(checkpoint, lambda content: content["config"]["data"].update(tokenizer="hf://stranger/never-fetched"))
    assert main(["generate", str(checkpoint), "--prompt", "a"]) == 2
    said = capsys.readouterr().err
    assert "names the tokenizer hf://stranger/never-fetched, which has not been fetched on this machine" in said
    assert "if you trust that name, fetch it with --tokenizer hf://stranger/never-fetched" in said


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.layers=true", "model.layers: must be a number; got True"),
        ("batch.global_batch=yes", "batch.global_batch: must be a number; got True"),
        ("optimizer.lr=true", "optimizer.lr: must be a number; got True"),
        ("optimizer.betas=[0.9, false]", "optimizer.betas: must be a number; got [0.9, False]"),
        ("train.steps=true", "train.steps: must be a number; got True"),
        ("train.loss_weights={output-z: true}", "train.loss_weights: must be a number; got {'output-z': True}"),
    ],
)
def test_a_boolean_is_no_number(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run("train_small", [word])
    assert said in str(caught.value)


@pytest.mark.parametrize("hours", ["nan", "inf", "-1", "0", "many", "1e999", "NaN"])
def test_node_hours_are_a_number(hours: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["submit", "train_small", "--site", "local", "--nodes", "1", f"--max-node-hours={hours}", "--dry-run"])
        == 2
    )
    assert f"argument --max-node-hours: '{hours}' is not a number" in capsys.readouterr().err


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    with IndexedWriter(tmp_path / "tokens", "u2") as writer:
        for document in range(3000):
            writer.add_document([document % 256] * 5)
    return IndexedDataset(tmp_path / "tokens")


@pytest.mark.parametrize("size", [0, 4096])
def test_an_index_that_is_cut_during_a_run_is_named(size: int, dataset: IndexedDataset) -> None:
    path = idx_path(dataset.prefix)
    whole = path.stat().st_size
    os.truncate(path, size)
    uses: list[Callable[[], object]] = [
        lambda: dataset.sequence_lengths,
        lambda: dataset.document_start(2999),
        lambda: dataset.one_sequence_per_document,
        dataset.digest,
        dataset.identity,
        dataset.scan,
    ]
    for use in uses:
        with pytest.raises(
            DataError, match=f"tokens.idx: at byte {size}: expected {whole} bytes, as at the start, found {size}"
        ) as caught:
            use()
        assert "the file was truncated while it was in use" in str(caught.value)


def test_an_index_that_is_replaced_during_a_run_stays_as_it_was(dataset: IndexedDataset) -> None:
    path = idx_path(dataset.prefix)
    path.rename(path.with_suffix(".old"))
    path.write_bytes(b"")
    assert dataset.sequence_lengths.tolist() == [5] * 3000 and json.dumps(dataset.digest())
