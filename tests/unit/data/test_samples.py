"""The sample order is a pure function of (seed, k) that visits every token of an epoch once. It is compared with a
plain Python model.
"""

from __future__ import annotations

import hashlib
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.data import samples as samples_module
from frontier_llm.data.blend import Blend
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.native import permute
from frontier_llm.data.position import derive_key, order_key
from frontier_llm.data.samples import BlendedSamples, DocumentSamples, EpochIndex, SampleStream, SyntheticSamples
from frontier_llm.errors import DataError

corpora = st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=3), min_size=1, max_size=150).filter(
    lambda c: sum(map(sum, c)) > 0
)


def write(prefix: Path, lengths: list[list[int]]) -> IndexedDataset:
    """Write documents of sequences of these lengths. Every token of the dataset is a different number."""
    token = 0
    with IndexedWriter(prefix, "i4") as writer:
        for document in lengths:
            for length in document:
                writer.add_sequence(list(range(token, token + length)))
                token += length
            writer.end_document()
    return IndexedDataset(prefix)


def sample(stream: SampleStream, k: int) -> list[int]:
    tokens = np.full(stream.sequence_length + 1, -1, np.int64)
    assert stream.fill(k, tokens).sum() == tokens.size
    return tokens.tolist()


def order(dataset: IndexedDataset, samples: DocumentSamples, epoch: int) -> list[int]:
    """Return the tokens of an epoch, in order."""
    positions = np.arange(dataset.document_count, dtype=np.uint64)
    documents = permute(dataset.document_count, samples.index.order_key(epoch), positions)
    return np.concatenate([dataset.document(int(document)) for document in documents]).tolist()


@given(corpora, st.integers(1, 40), st.integers(0, 5))
@settings(max_examples=60)
def test_samples_are_the_cuts_of_the_stream(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    sequence_length: int,
    seed: int,
) -> None:
    dataset = write(tmp_path_factory.mktemp("cuts") / "d", lengths)
    stream = DocumentSamples(dataset, sequence_length, seed)
    total = dataset.token_count
    epochs = 3
    tokens = list(chain(*(order(dataset, stream, epoch) for epoch in range(epochs + 2 + sequence_length // total))))
    count = stream.first_of_epoch(epochs)
    cuts = [tokens[j * sequence_length : j * sequence_length + sequence_length + 1] for j in range(count)]
    for epoch in range(epochs):
        first = stream.first_of_epoch(epoch)
        last = stream.first_of_epoch(epoch + 1)
        assert {stream.epoch_of(k) for k in range(first, last)} <= {epoch}
        assert sorted(sample(stream, k) for k in range(first, last)) == sorted(cuts[first:last])


@given(corpora, st.integers(1, 12))
@settings(max_examples=30)
def test_an_epoch_covers_every_token_once(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    sequence_length: int,
) -> None:
    dataset = write(tmp_path_factory.mktemp("epoch") / "d", lengths)
    stream = DocumentSamples(dataset, sequence_length, key=3)
    # after T samples of S tokens exactly S epochs have passed
    inputs = [token for k in range(dataset.token_count) for token in sample(stream, k)[:-1]]
    assert np.bincount(inputs, minlength=dataset.token_count).tolist() == [sequence_length] * dataset.token_count


def test_pieces_name_the_documents(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [[5], [0], [7, 2], [1]] * 40)
    stream = DocumentSamples(dataset, 8, 0)
    documents, offsets, lengths, starts = stream.index.pieces(0, 3, 200)
    tokens = np.concatenate(
        [dataset.document(d)[o : o + n] for d, o, n in zip(documents, offsets, lengths, strict=True)]
    )
    assert tokens.tolist() == order(dataset, stream, 0)[3:203]
    assert [dataset.document_start(d) + o for d, o in zip(documents, offsets, strict=True)] == starts.tolist()
    assert lengths.min() > 0
    assert lengths.sum() == 200


def test_any_call_order_and_any_process_gives_the_same(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [[9], [4], [30], [2]] * 20)
    one = DocumentSamples(dataset, 16, 7)
    two = DocumentSamples(IndexedDataset(tmp_path / "d"), 16, 7)
    forward = [sample(one, k) for k in range(300)]
    backward = [sample(two, k) for k in reversed(range(300))]
    assert forward == backward[::-1]


def test_order_is_pinned(tmp_path: Path) -> None:
    """The order must never change between versions, because a resumed run would read other data."""
    dataset = write(tmp_path / "d", [[9], [4], [30], [2]] * 20)
    stream = DocumentSamples(dataset, 16, order_key("concatenate", 7, 0))
    digest = hashlib.sha256(repr([sample(stream, k) for k in range(200)]).encode()).hexdigest()
    assert digest[:16] == "53a2d791497b6c5f"
    synthetic = SyntheticSamples(16, 7, 1000)
    digest = hashlib.sha256(repr([sample(synthetic, k) for k in range(200)]).encode()).hexdigest()
    assert digest[:16] == "a3fa057c01b940af"


def test_seed_epoch_and_place_change_the_order(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [[6]] * 100)
    base = [sample(DocumentSamples(dataset, 6, 1), k) for k in range(100)]
    assert base != [sample(DocumentSamples(dataset, 6, 2), k) for k in range(100)]
    assert base != [sample(DocumentSamples(dataset, 6, 3), k) for k in range(100)]
    assert base != [sample(DocumentSamples(dataset, 6, 1), k) for k in range(100, 200)]


def test_neighbouring_cuts_of_a_long_document_part(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [[10_000]])
    stream = DocumentSamples(dataset, 10, 1)
    starts = [sample(stream, k)[0] // 10 for k in range(1000)]
    assert sorted(starts) == list(range(1000))
    neighbours = sum(after == before + 1 for before, after in pairwise(starts))
    assert neighbours < 10  # in a random order, about one sample in a thousand follows its neighbour


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 255, 256, 257, 1023, 1024, 1025, 5000])
def test_permutation_is_one(size: int) -> None:
    for key in range(5):
        images = permute(size, derive_key(key), np.arange(size, dtype=np.uint64))
        assert sorted(images.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [5, 40, 1030])
def test_permutation_is_even(size: int) -> None:
    """The permutation moves each element to each place equally often, within five standard deviations of chi-square."""
    trials = 3000
    places = np.arange(size, dtype=np.uint64)
    watched = min(size, 40)
    counts = np.zeros((watched, 10 if size > 10 else size))
    for key in range(trials):
        images = permute(size, derive_key("even", size, key), places[:watched]).astype(np.int64)
        counts[np.arange(watched), images * counts.shape[1] // size] += 1
    bins = np.bincount(np.arange(size) * counts.shape[1] // size) / size
    expected = trials * bins
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = watched * (counts.shape[1] - 1)
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_permutation_refuses_a_position_outside() -> None:
    with pytest.raises(DataError, match="past the end"):
        permute(10, 1, np.array([10], np.uint64))


def test_large_index_is_cached_and_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = write(tmp_path / "d", [[3], [0], [8]] * 100)
    in_memory = [sample(DocumentSamples(dataset, 7, 1), k) for k in range(150)]
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(samples_module, "CACHE_FROM_DOCUMENTS", 10)
    cached = DocumentSamples(dataset, 7, 1, cache_dir=tmp_path / "cache")
    assert [sample(cached, k) for k in range(150)] == in_memory
    files = sorted((tmp_path / "cache").glob("*.npy"))
    assert files
    assert files[0] == cached.index.path(0)
    again = DocumentSamples(dataset, 7, 1, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(EpochIndex, "_build", lambda *_: pytest.fail("was built again"))
    assert [sample(again, k) for k in range(100)] == in_memory[:100]


def test_index_of_another_dataset_is_noticed(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", [[3]] * 200)
    other = write(tmp_path / "e", [[3]] * 100 + [[4]] * 100)
    stream = DocumentSamples(dataset, 7, 1)
    stream.index.prefix = EpochIndex(other, stream.key).prefix
    with pytest.raises(DataError, match="was made for another dataset"):
        for k in range(80):
            sample(stream, k)


@pytest.mark.parametrize("entry", [0, 1, 2])
def test_damaged_index_entry_is_noticed_by_a_lookup_in_its_block(tmp_path: Path, entry: int) -> None:
    stream = DocumentSamples(write(tmp_path / "d", [[30]] * 128), 7, 1)
    prefix = stream.index.prefix(0)
    assert prefix.tolist() == [0, 64 * 30, 128 * 30]
    prefix[entry] += 1
    with pytest.raises(DataError, match="was made for another dataset"):
        stream.index.pieces(0, {0: 100, 1: 100, 2: 3000}[entry], 8)


def test_negative_length_is_refused_when_the_index_is_built(tmp_path: Path) -> None:
    write(tmp_path / "d", [[3]] * 200)
    content = bytearray((tmp_path / "d.idx").read_bytes())
    content[34:38] = b"\xff\xff\xff\xff"
    (tmp_path / "d.idx").write_bytes(bytes(content))
    with pytest.raises(DataError, match="at byte 34"):
        sample(DocumentSamples(IndexedDataset(tmp_path / "d", scan=False), 7, 1), 0)


def test_empty_and_float_datasets_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "empty", "u2"):
        pass
    with IndexedWriter(tmp_path / "floats", "f4") as writer:
        writer.add_document(np.array([1.0], np.float32))
    with pytest.raises(DataError, match="has no tokens"):
        DocumentSamples(IndexedDataset(tmp_path / "empty"), 4, 0)
    with pytest.raises(DataError, match="not token ids"):
        DocumentSamples(IndexedDataset(tmp_path / "floats"), 4, 0)


def test_blend_takes_each_sources_own_order(tmp_path: Path) -> None:
    streams = [
        DocumentSamples(write(tmp_path / name, [[5]] * size), 5, place)
        for place, (name, size) in enumerate([("a", 30), ("b", 11)])
    ]
    blended = BlendedSamples(streams, Blend([3, 1]).locate)
    drawn = [blended.locate(k) for k in range(80)]
    assert [sample(blended, k) for k in range(80)] == [sample(streams[source], index) for source, index in drawn]
    assert sum(source == 0 for source, _ in drawn) == 60


def test_synthetic_is_learnable_and_in_range() -> None:
    stream = SyntheticSamples(512, seed=1, vocab_size=300)
    rows = np.array([sample(stream, k) for k in range(40)])
    assert rows.min() >= 0
    assert rows.max() < 300
    follower: dict[int, dict[int, int]] = {}
    for row in rows:
        for token, after in pairwise(row):
            follower.setdefault(int(token), {}).setdefault(int(after), 0)
            follower[int(token)][int(after)] += 1
    predictable = sum(max(after.values()) for after in follower.values()) / (rows.shape[0] * (rows.shape[1] - 1))
    assert 0.92 < predictable < 0.96  # 15/16
    assert sample(stream, 3) != sample(SyntheticSamples(512, seed=2, vocab_size=300), 3)
