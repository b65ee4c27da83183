"""Random changes of the files of every reader.

Manifests and shards of checkpoints are in test_fuzz_checkpoints.py. `-s` prints the time and memory of each reader.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch
import yaml
from safetensors.torch import save_file

from frontier_llm.config import configs_dir, dump, load_run
from frontier_llm.data import importing
from frontier_llm.data.documents import Damage
from frontier_llm.data.documents import read as read_documents
from frontier_llm.data.indexed import IndexedDataset, bin_path, idx_path
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.inputs import cut
from frontier_llm.data.meta import DatasetMeta, read_meta, write_meta
from frontier_llm.data.tokenizer import load_tokenizer, train_sentencepiece
from frontier_llm.interop.huggingface import HuggingFaceModel
from frontier_llm.interop.megatron.archive import TorchArchive
from frontier_llm.topology.plan import plan_problems
from tests.attacks.fuzz import HEADERS, INDICES, MANIFESTS, OTHERS, RUN_FILES, mutate, mutate_bytes, paths, refused


def test_all_kinds_together_are_ten_thousand() -> None:
    assert MANIFESTS + HEADERS + INDICES + RUN_FILES == 10_000


@pytest.mark.thorough
def test_mutated_run_files(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: llama-tiny\nbatch: {global_batch: 8}\n")
    content = yaml.safe_load(dump(load_run(str(path))))
    rng = random.Random(5)
    places = paths(content)

    def read(data: bytes) -> bool:
        path.write_bytes(data)  # every JSON text is valid YAML
        return bool(plan_problems(load_run(str(path)), 8))

    shipped = {configs_dir() / kind for kind in ("machines", "models", "runs")}
    folders = {tmp_path, *shipped, configs_dir().parent / "docs"}
    assert refused("run files", read, [mutate(content, rng, places) for _ in range(RUN_FILES)], folders) > RUN_FILES / 2


def test_mutated_indices(tmp_path: Path) -> None:
    prefix = tmp_path / "text"
    rng = random.Random(9)
    with IndexedWriter(prefix, "uint16") as writer:
        for length in (5, 0, 17, 3, 40):
            writer.add_document(np.arange(length))
    path = idx_path(prefix)
    tokens = IndexedDataset(prefix).token_count
    content = path.read_bytes()

    def damage() -> bytes:
        if rng.random() < 0.5:
            return mutate_bytes(content, rng)
        damaged = bytearray(content)  # the size stays the same, so that the checks of lengths pass
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] ^= rng.randint(1, 255)
        return bytes(damaged)

    def read(data: bytes) -> bool:
        path.unlink()  # the old file may still be mapped
        path.write_bytes(data)
        dataset = IndexedDataset(prefix)
        for index in range(dataset.document_count):
            assert len(dataset.document(index)) <= tokens
        return False

    cases = [case for case in (damage() for _ in range(INDICES)) if case != content]
    accepted = len(cases) - refused("token indices", read, cases, {tmp_path})
    assert accepted < 0.05 * INDICES, "only the type's code and a mode may be changed without contradiction"
    assert not read(content) and bin_path(prefix).stat().st_size == 2 * tokens


SHARDS = Path(__file__).parents[1] / "unit" / "data" / "mds_shards"
TEXTS = [f"document {number} " + "word " * number for number in range(50)]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
}


def model(folder: Path, file: str) -> Path:
    """Write the files that opening a Hugging Face directory needs, including its tokenizer. Return the path of
    `file`.
    """
    weights = {"model.embed_tokens.weight": (8, 8), "model.norm.weight": (8,)}
    layer = {"input_layernorm": (8,), "post_attention_layernorm": (8,)}
    layer |= {f"self_attn.{name}_proj": (8, 8) for name in "qkvo"} | {
        f"mlp.{name}_proj": (8, 8) for name in ("gate", "up", "down")
    }
    weights |= {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    save_file({name: torch.zeros(shape) for name, shape in weights.items()}, folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    vocabulary = {"<|endoftext|>": 0, **{chr(97 + index): index + 1 for index in range(7)}}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder / file


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def table(path: Path, **options: object) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "number": range(50)}), path, **options)
    return path


def saved(path: Path) -> Path:
    torch.save({"iteration": 7, "model": {"weight": torch.arange(8.0)}, "args": {"lr": 1e-3}}, path)
    return path


def array(path: Path) -> Path:
    np.save(path, np.arange(100, dtype=np.uint16) % 200)
    return path


def record(folder: Path) -> Path:
    write_meta(folder / "text", DatasetMeta("bytes", "0" * 64, 257, 256, 50, 5000, text_bytes=4950))
    return folder / "text.meta.json"


def documents(path: Path) -> bool:
    """Return whether the file has a damaged document."""
    return sum(isinstance(item, Damage) for piece in cut(path, "file", 1 << 20) for item in read_documents(piece)) > 0


def tokens(path: Path) -> bool:
    return not sum(block.size for block in importing._blocks(path, None, "tokens", 257, 1 << 20))


def sentences(folder: Path) -> Path:
    train_sentencepiece(iter(TEXTS), folder / "tokenizer.model", 300, 1 << 20)
    return folder / "tokenizer.model"


# name: (function that writes a valid file into a folder, function that reads it)
READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "config.json": (lambda folder: model(folder, "config.json"), lambda path: HuggingFaceModel(path.parent)),
    "index of a model": (
        lambda folder: model(folder, "model.safetensors.index.json"),
        lambda path: HuggingFaceModel(path.parent),
    ),
    "safetensors": (lambda folder: model(folder, "model.safetensors"), lambda path: HuggingFaceModel(path.parent)),
    "tokenizer.json": (lambda folder: model(folder, "tokenizer.json"), lambda path: load_tokenizer(str(path.parent))),
    "tokenizer.model": (sentences, lambda path: load_tokenizer(str(path)).encode("a few words")),
    "tokenizer_config.json": (
        lambda folder: model(folder, "tokenizer_config.json"),
        lambda path: load_tokenizer(str(path.parent)),
    ),
    "parquet": (lambda folder: table(folder / "a.parquet"), documents),
    "parquet, zstd": (
        lambda folder: table(folder / "a.parquet", compression="zstd", data_page_version="2.0"),
        documents,
    ),
    "parquet, plain": (
        lambda folder: table(folder / "a.parquet", use_dictionary=False, compression="none", row_group_size=9),
        documents,
    ),
    "JSONL": (lambda folder: written(folder / "a.jsonl", JSONL), documents),
    "JSONL, gzip": (lambda folder: written(folder / "a.jsonl.gz", gzip.compress(JSONL)), documents),
    "JSONL, zstd": (
        lambda folder: written(folder / "a.jsonl.zst", pyarrow.compress(JSONL, "zstd", asbytes=True)),
        documents,
    ),
    "MDS": (
        lambda folder: written(folder / "a.mds", (SHARDS / "text-None" / "shard.00000.mds").read_bytes()),
        documents,
    ),
    "MDS, zstd": (
        lambda folder: written(folder / "a.mds.zstd", (SHARDS / "text-zstd" / "shard.00000.mds.zstd").read_bytes()),
        documents,
    ),
    "MDS of tokens": (
        lambda folder: written(folder / "a.mds", (SHARDS / "tok-None" / "shard.00000.mds").read_bytes()),
        tokens,
    ),
    "NumPy": (lambda folder: array(folder / "a.npy"), tokens),
    "record of a dataset": (record, lambda path: read_meta(path.parent / "text")),
    "torch's archive": (lambda folder: saved(folder / "a.pt"), TorchArchive),
}


@pytest.mark.parametrize("name", READERS)
def test_mutated_files_of_strangers(name: str, tmp_path: Path) -> None:
    make, open_ = READERS[name]
    path = make(tmp_path)
    content = path.read_bytes()
    rng = random.Random(zlib.crc32(name.encode()))

    def read(data: bytes) -> bool:
        path.unlink()  # the old file may still be mapped
        path.write_bytes(data)
        return open_(path) is True

    read(content)  # the first call imports modules, which are not counted as files of the reader
    assert not read(content)
    cases = [mutate_bytes(content, rng) for _ in range(OTHERS)]
    assert refused(name, read, cases, {tmp_path}) > OTHERS / 4
