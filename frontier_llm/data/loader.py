"""Create a rank's microbatches from a run's data configuration.

The samples of a run are numbered from 0 (`data/position.py`). A step consumes the next `global_batch` samples, from
number `first` on. Row `row` of microbatch `microbatch` on data-parallel rank `dp_rank` is the sample with the number

    first + microbatch * (micro_batch * dp) + dp_rank * micro_batch + row

The union over ranks and microbatches is therefore the same set of samples for every dp and micro_batch that divide the
global batch. The pipeline and tensor ranks of one replica read the same rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from frontier_llm.config import RunConfig, phases_of
from frontier_llm.config.schema import Blend
from frontier_llm.data.best_fit import PackedSamples
from frontier_llm.data.blend import blend_of, whole_weights
from frontier_llm.data.identity import course, datasets_of
from frontier_llm.data.ids import known_largest_id
from frontier_llm.data.indexed import IndexedDataset, idx_path
from frontier_llm.data.meta import DatasetMeta, read_meta
from frontier_llm.data.position import START, SYNTHETIC, Packing, Position, Stream, order_key
from frontier_llm.data.samples import BlendedSamples, DatasetSamples, DocumentSamples, SampleStream, SyntheticSamples
from frontier_llm.data.summary import too_often
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.errors import DataError, FrontierError, Problem, closest

KEPT_BYTES = 64 << 20
VALIDATION_SEED_OFFSET = 1  # the order of a held-out set has its own seed


@dataclass(frozen=True)
class SampleBatch:
    """B samples of S + 1 tokens. Inputs are [:, :-1], targets are [:, 1:].

    With `reset_at_documents`, `documents_BS` numbers the documents of each row from 0; otherwise it is None. A token
    attends only to tokens with the same document number. `loss_mask_BS` is False for targets that belong to another
    document than the input, and for targets without a loss (prompts, padding). It is None if all targets count.
    """

    tokens_BS1: NDArray[np.int64]
    documents_BS: NDArray[np.int32] | None = None
    loss_mask_BS: NDArray[np.bool_] | None = None

    @property
    def target_count(self) -> int:
        """Number of targets that count in the loss."""
        return int(self.tokens_BS1[:, 1:].size if self.loss_mask_BS is None else self.loss_mask_BS.sum())


class Batches:
    """A data-parallel rank's microbatches of a sample stream. A background thread reads ahead.

    `microbatch(step, index)` returns the same result for any order of calls.
    """

    def __init__(
        self,
        samples: SampleStream,
        global_batch: int,
        micro_batch: int,
        dp_rank: int = 0,
        dp: int = 1,
        *,
        vocab_size: int | None = None,
        reset_at_documents: bool = False,
        read_ahead: int = 4,
        first_sample: int = 0,
    ) -> None:
        """Step s consists of the `global_batch` samples from number `first_sample` + s * `global_batch` on.

        If earlier steps of the run had another batch, `first_sample` is chosen so that this holds for the next steps.

        `vocab_size` bounds the token ids (None: unchecked). `read_ahead` microbatches are prepared in the background
        (0: none). Raises DataError if `global_batch` is not a multiple of micro_batch * dp.
        """
        rows = micro_batch * dp
        if global_batch % rows:
            what = f"global_batch {global_batch} is not a multiple of micro_batch {micro_batch} x dp {dp} = {rows}"
            raise DataError(what, fix=f"set batch.global_batch to a multiple of {rows}, or change batch.micro_batch")
        self.samples = samples
        self._first_sample = first_sample
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.dp_rank = dp_rank
        self.dp = dp
        self.microbatches = global_batch // rows  # per step
        self.vocab_size = vocab_size
        self.reset_at_documents = reset_at_documents
        self.masks_targets = reset_at_documents or samples.masked
        self._read_ahead = range(read_ahead + 1)
        self._pool = ThreadPoolExecutor(1, "read-ahead") if read_ahead else None
        # the other virtual stages of this rank request the same microbatches again, so microbatches are cached up to
        # KEPT_BYTES
        capacity = max(2 * read_ahead + 2, KEPT_BYTES // (8 * micro_batch * (samples.sequence_length + 1)))
        self._prepared = functools.lru_cache(capacity)(self._submit)

    def sample_ids(self, step: int, index: int) -> range:
        """Return the numbers of the samples in a microbatch of a step, counted over the run."""
        microbatch = index * self.dp + self.dp_rank  # number within the step, over all replicas
        first = self._first_sample + step * self.global_batch + microbatch * self.micro_batch
        return range(first, first + self.micro_batch)

    def microbatch(self, step: int, index: int) -> SampleBatch:
        """Return microbatch `index` (0 … microbatches - 1) of step `step` (0 …).

        Raises DataError for a token outside the vocabulary.
        """
        if not 0 <= index < self.microbatches:
            raise IndexError(f"microbatch {index} of {self.microbatches}")
        if self._pool is None:
            return self._make(step, index)
        place = step * self.microbatches + index
        futures = [self._prepared(*divmod(place + ahead, self.microbatches)) for ahead in self._read_ahead]
        return futures[0].result()

    def _submit(self, step: int, index: int) -> Future[SampleBatch]:
        assert self._pool is not None
        return self._pool.submit(self._make, step, index)

    def _make(self, step: int, index: int) -> SampleBatch:
        ids = self.sample_ids(step, index)
        tokens = np.empty((len(ids), self.samples.sequence_length + 1), np.int64)
        learnt = np.ones(tokens.shape, np.bool_) if self.samples.masked else None
        lengths = []
        for row, k in enumerate(ids):
            learnt_S1 = None if learnt is None else learnt[row]
            lengths.append(self.samples.fill(k, tokens[row], learnt_S1))
        if self.vocab_size is not None and (tokens.max() >= self.vocab_size or tokens.min() < 0):
            row, place = np.argwhere((tokens >= self.vocab_size) | (tokens < 0))[0]
            origin = self.samples.origin(ids[row], int(place))
            what = (
                f"sample {ids[row]} has the token id {tokens[row, place]}, but the vocabulary has {self.vocab_size} ids"
            )
            fix = (
                "train with the tokenizer that made the data, or increase model.vocab_size; `frontier-llm data check` "
                "finds all such datasets"
            )
            raise DataError(what, fix, "" if origin is None else str(origin))
        targets = None if learnt is None else learnt[:, 1:].copy()
        if not self.reset_at_documents:
            return SampleBatch(tokens, None, targets)
        documents = np.stack([np.repeat(np.arange(len(row), dtype=np.int32), row) for row in lengths])
        within = documents[:, 1:] == documents[:, :-1]
        return SampleBatch(tokens, documents[:, :-1].copy(), within if targets is None else within & targets)

    def close(self) -> None:
        """Stop the background thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def open_samples(run: RunConfig, split: str = "train") -> BlendedSamples:
    """Return the samples of one of `run.data.splits`, numbered from its beginning.

    The split is a held-out set, or "train" for the run's first blend. Raises DataError for missing or damaged files.
    """
    sources = run.data.splits[split]
    seed = run.data.seed + (VALIDATION_SEED_OFFSET if split != "train" else 0)
    if isinstance(sources, str):
        synthetic = SyntheticSamples(run.model.sequence_length, seed, run.model.vocab_size)
        return BlendedSamples([synthetic], lambda k: (0, k))
    # held-out sets are never packed best-fit, so that losses of runs with different packings are comparable
    packing = run.data.packing if split == "train" else "concatenate"
    streams = [
        _open_dataset(run, source.path, run.model.sequence_length, packing, order_key(packing, seed, place))
        for place, source in enumerate(sources)
    ]
    weights = whole_weights([source.weight for source in sources])
    return BlendedSamples(streams, blend_of(tuple(weights)).locate)


def open_run(run: RunConfig, position: Position) -> BlendedSamples:
    """Return the run's samples by number, valid from `position` on until the run enters another blend.

    Raises DataError for missing or damaged files.
    """
    streams = [open_stream(run, stream) for stream in position.current]
    return BlendedSamples(streams, lambda k: position.sample(k - position.samples))


def open_stream(run: RunConfig, stream: Stream) -> SampleStream:
    """Return the samples of one stream."""
    if stream.dataset == SYNTHETIC:
        return SyntheticSamples(stream.sequence_length, run.data.seed, run.model.vocab_size, stream.key)
    return _open_dataset(run, stream.path, stream.sequence_length, stream.packing, stream.key)


def _open_dataset(run: RunConfig, path: str, sequence_length: int, packing: Packing, key: int) -> DatasetSamples:
    cache_dir = Path(run.data.cache_dir) if run.data.cache_dir else None
    samples = PackedSamples if packing == "best-fit" else DocumentSamples
    return samples(IndexedDataset(path), sequence_length, key, cache_dir)


def open_batches(run: RunConfig, dp_rank: int, dp: int, split: str = "train", read_ahead: int = 4) -> Batches:
    """Return a data-parallel rank's microbatches of one of `run.data.splits`, from its first sample on."""
    return _batches(run, open_samples(run, split), dp_rank, dp, read_ahead)


def open_run_batches(run: RunConfig, position: Position, step: int, dp_rank: int, dp: int) -> Batches:
    """Return a data-parallel rank's microbatches of the run's training data from `position` on.

    `step` is the number of steps done at `position`.
    """
    first = position.samples - step * run.batch.global_batch
    return _batches(run, open_run(run, position), dp_rank, dp, first_sample=first)


def _batches(
    run: RunConfig,
    samples: SampleStream,
    dp_rank: int,
    dp: int,
    read_ahead: int = 4,
    first_sample: int = 0,
) -> Batches:
    return Batches(
        samples=samples,
        global_batch=run.batch.global_batch,
        micro_batch=run.batch.micro_batch,
        dp_rank=dp_rank,
        dp=dp,
        vocab_size=run.model.vocab_size,
        reset_at_documents=run.data.reset_at_documents,
        read_ahead=read_ahead,
        first_sample=first_sample,
    )


def prepare_indices(run: RunConfig, position: Position = START) -> None:
    """Build the sample indices for all steps after `position`, before the ranks start.

    The ranks then only map the index files.

    One process on any node does this.
    """
    for phase, after in course(run, position, datasets_of([run])):
        for stream in after.current:
            _prepare(open_stream(phase.config, stream), stream.taken)
        count = run.train.eval_samples + phase.config.batch.global_batch
        for split in phase.config.data.held_out:
            for samples in open_samples(phase.config, split).streams:
                _prepare(samples, count)


def _prepare(samples: SampleStream, count: int) -> None:
    if isinstance(samples, DocumentSamples | PackedSamples):
        samples.prepare(count)


def data_problems(run: RunConfig, position: Position = START) -> list[Problem]:
    """Return all problems with the run's data. One process calls this before ranks start.

    Problems with datasets: missing or damaged files, too few tokens, more epochs than allowed. Problems with the
    tokenizer: it cannot be read, or it does not match the datasets or the model's vocabulary.
    """
    problems: list[Problem] = []
    digest = None
    if run.data.tokenizer is not None:
        try:
            tokenizer = load_tokenizer(run.data.tokenizer)
            digest = tokenizer.digest
            problems += _vocabulary(run, tokenizer.vocab_size, run.data.tokenizer)
        except FrontierError as error:
            problems += error.problems
    for phase, (split, sources) in (
        (each, item) for each in phases_of(run) for item in each.config.data.splits.items()
    ):
        if isinstance(sources, str):
            continue
        if (mistake := _mistake(split, [source.path for source in sources])) is not None:
            problems.append(mistake)
            continue
        try:
            problems += _too_short(phase.config, split, open_samples(phase.config, split))
        except FrontierError as error:
            problems += (replace(problem, where=f"{_key(split)}: {problem.where}") for problem in error.problems)
            continue
        for source in sources:
            try:
                problems += _mismatch(run, source.path, digest)
            except FrontierError as error:
                problems += error.problems
    problems += _tokenizer_problems(run)
    if not problems:
        problems += too_often(run, position)
    return list(dict.fromkeys(problems))  # a dataset may be in several splits and phases


def _key(split: str) -> str:
    return f"data.{split.replace('/', '.')}"


def _mistake(split: str, paths: list[str]) -> Problem | None:
    """Return a Problem if `paths` is not a list of datasets."""
    if not paths:
        return Problem(
            where=_key(split),
            what="is an empty list",
            fix="give a dataset" + (", or write null" if split != "train" else ""),
        )
    for path in paths:
        if re.match(r"[\d.]+ \S", path):
            fix = f"{_key(split)}=[{{path: PREFIX, weight: {path.split()[0]}}}, …]"
            return Problem(where=_key(split), what=f"{path!r} is a blend in Megatron's notation", fix=fix)
        if "," in path and not idx_path(path).exists():
            what = f"there is no dataset {path!r}"
            return Problem(
                where=_key(split), what=what, fix=f"write several datasets as a list: {_key(split)}=[{path}]"
            )
        if closest(path.lower(), ["synthetic"]) and not idx_path(path).exists():
            return Problem(
                where=_key(split),
                what=f"there is no dataset {path!r}",
                fix=f"did you mean {_key(split)}=synthetic?",
            )
    return None


def _too_short(run: RunConfig, split: str, samples: SampleStream) -> list[Problem]:
    """Return Problems for datasets shorter than one sequence, and for training data shorter than one batch.

    With less than one batch, every step would train on the same tokens again.
    """
    assert isinstance(samples, BlendedSamples)
    datasets = [stream.dataset for stream in samples.streams if isinstance(stream, DocumentSamples | PackedSamples)]
    S = run.model.sequence_length
    batch_tokens = run.batch.global_batch * run.model.sequence_length
    problems = [
        Problem(
            where=_key(split),
            what=f"{dataset.prefix} has {dataset.token_count} tokens, less than one sequence of {S} + 1",
            fix="give more data, or reduce model.sequence_length",
        )
        for dataset in datasets
        if dataset.token_count <= S
    ]
    tokens = sum(dataset.token_count for dataset in datasets)
    if split == "train" and not problems and tokens < batch_tokens:
        what = f"has {tokens} tokens, less than one batch of {run.batch.global_batch} sequences of {S} ({batch_tokens})"
        problems.append(
            Problem(
                where="data.train",
                what=what,
                fix=f"give more data, or set batch.global_batch to at most {tokens // S}",
            )
        )
    return problems


def _vocabulary(run: RunConfig, vocab_size: int, owner: str) -> list[Problem]:
    """Return a Problem if the vocabulary of a tokenizer or dataset is larger than the model's vocabulary."""
    if vocab_size <= run.model.vocab_size:
        return []
    what = f"{run.model.vocab_size} is less than the {vocab_size} ids of {owner}"
    return [Problem(where="model.vocab_size", what=what, fix=f"set model.vocab_size={vocab_size}")]


def _tokenizer_problems(run: RunConfig) -> list[Problem]:
    """Return Problems for datasets of any phase or held-out set that were made by another tokenizer than the first
    dataset.

    If data.tokenizer is set, `_mismatch` compares the datasets with it instead.
    """
    if run.data.tokenizer is not None:
        return []
    sources = [
        (split, source.path) for split, blend in _all_splits(run) if not isinstance(blend, str) for source in blend
    ]
    first: tuple[str, DatasetMeta] | None = None
    problems: list[Problem] = []
    for split, path in dict.fromkeys(sources):
        try:
            meta = read_meta(path)
        except FrontierError:
            continue  # the dataset's own check reports this problem
        if meta is None:
            continue
        if first is None:
            first = path, meta
        elif meta.tokenizer_digest != first[1].tokenizer_digest:
            theirs = f"{meta.tokenizer} (sha256 {meta.tokenizer_digest[:12]})"
            others = f"{first[0]} by {first[1].tokenizer} (sha256 {first[1].tokenizer_digest[:12]})"
            what = f"{path} was made by the tokenizer {theirs}, but {others}: the same ids mean different text"
            problems.append(Problem(where=_key(split), what=what, fix="tokenize the text of both with one tokenizer"))
    return problems


def _all_splits(run: RunConfig) -> Iterator[tuple[str, Blend]]:
    """Yield (split, blend) of each phase."""
    for phase in phases_of(run):
        yield from phase.config.data.splits.items()


def _mismatch(run: RunConfig, path: str, digest: str | None) -> list[Problem]:
    """Return Problems if a dataset does not match the model's vocabulary or the configured tokenizer."""
    meta = read_meta(path)
    problems = [] if meta is None else _vocabulary(run, meta.vocab_size, f"the tokenizer that made {path}")
    if not problems and (largest := known_largest_id(path)) is not None and largest >= run.model.vocab_size:
        what = f"the model has {run.model.vocab_size} ids, but {path} contains the id {largest}"
        fix = (
            f"train with the tokenizer that made the data, or set model.vocab_size={largest + 1} or more; "
            f"`frontier-llm data check` shows the place"
        )
        problems.append(Problem(where="model.vocab_size", what=what, fix=fix))
    if meta is None:
        return problems
    if digest is not None and digest != meta.tokenizer_digest:
        what = (
            f"{run.data.tokenizer} (sha256 {digest[:12]}) is not the tokenizer of {path}, which was made with "
            f"{meta.tokenizer} (sha256 {meta.tokenizer_digest[:12]})"
        )
        problems.append(
            Problem(
                where="data.tokenizer",
                what=what,
                fix=f"set data.tokenizer to {meta.tokenizer}, or tokenize the text again",
            )
        )
    return problems
