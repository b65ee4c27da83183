"""Sample k of a run as a pure function of (seed, k): random access into a shuffled, endless stream of documents.

Epoch e is the concatenation of all documents in the order of a permutation keyed by (seed, e). Each document ends in
its end-of-document token. The stream of epochs is cut every S tokens. A sample is the S + 1 tokens from one cut on, so
its last token is the first token of the next sample. Every token of an epoch is therefore an input exactly once and a
target exactly once. A sample can span documents and epochs. A second permutation keyed by (seed, e) shuffles the
samples that begin in epoch e. The shuffle separates the samples of one long document.

With T tokens per epoch, epoch e owns samples ceil(e T / S) ... ceil((e+1) T / S) - 1. These formulas make resuming at
any k possible without a scan. Both permutations are computed on the fly. The only stored table is the running token
count at every 64th document.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from frontier_llm import log
from frontier_llm.data.cache import cached_array
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.native import ABI, call, library, permute
from frontier_llm.data.position import derive_key, order_key
from frontier_llm.errors import DataError
from frontier_llm.units import format_count

BLOCK = 64  # Documents per index entry (0.125 byte per document). A lookup reads up to 64 documents (about 3 us).
CACHE_FROM_DOCUMENTS = 1 << 20  # A smaller index is built in memory in a tenth of a second.
EPOCHS_IN_MEMORY = 3
MAXIMUM_THREADS = 8


class SampleStream(Protocol):
    """Protocol of a source that returns samples of S + 1 tokens by number."""

    sequence_length: int  # S
    masked: bool  # True if some tokens have no loss

    def fill(
        self,
        k: int,
        tokens_S1: NDArray[np.int64],
        learnt_S1: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:
        """Write sample k into `tokens_S1`. Return the lengths of its document pieces, which sum to S + 1.

        If `learnt_S1` is given, it receives True for each token that has a loss and False for the others.
        """

    def origin(self, k: int, place: int) -> Origin | None:
        """Return the origin of the token at index `place` of sample k. None for synthetic tokens."""


class Origin(NamedTuple):
    """Origin of a token of a sample: its dataset and its index there."""

    dataset: IndexedDataset
    token: int  # index in the dataset's tokens

    def __str__(self) -> str:
        return f"{self.dataset.prefix}: {self.dataset.place_of(self.token)}"


class DatasetSamples(SampleStream, Protocol):
    """Protocol of the samples of one dataset."""

    dataset: IndexedDataset

    def prepare(self, samples: int) -> None:
        """Build and cache the indices of the first `samples` samples, if they are large enough to be cached."""

    def parts(self, k: int) -> Iterator[tuple[int, int]]:
        """Yield (first token in .bin, number of tokens) of each document part of sample k. Padding is not included."""


def threads() -> int:
    """Return the number of threads that build a table of documents."""
    return min(len(os.sched_getaffinity(0)), MAXIMUM_THREADS)


class Pieces(NamedTuple):
    """Parts of documents in stream order.

    Part i is `lengths[i]` tokens of `documents[i]` from token `offsets[i]` on. `starts[i]` is its first token in .bin.
    """

    documents: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]


def documents_of(dataset: IndexedDataset) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return (sequence lengths, first sequence of each document), the tables that the compiled functions take.

    Every entry has been checked. The second table is None if document d is sequence d. A lookup then takes one random
    read per document instead of two.
    """
    if not dataset.scanned:
        dataset.scan()
    if dataset.one_sequence_per_document:
        return dataset.sequence_lengths, None
    return dataset.sequence_lengths, dataset.document_indices


def index_path(dataset: IndexedDataset, cache_dir: Path | None, purpose: str, *parameters: object) -> Path:
    """Return the path at which a table of the dataset's documents is cached, by default beside the data.

    The name contains a digest of everything that determines the table.
    """
    identity = "/".join(map(str, (dataset.digest(), *parameters, ABI)))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:20]
    prefix = Path(dataset.prefix)
    return (cache_dir or prefix.parent / "index_cache") / f"{prefix.name}-{purpose}-{digest}.npy"


def index_table(
    dataset: IndexedDataset,
    length: int,
    path: Callable[[], Path],
    build: Callable[[NDArray[np.uint64]], None],
) -> NDArray[np.uint64]:
    """Return a table that `build` fills.

    The table of a large dataset is mapped from the file at `path()`. The table of a small dataset is built in memory.
    """
    if dataset.document_count >= CACHE_FROM_DOCUMENTS:
        return cached_array(path(), length, np.uint64, build)
    table = np.empty(length, np.uint64)
    build(table)
    return table


class EpochIndex:
    """Maps token p of epoch e to (document, offset) pieces with the compiled index of that epoch."""

    def __init__(self, dataset: IndexedDataset, key: int, cache_dir: Path | None = None) -> None:
        """`key` and the epoch determine the document order. `cache_dir` is passed to `index_path`."""
        self.dataset = dataset
        self.key = key
        self.cache_dir = cache_dir
        self._entries = -(-dataset.document_count // BLOCK) + 1
        self.prefix = functools.lru_cache(EPOCHS_IN_MEMORY)(self._prefix)

    def order_key(self, epoch: int) -> int:
        """Return the key of the epoch's document permutation."""
        return derive_key("documents", self.key, epoch)

    def path(self, epoch: int) -> Path:
        """Return the path at which this epoch's index is cached."""
        return index_path(self.dataset, self.cache_dir, f"epoch{epoch:04}", self.order_key(epoch), BLOCK)

    def _prefix(self, epoch: int) -> NDArray[np.uint64]:
        """Return the tokens before every 64th position of the document order; u64[ceil(documents / 64) + 1]."""
        return index_table(self.dataset, self._entries, lambda: self.path(epoch), lambda out: self._build(epoch, out))

    def _build(self, epoch: int, out: NDArray[np.uint64]) -> None:
        dataset = self.dataset
        started_s = time.monotonic()
        arguments = (*documents_of(dataset), dataset.document_count, self.order_key(epoch), BLOCK, threads(), out)
        call("fl_build", *arguments, where=dataset.prefix)
        if dataset.document_count >= CACHE_FROM_DOCUMENTS:
            size = f"{format_count(dataset.document_count)} documents in {time.monotonic() - started_s:.1f} s"
            log.info(f"sample index of {dataset.prefix}, epoch {epoch}: {size}")

    def pieces(self, epoch: int, token: int, wanted: int) -> Pieces:
        """Return the pieces of tokens [token, token + wanted) of the epoch, which may end earlier."""
        out = np.empty((4, wanted), np.int64)
        dataset = self.dataset
        tables = (dataset.sequence_lengths, dataset.document_indices, dataset.sequence_pointers, dataset.document_count)
        order = (self.order_key(epoch), BLOCK, self.prefix(epoch))
        count = call(
            "fl_pieces",
            *tables,
            *order,
            token,
            wanted,
            *out,
            where=dataset.prefix,
        )
        documents, offsets, lengths, document_bytes = out[:, :count]
        return Pieces(documents, offsets, lengths, document_bytes // dataset.dtype.itemsize + offsets)


def check_readable(dataset: IndexedDataset) -> None:
    """Raise an error if samples of the dataset cannot be read.

    Raises DataError for a dataset without tokens or with values that are not integers, and BackendError if the compiled
    index is missing.
    """
    if dataset.token_count == 0:
        raise DataError("has no tokens", where=dataset.prefix, fix="tokenize a corpus that is not empty")
    dataset.check_token_ids()
    library()  # raises before the first step if the library is missing


class DocumentSamples:
    """Samples of one indexed dataset that are cut every S tokens."""

    def __init__(self, dataset: IndexedDataset, sequence_length: int, key: int, cache_dir: Path | None = None) -> None:
        """`key` determines the order. The orders of two keys are unrelated."""
        check_readable(dataset)
        self.dataset = dataset
        self.masked = dataset.modes is not None
        self.sequence_length = sequence_length
        self.key = key
        self.index = EpochIndex(dataset, key, cache_dir)

    def first_of_epoch(self, epoch: int) -> int:
        """Return the number of the first sample that begins in the epoch: ceil(epoch * T / S)."""
        return -(-epoch * self.dataset.token_count // self.sequence_length)

    def epoch_of(self, k: int) -> int:
        """Return the epoch in which sample k begins."""
        return k * self.sequence_length // self.dataset.token_count

    def prepare(self, samples: int) -> None:
        """Build and cache the epochs' indices for the first `samples` samples."""
        if self.dataset.document_count >= CACHE_FROM_DOCUMENTS:
            after = self.first_of_epoch(self.epoch_of(max(samples - 1, 0)) + 1)
            # the last sample of an epoch extends into the next epoch, and the shuffle can move this sample to any
            # position
            for epoch in range(after * self.sequence_length // self.dataset.token_count + 1):
                self.index.prefix(epoch)

    def cut(self, k: int) -> tuple[int, int]:
        """Return (epoch, first token within the epoch) of sample k."""
        epoch = self.epoch_of(k)
        first = self.first_of_epoch(epoch)
        count = self.first_of_epoch(epoch + 1) - first
        shuffled = int(permute(count, derive_key("samples", self.key, epoch), np.array([k - first], np.uint64))[0])
        return epoch, (first + shuffled) * self.sequence_length - epoch * self.dataset.token_count

    def fill(
        self,
        k: int,
        tokens_S1: NDArray[np.int64],
        learnt_S1: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:
        """Write sample k into `tokens_S1`. Return the lengths of its pieces."""
        filled = 0
        lengths = []
        for start, length in self.parts(k):
            tokens_S1[filled : filled + length] = self.dataset.read(start, length)
            if learnt_S1 is not None:
                learnt_S1[filled : filled + length] = self.dataset.learnt(start, length)
            filled += length
            lengths.append(length)
        return np.array(lengths, np.int64)

    def parts(self, k: int) -> Iterator[tuple[int, int]]:
        """Yield (first token in .bin, number of tokens) of each document part of sample k."""
        epoch, token = self.cut(k)
        left = self.sequence_length + 1
        while left:
            pieces = self.index.pieces(epoch, token, left)
            yield from zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
            left -= int(pieces.lengths.sum())
            epoch = epoch + 1
            token = 0

    def origin(self, k: int, place: int) -> Origin:
        """Return the origin of the token at index `place` of sample k."""
        epoch, token = self.cut(k)
        while True:
            pieces = self.index.pieces(epoch, token, place + 1)
            ends = np.cumsum(pieces.lengths)
            if place < ends[-1]:
                piece = int(np.searchsorted(ends, place, side="right"))
                inside = place - int(ends[piece] - pieces.lengths[piece])
                return Origin(self.dataset, int(pieces.starts[piece]) + inside)
            place -= int(ends[-1])
            epoch = epoch + 1
            token = 0


class BlendedSamples:
    """Samples of one or several streams."""

    def __init__(self, streams: Sequence[SampleStream], locate: Callable[[int], tuple[int, int]]) -> None:
        """`locate(k)` returns (index in `streams` of the stream that holds sample k, index in that stream)."""
        self.streams = streams
        self.masked = any(stream.masked for stream in streams)
        self.locate = locate
        self.sequence_length = streams[0].sequence_length

    def fill(
        self,
        k: int,
        tokens_S1: NDArray[np.int64],
        learnt_S1: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:
        """Write sample k into `tokens_S1`. Return the lengths of its pieces."""
        place, index = self.locate(k)
        return self.streams[place].fill(index, tokens_S1, learnt_S1)

    def origin(self, k: int, place: int) -> Origin | None:
        """Return the origin of the token at index `place` of sample k. None for synthetic tokens."""
        stream, index = self.locate(k)
        return self.streams[stream].origin(index, place)


class SyntheticSamples:
    """Pseudo-random tokens with a structure that a model can learn, for benchmarks and tests. They need no file.

    The tokens follow a fixed cycle through at most 1024 ids of the vocabulary. At each step, with probability 1/16, the
    next token is a random one of the cycle, and a new document begins. The best possible loss is about ln(16)/16 +
    (15/16) ln(16/15) + ln(V')/16 nats, with V' the length of the cycle.
    """

    masked = False

    def __init__(self, sequence_length: int, seed: int, vocab_size: int, key: int | None = None) -> None:
        """`seed` draws the cycle. `key` determines the samples; None means the key of the seed's first stream."""
        self.sequence_length = sequence_length
        first = order_key("synthetic", seed, 0)
        self.key = first if key is None else key
        self.places = min(vocab_size, 1024)
        self._cycle = (
            np.random.Philox(key=first).random_raw(vocab_size).argsort(kind="stable")[: self.places].astype(np.int64)
        )

    def origin(self, k: int, place: int) -> None:
        """Return None, because synthetic tokens come from no dataset."""

    def fill(
        self,
        k: int,
        tokens_S1: NDArray[np.int64],
        learnt_S1: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:
        """Write sample k into `tokens_S1`. Return the lengths of its documents."""
        count = tokens_S1.size
        # raw words of a counter-based generator are the same in every numpy version
        words: Any = np.random.Philox(key=derive_key("sample", self.key, k)).random_raw(2 * count)
        jumps = words[:count] >> np.uint64(60) == 0
        jumps[0] = True
        starts = np.flatnonzero(jumps)
        run = np.cumsum(jumps) - 1
        places = (words[count:] % np.uint64(self.places)).astype(np.int64)
        tokens_S1[:] = self._cycle[(places[starts][run] + np.arange(count) - starts[run]) % self.places]
        return np.diff(np.append(starts, count))
