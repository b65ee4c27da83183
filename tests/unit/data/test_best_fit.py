"""Best-fit packing: documents that fit a sequence are not cut, and no token is lost or learnt twice.

Sample k depends only on the seed and k.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.checkpoint.drift import config_changes
from frontier_llm.config import RunConfig, build, load_model
from frontier_llm.data import best_fit, native
from frontier_llm.data import samples as samples_module
from frontier_llm.data.best_fit import PackedSamples
from frontier_llm.data.indexed import READ_ONLY, IndexedDataset
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.inspect import inspect
from frontier_llm.data.loader import open_batches, prepare_indices
from frontier_llm.data.position import order_key
from frontier_llm.errors import DataError

LENGTHS = [9, 4, 30, 2, 17, 1, 16, 3] * 12


def write(prefix: Path, lengths: list[int]) -> IndexedDataset:
    """Write documents of these lengths. Every token of the dataset is a different number."""
    with IndexedWriter(prefix, "i4") as writer:
        for start, length in zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False):
            writer.add_document(list(range(start, start + length)))
    return IndexedDataset(prefix)


def sample(stream: PackedSamples, k: int) -> tuple[list[int], list[bool], list[int]]:
    """Return (tokens, whether each is learnt, lengths of the pieces)."""
    tokens = np.full(stream.sequence_length + 1, -1, np.int64)
    learnt = np.empty(tokens.size, np.bool_)
    lengths = stream.fill(k, tokens, learnt)
    assert lengths.sum() == tokens.size and (lengths > 0).all()
    return tokens.tolist(), learnt.tolist(), lengths.tolist()


def rooms_of_a_plain_packing(lengths: list[int], capacity: int) -> list[int]:
    """Return the free space of each sequence after best-fit decreasing, in its simplest form."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    return sorted(rooms)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=80).filter(any),
    st.integers(1, 30),
    st.sampled_from([3, 16, 1 << 16]),
)
@settings(max_examples=80)
def test_documents_stay_whole_and_every_token_comes_once(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    S: int,
    window: int,
) -> None:
    dataset = write(tmp_path_factory.mktemp("packed") / "d", lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_fit, "WINDOW", window)
        stream = PackedSamples(dataset, S, key=5)
        starts = np.cumsum([0, *lengths]).tolist()[:-1]
        sizes = [
            (at, start, min(S + 1, n - at))
            for start, n in zip(starts, lengths, strict=True)
            for at in range(0, max(n - 1, min(n, 1)), S)
        ]
        expected = sorted(list(range(start + at, start + at + size)) for at, start, size in sizes)
        for epoch in range(2):
            pieces = []
            targets = []
            rooms = []
            for k in range(epoch * stream.samples_per_epoch, (epoch + 1) * stream.samples_per_epoch):
                tokens, learnt, parts = sample(stream, k)
                rooms.append(0)
                for begin, end in pairwise(np.cumsum([0, *parts]).tolist()):
                    if begin and tokens[begin] == tokens[begin - 1]:
                        assert end == S + 1 and not any(learnt[begin:]) and set(tokens[begin:]) == {tokens[begin]}, (
                            "padding"
                        )
                        rooms[-1] = end - begin
                        continue
                    assert learnt[begin] == (tokens[begin] in starts), "what a cut repeats is learnt once"
                    pieces.append(tokens[begin:end])
                    targets += [
                        token
                        for token, counts in zip(tokens[begin + 1 : end], learnt[begin + 1 : end], strict=True)
                        if counts
                    ]
            assert sorted(pieces) == expected
            assert sorted(targets) == sorted(set(range(dataset.token_count)) - set(starts))
        if window == 1 << 16:
            assert sorted(rooms) == rooms_of_a_plain_packing([size for *_, size in sizes], S + 1)


def test_any_call_order_and_any_process_gives_the_same_and_epochs_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_fit, "WINDOW", 20)
    dataset = write(tmp_path / "d", LENGTHS)
    one = PackedSamples(dataset, 16, order_key("best-fit", 7, 0))
    two = PackedSamples(IndexedDataset(tmp_path / "d"), 16, order_key("best-fit", 7, 0))
    count = one.samples_per_epoch
    forward = [sample(one, k) for k in range(2 * count)]
    assert forward == [sample(two, k) for k in reversed(range(2 * count))][::-1]
    epochs = forward[:count], forward[count:]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])
    assert forward != [sample(PackedSamples(dataset, 16, order_key("best-fit", 8, 0)), k) for k in range(2 * count)]
    # The order must never change between versions, because a resumed run would read other data.
    assert hashlib.sha256(repr(forward).encode()).hexdigest()[:16] == "99cfb6c399c70bfd"


def test_prompts_stay_unlearnt(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", "u2") as writer:
        for _ in range(10):
            writer.add_sequence([1, 2, 3], learnt=False)
            writer.add_sequence([4, 5])
            writer.end_document()
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.modes is not None and READ_ONLY in dataset.modes
    tokens, learnt, lengths = sample(PackedSamples(dataset, 11, 0), 0)
    assert (tokens, lengths) == ([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 5, 5], [5, 5, 2])
    assert learnt == [False, False, False, True, True] * 2 + [False, False]


def run_on(tmp_path: Path, **data: object) -> RunConfig:
    model = load_model("llama-tiny", {"vocab_size": 5000}).model_dump() | {"sequence_length": 16}
    train = [{"path": str(tmp_path / "d"), "weight": 3}, {"path": str(tmp_path / "e"), "weight": 1}]
    sections = {
        "train": train,
        "validation": str(tmp_path / "d"),
        "packing": "best-fit",
        "reset_at_documents": True,
        **data,
    }
    return build(RunConfig, {"model": model, "batch": {"global_batch": 8, "micro_batch": 2}, "data": sections})


def test_a_blend_on_any_number_of_replicas(tmp_path: Path) -> None:
    write(tmp_path / "d", LENGTHS)
    write(tmp_path / "e", LENGTHS[::-1])
    run = run_on(tmp_path)
    rows = []
    for dp in (1, 2):
        ranks = [open_batches(run, rank, dp, read_ahead=0) for rank in range(dp)]
        made = [
            ranks[rank].microbatch(step, index) for step in (2, 3) for index in range(4 // dp) for rank in range(dp)
        ]  # type: ignore[union-attr]
        rows.append(
            [(*map(bytes, (batch.tokens_BS1[row], batch.loss_mask_BS[row])),) for batch in made for row in (0, 1)]
        )  # type: ignore[index]
        assert all(ranks[0].masks_targets for _ in ranks)  # type: ignore[union-attr]
    assert rows[0] == rows[1]
    held_out = open_batches(run, 0, 1, "validation")
    assert held_out is not None and not held_out.samples.masked, "losses of runs that pack differently compare"


def test_a_resumed_run_may_not_pack_otherwise(tmp_path: Path) -> None:
    found = config_changes(run_on(tmp_path).model_dump(), run_on(tmp_path, packing="concatenate").model_dump(), step=5)
    assert [(change.key, change.mathematics) for change in found] == [("data.packing", True)]


def test_large_tables_are_cached_and_of_another_dataset_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = write(tmp_path / "d", LENGTHS)
    in_memory = [sample(PackedSamples(dataset, 16, 1), k) for k in range(30)]
    monkeypatch.setattr(samples_module, "CACHE_FROM_DOCUMENTS", 10)
    write(tmp_path / "e", LENGTHS)
    prepare_indices(run_on(tmp_path, cache_dir=str(tmp_path / "cache")))
    assert (
        len(list((tmp_path / "cache").glob("*-pieces-*.npy")))
        == len(list((tmp_path / "cache").glob("*-packed-*.npy")))
        == 2
    )
    cached = PackedSamples(dataset, 16, 1, cache_dir=tmp_path / "cache")
    assert [sample(cached, k) for k in range(30)] == in_memory
    unscanned = IndexedDataset(tmp_path / "d", scan=False)
    assert sample(PackedSamples(unscanned, 16, 1, cache_dir=tmp_path / "cache"), 3) == in_memory[3]
    assert not unscanned.scanned  # reading cached tables does not read the complete index
    stream = PackedSamples(dataset, 16, 1)
    stream.__dict__["_pieces"] = PackedSamples(write(tmp_path / "f", [1] * 96), 16, 1)._pieces
    with pytest.raises(DataError, match="was made for another dataset"):
        sample(stream, 0)


def test_what_both_ways_part_is_counted(tmp_path: Path) -> None:
    write(tmp_path / "d", LENGTHS)
    report = inspect(str(tmp_path / "d"), samples=0, sequence_length=16)
    packed = report["best_fit"]
    assert (
        packed["split_documents"] == 12
        and packed["parted_tokens"] == 12 * (30 - 17) < report["truncated"]["expected_tokens"]
    )
    held = packed["sequences"] * 17 - packed["padding_tokens"]
    assert held == sum(LENGTHS) + 12  # the token at each cut is held twice


@pytest.mark.parametrize("damage", [1 << 44, -1])
def test_documents_outside_of_the_table(damage: int) -> None:
    lengths = np.full(8, 5, np.int32)
    documents = np.arange(9, dtype=np.int64)
    documents[3] = damage
    prefix = np.arange(9, dtype=np.uint64)
    out = [np.zeros(9, np.int64) for _ in range(5)]
    with pytest.raises(DataError):
        native.call("fl_count_pieces", lengths, documents, 8, 4, 1, 1, np.zeros(9, np.uint64))
    with pytest.raises(DataError):
        native.call("fl_pack", lengths, documents, np.zeros(8, np.int64), 8, 4, 1, prefix, 1, 8, 0, *out)
