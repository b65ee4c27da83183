"""Tests the data loader: the global batch has the same samples in every layout. Also tests masks, reading ahead, and
the refusal of unsuitable datasets.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.config import BatchConfig, DataConfig, DataSource, RunConfig, build, load_model, load_run, phases_of
from frontier_llm.data.best_fit import PackedSamples
from frontier_llm.data.identity import datasets_of, wanted
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.loader import (
    Batches,
    SampleBatch,
    data_problems,
    open_batches,
    open_run_batches,
    open_samples,
    open_stream,
)
from frontier_llm.data.meta import DatasetMeta, write_meta
from frontier_llm.data.position import START, order_key
from frontier_llm.data.samples import BlendedSamples, DocumentSamples, SyntheticSamples
from frontier_llm.data.tokenize import tokenize
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.errors import DataError


def step_rows(global_batch: int, micro_batch: int, dp: int, step: int) -> list[tuple[int, ...]]:
    """Return the global batch of a step as (sample order, tokens), gathered over ranks and microbatches."""
    rows = {}
    for rank in range(dp):
        batches = Batches(SyntheticSamples(8, 3, 50), global_batch, micro_batch, rank, dp, read_ahead=0)
        for index in range(batches.microbatches):
            tokens = batches.microbatch(step, index).tokens_BS1
            assert tokens.shape == (micro_batch, 9)
            for row, k in enumerate(batches.sample_ids(step, index)):
                assert k not in rows
                rows[k] = tuple(tokens[row].tolist())
    assert sorted(rows) == list(range(step * global_batch, (step + 1) * global_batch))
    return [rows[k] for k in sorted(rows)]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1000))
@settings(max_examples=40)
def test_union_over_ranks_is_the_same(micro_batch: int, dp: int, more: int, step: int) -> None:
    global_batch = micro_batch * dp * more
    assert step_rows(global_batch, micro_batch, dp, step) == step_rows(global_batch, 1, 1, step)


def test_reading_ahead_changes_nothing_in_any_call_order() -> None:
    plain = Batches(SyntheticSamples(8, 3, 50), 12, 2, 1, 2, read_ahead=0)
    ahead = Batches(SyntheticSamples(8, 3, 50), 12, 2, 1, 2, read_ahead=3)
    calls = [(0, 0), (0, 1), (0, 0), (0, 2), (1, 0), (0, 2), (9, 1), (9, 2), (10, 0), (2, 0), (2, 0)]
    for step, index in calls:
        assert np.array_equal(plain.microbatch(step, index).tokens_BS1, ahead.microbatch(step, index).tokens_BS1)
    ahead.close()


def test_next_microbatch_is_made_before_it_is_asked_for() -> None:
    made = []
    batches = Batches(SyntheticSamples(8, 3, 50), 4, 1, read_ahead=2)
    make = batches._make
    batches._make = lambda step, index: (made.append((step, index)), make(step, index))[1]  # type: ignore[method-assign]
    batches.microbatch(0, 3)
    batches.close()
    assert made[0] == (0, 3)
    assert set(made) <= {(0, 3), (1, 0), (1, 1)}


def test_a_step_is_kept_for_the_other_chunks() -> None:
    made = []
    batches = Batches(SyntheticSamples(8, 3, 50), 4, 1, read_ahead=2)
    make = batches._make
    batches._make = lambda step, index: (made.append((step, index)), make(step, index))[1]  # type: ignore[method-assign]
    for _ in range(3):
        for index in range(4):
            batches.microbatch(0, index)
    batches.close()
    assert [key for key in made if key[0] == 0] == [(0, index) for index in range(4)]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontier_llm.data.loader.KEPT_BYTES", 0)
    batches = Batches(SyntheticSamples(8, 3, 50), 64, 1, read_ahead=2)
    for index in range(64):
        batches.microbatch(0, index)
    assert batches._prepared.cache_info().currsize <= 6
    batches.close()


def test_an_error_in_the_background_reaches_the_caller() -> None:
    batches = Batches(SyntheticSamples(8, 3, 50), 4, 1, vocab_size=10)
    with pytest.raises(DataError, match=r"sample \d+ has the token id \d+, but the vocabulary has 10"):
        for index in range(4):
            batches.microbatch(0, index)
    batches.close()


def test_indivisible_batch_and_index_outside() -> None:
    with pytest.raises(DataError, match="not a multiple"):
        Batches(SyntheticSamples(8, 3, 50), 10, 4)
    with pytest.raises(IndexError):
        Batches(SyntheticSamples(8, 3, 50), 4, 2, read_ahead=0).microbatch(0, 2)


def test_documents_positions_and_mask(tmp_path: Path) -> None:
    lengths = [3, 1, 6, 2] * 10
    with IndexedWriter(tmp_path / "d", "u2") as writer:
        for document, length in enumerate(lengths):
            writer.add_document([document] * length)  # each token is its document's number
    samples = DocumentSamples(IndexedDataset(tmp_path / "d"), 10, order_key("concatenate", 1, 0))
    batch = Batches(samples, 8, 8, reset_at_documents=True, read_ahead=0).microbatch(0, 0)
    assert batch.documents_BS is not None
    assert batch.loss_mask_BS is not None
    for row in range(8):
        tokens = batch.tokens_BS1[row]
        documents = batch.documents_BS[row]
        assert documents[0] == 0
        for place in range(10):
            if place and tokens[place] != tokens[place - 1]:
                assert documents[place] == documents[place - 1] + 1
            elif place:
                assert documents[place] == documents[place - 1]
            assert batch.loss_mask_BS[row, place] == (tokens[place + 1] == tokens[place])
    assert batch.target_count == batch.loss_mask_BS.sum() < 80


def test_without_document_mode_there_is_no_mask() -> None:
    batch = Batches(SyntheticSamples(8, 3, 50), 2, 2, read_ahead=0).microbatch(0, 0)
    assert batch.documents_BS is None
    assert batch.loss_mask_BS is None
    assert batch.target_count == 16
    assert isinstance(batch, SampleBatch)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some text of the corpus\n" * 50)
    tokenize([tmp_path / "a.txt"], tmp_path / "tokens", "bytes")
    return tmp_path


def run_config(corpus: Path, vocab_size: int = 300, **data: object) -> RunConfig:
    model = load_model("llama-tiny", {"vocab_size": vocab_size})
    fields = {"train": (DataSource(path=str(corpus / "tokens")),), **data}
    return RunConfig(model=model, batch=BatchConfig(global_batch=4, micro_batch=2), data=DataConfig(**fields))


def test_open_batches_from_a_config(corpus: Path) -> None:
    source = DataSource(path=str(corpus / "tokens"))
    config = run_config(
        corpus,
        train=(source, DataSource(path=source.path, weight=3.0)),
        validation=(source,),
        tokenizer="bytes",
    )
    assert data_problems(config) == []
    train = open_batches(config, 0, 2)
    validation = open_batches(config, 0, 2, "validation")
    assert train is not None
    assert validation is not None
    assert train.microbatches == 1
    tokens = train.microbatch(0, 0).tokens_BS1
    assert tokens.shape == (2, config.model.sequence_length + 1)
    assert "text of the corpus" in bytes(tokens[0][tokens[0] < 256].tolist()).decode()
    assert list(run_config(corpus).data.splits) == ["train"]
    with pytest.raises(KeyError):
        open_batches(run_config(corpus), 0, 1, "validation")
    for batches in (train, validation):
        batches.close()


def test_validation_has_an_order_of_its_own(corpus: Path) -> None:
    config = run_config(corpus, train="synthetic", validation="synthetic")
    streams = [open_samples(config, split) for split in ("train", "validation")]
    rows = []
    for stream in streams:
        assert stream is not None
        rows.append(np.empty(stream.sequence_length + 1, np.int64))
        stream.fill(0, rows[-1])
    assert rows[0].tolist() != rows[1].tolist()


def test_every_problem_is_found_at_once(corpus: Path) -> None:
    missing = DataSource(path=str(corpus / "nowhere"))
    config = run_config(corpus, vocab_size=256, validation=(missing,), tokenizer=str(corpus / "none.model"))
    text = "\n".join(map(str, data_problems(config)))
    assert "no such tokenizer" in text
    assert f"data.validation: {corpus}/nowhere.bin: no such file" in text
    assert "model.vocab_size: 256 is less than the 257 ids of the tokenizer that made" in text
    assert "set model.vocab_size=257" in text


def test_a_problem_names_the_key_and_comes_once(corpus: Path) -> None:
    config = run_config(corpus, vocab_size=256)
    config = config.model_copy(update={"data": config.data.model_copy(update={"validation": config.data.train})})
    problems = data_problems(config)
    assert len(problems) == len(set(problems)) > 0
    blend = run_config(corpus, validation=(DataSource(path=f"0.3 {corpus}/a 0.7 {corpus}/b"),))
    (problem,) = data_problems(blend)
    assert problem.where == "data.validation" and "in Megatron's notation" in problem.what
    assert problem.fix == "data.validation=[{path: PREFIX, weight: 0.3}, …]"


def test_another_tokenizer_is_refused(corpus: Path) -> None:
    from frontier_llm.data.tokenizer import train_sentencepiece

    train_sentencepiece(["a text to train on, with words and words\n" * 20], corpus / "other.model", 290)
    text = "\n".join(map(str, data_problems(run_config(corpus, tokenizer=str(corpus / "other.model")))))
    assert "is not the tokenizer of" in text
    assert "set data.tokenizer to bytes" in text
    small = "\n".join(
        map(str, data_problems(run_config(corpus, vocab_size=280, tokenizer=str(corpus / "other.model"))))
    )
    assert "model.vocab_size: 280 is less than the 290 ids" in small


def test_damaged_record_is_a_problem(corpus: Path) -> None:
    (corpus / "tokens.meta.json").write_text("{")
    assert "is damaged" in "\n".join(map(str, data_problems(run_config(corpus))))


def test_indices_can_be_built_ahead(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from frontier_llm.data import samples as samples_module
    from frontier_llm.data.loader import prepare_indices
    from frontier_llm.data.samples import EpochIndex

    monkeypatch.setattr(samples_module, "CACHE_FROM_DOCUMENTS", 1)
    source = DataSource(path=str(corpus / "tokens"))
    config = run_config(
        corpus,
        train=(source, DataSource(path=source.path, weight=2.0)),
        validation=(source,),
        cache_dir=str(tmp_path / "cache"),
    )
    prepare_indices(config)
    monkeypatch.setattr(EpochIndex, "_build", lambda *_: pytest.fail("was not built ahead"))
    for split, steps in (
        ("train", config.train.steps),
        ("validation", config.train.eval_samples // config.batch.global_batch),
    ):
        batches = open_batches(config, 0, 1, split, read_ahead=0)
        assert batches is not None
        for step in range(steps):
            for index in range(batches.microbatches):
                batches.microbatch(step, index)


def test_a_phase_reads_on_in_its_stream_and_another_length_is_another_stream(corpus: Path) -> None:
    phases = "[{steps: 3}, {steps: 2, batch: {global_batch: 8}}, {steps: 2, model: {sequence_length: 64}}]"
    run = build(RunConfig, {**run_config(corpus).model_dump(), "train": {"phases": yaml.safe_load(phases)}})
    plain = open_batches(run, 0, 1)
    datasets = datasets_of([run])
    position = START
    batches = []
    for phase in phases_of(run):
        position = position.enter(wanted(phase.config, datasets))
        batches.append(open_run_batches(phase.config, position, phase.first, 0, 1))
        position = position.advance(phase.config.batch.global_batch, phase.steps)
    assert plain is not None
    every = np.empty((28, run.model.sequence_length + 1), np.int64)
    for k in range(28):
        plain.samples.fill(k, every[k])

    def of_step(place: int, step: int) -> np.ndarray:
        return np.concatenate(
            [batches[place].microbatch(step, index).tokens_BS1 for index in range(batches[place].microbatches)]
        )

    assert (
        np.array_equal(of_step(0, 2), every[8:12])
        and np.array_equal(of_step(1, 3), every[12:20])
        and np.array_equal(of_step(1, 4), every[20:28])
    )
    # sample numbers count over the run, so that dropout's masks do not repeat
    assert batches[2].sample_ids(5, 0)[0] == 28
    assert [stream.taken for stream in position.streams] == [28, 8]
    # `data show` opens the streams of every phase with the configuration of the complete run
    assert [open_stream(run, stream).sequence_length for stream in position.streams] == [run.model.sequence_length, 64]
    other = SyntheticSamples(8, 3, 50, key=7)
    assert (
        other._cycle.tolist() == SyntheticSamples(8, 3, 50)._cycle.tolist()
        and other.key != SyntheticSamples(8, 3, 50).key
    )
    assert position.streams[0].order != position.streams[1].order


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_the_origin_of_each_token_of_a_sample_is_known(tmp_path: Path, packing: str) -> None:
    """Covers documents with several sequences and with empty ones, samples that cross documents and epochs, and
    padding.
    """
    with IndexedWriter(tmp_path / "d", "<u2") as writer:
        for document in range(40):
            for part in range(document % 3):
                writer.add_sequence(
                    [100 * document + number for number in range(part * 7, part * 7 + 7 * (document % 4))]
                )
            writer.add_sequence([100 * document + 99])
            writer.end_document()
    dataset = IndexedDataset(tmp_path / "d")
    make = PackedSamples if packing == "best-fit" else DocumentSamples
    samples = BlendedSamples([make(dataset, 16, order_key(packing, 1, 0))], lambda k: (0, k))
    tokens = np.empty(17, np.int64)
    learnt = np.ones(17, np.bool_)
    for k in range(2 * dataset.token_count // 16):
        samples.fill(k, tokens, learnt)
        for place in range(17):
            origin = samples.origin(k, place)
            assert origin is not None and dataset.tokens[origin.token] == tokens[place]
            (document, inside) = map(int, re.findall(r"\d+", str(origin).rpartition(": ")[2]))
            assert document == tokens[place] // 100 and dataset.document(document)[inside] == tokens[place]


def test_a_token_beyond_the_vocabulary_names_dataset_document_and_place(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", "<u2") as writer:
        for document in range(10):
            writer.add_document([1, 2, 3, 4, 300 if document == 7 else 5, 6])
    samples = DocumentSamples(IndexedDataset(tmp_path / "d"), 6, order_key("concatenate", 1, 0))
    batches = Batches(samples, 10, 10, vocab_size=256, read_ahead=0)
    with pytest.raises(
        DataError,
        match=rf"{tmp_path}/d: document 7, token 4: sample 1\d has the token id 300, but the vocabulary has 256",
    ):
        batches.microbatch(1, 0)  # the second epoch, in which row numbers and sample numbers differ


@pytest.mark.parametrize("named", [False, True], ids=["null", "named"])
@pytest.mark.parametrize("split", ["train", "validation", "phase"])
def test_another_tokenizer_in_any_source_is_refused(tmp_path: Path, split: str, named: bool) -> None:
    """This also holds if the run names no tokenizer."""
    tokenizers = {"a": ("bytes", load_tokenizer("bytes").digest), "b": ("b.model", "b" * 64)}
    for name, (tokenizer, digest) in tokenizers.items():
        with IndexedWriter(tmp_path / name, "<u2") as writer:
            writer.add_document(list(range(100)))
        write_meta(tmp_path / name, DatasetMeta(tokenizer, digest, 257, 256, 1, 100, 400))
    a, b = ({"path": str(tmp_path / name)} for name in "ab")
    data: dict[str, object] = {"train": [a, b] if split == "train" else [a]}
    if split == "validation":
        data["validation"] = [b]
    if named:
        data["tokenizer"] = "bytes"
    phases = [{"steps": 1}, {"steps": 1, "data": {"train": [b]}}] if split == "phase" else []
    model = {"base": "llama-tiny", "vocab_size": 257, "sequence_length": 16}
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(
            {"model": model, "batch": {"global_batch": 1}, "data": data, "train": {"phases": phases, "steps": 2}}
        )
    )
    (problem,) = data_problems(load_run(str(tmp_path / "run.yaml")))
    bytes_digest = tokenizers["a"][1][:12]
    if named:
        assert problem.where == "data.tokenizer"
        assert problem.what == (
            f"bytes (sha256 {bytes_digest}) is not the tokenizer of {tmp_path}/b, which was made with b.model "
            "(sha256 bbbbbbbbbbbb)"
        )
    else:
        assert problem.where == ("data.validation" if split == "validation" else "data.train")
        assert (
            f"{tmp_path}/b was made by the tokenizer b.model (sha256 bbbbbbbbbbbb), but {tmp_path}/a by bytes (sha256 "
            f"{bytes_digest})" in problem.what
        )


@pytest.mark.parametrize("recorded", [True, False])
def test_a_dataset_whose_largest_id_the_model_lacks_is_refused_before_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded: bool,
) -> None:
    """The record gives the largest id, even of a dataset that is too large to read. A small dataset without a record is
    read.
    """
    with IndexedWriter(tmp_path / "d", "<u2") as writer:
        writer.add_document([*range(90), 400, *range(90)])
        writer.add_document([5])
    assert writer.largest_id == 400
    if recorded:
        write_meta(tmp_path / "d", DatasetMeta("t", "a" * 64, 257, 256, 2, 182, 400, largest_id=writer.largest_id))
        monkeypatch.setattr("frontier_llm.data.ids.SCANNED_TOKENS", 100)
    model = {"base": "llama-tiny", "vocab_size": 257, "sequence_length": 16}
    run = {"model": model, "batch": {"global_batch": 1}, "data": {"train": str(tmp_path / "d")}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    (problem,) = data_problems(load_run(str(tmp_path / "run.yaml")))
    assert (problem.where, problem.what) == (
        "model.vocab_size",
        f"the model has 257 ids, but {tmp_path}/d contains the id 400",
    )
