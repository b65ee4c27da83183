"""Dataset files have the same bytes as those of megatron-core's own builder. Each program reads the files of the
other.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.indexed_writer import IndexedWriter


@pytest.fixture(scope="module")
def megatron() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets import indexed_dataset
    except ImportError as error:
        pytest.skip(f"megatron-core is not installed ({error}): pip install --no-deps megatron-core==0.16.1")
    return indexed_dataset


def corpus(dtype: str) -> list[list[np.ndarray]]:
    generator = np.random.default_rng(5)
    top = min(np.iinfo(dtype).max, 50000)
    return [
        [generator.integers(0, top, generator.integers(1, 90)).astype(dtype) for _ in range(generator.integers(1, 4))]
        for _ in range(60)
    ]


@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "i8", "u2"])
def test_same_bytes_as_their_builder(tmp_path: Path, megatron: Any, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type)
    with IndexedWriter(tmp_path / "ours", dtype) as writer:
        for document in corpus(dtype):
            for sequence in document:
                builder.add_item(torch.tensor(sequence.astype(np.int64)))
                writer.add_sequence(sequence)
            builder.end_document()
            writer.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()


def test_their_reader_reads_ours(tmp_path: Path, megatron: Any) -> None:
    documents = corpus("u2")
    with IndexedWriter(tmp_path / "ours", "u2") as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    ours = IndexedDataset(tmp_path / "ours")
    sequences = [sequence for document in documents for sequence in document]
    assert len(theirs) == len(sequences) == ours.sequence_count
    for index, sequence in enumerate(sequences):
        assert theirs[index].tolist() == sequence.tolist()
    assert theirs.document_indices.tolist() == ours.document_indices.tolist()
    assert (
        theirs.get(7, offset=1, length=2).tolist()
        == ours.tokens[ours.sequence_pointers[7] // ours.dtype.itemsize :][1:3].tolist()
    )


def test_our_reader_reads_theirs_with_modes(tmp_path: Path, megatron: Any) -> None:
    torch = pytest.importorskip("torch")
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.uint16, multimodal=True)
    builder.add_item(torch.tensor([1, 2, 3]), mode=0)
    builder.add_item(torch.tensor([4]), mode=1)
    builder.end_document()
    builder.finalize(str(tmp_path / "m.idx"))
    dataset = IndexedDataset(tmp_path / "m")
    assert dataset.document(0).tolist() == [1, 2, 3, 4]


def test_best_dtype_is_theirs(megatron: Any) -> None:
    from frontier_llm.data.indexed import optimal_dtype

    for vocab_size in (100, 65499, 65500, 65501, 100000):
        assert optimal_dtype(vocab_size) == np.dtype(megatron.DType.optimal_dtype(vocab_size))
