"""Packs whole documents best-fit into sequences (arXiv:2404.10830). Only documents longer than a sequence are cut.

A sequence has S + 1 tokens, of which S are inputs. A document that fits is one piece. A longer document is cut into
pieces of S + 1 tokens that overlap by one token. Each token of the document except the first is then a target exactly
once.

The pieces are ordered by a permutation keyed by the seed and divided into windows of 65,536 pieces. Each window is
packed separately (csrc/sample_index.cpp). The pieces are placed from the longest to the shortest, each into the fullest
sequence that has space for it. The space that no piece fills is padding. Padding repeats the sequence's last token and
has no loss.

The packing is the same in every epoch. Each epoch has its own order of windows and of the sequences inside each. So
sample k is a pure function of (seed, k) for any layout. A rank stores one window (2 MB), and 0.125 byte per document of
the dataset.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.native import FAILURES, call, permute
from frontier_llm.data.position import derive_key
from frontier_llm.data.samples import BLOCK, Origin, check_readable, documents_of, index_path, index_table, threads
from frontier_llm.errors import DataError

# number of pieces that are packed together; packing a window takes a tenth of a second, once per rank and epoch
WINDOW = 1 << 16


class _Window(NamedTuple):
    """Pieces of documents in the sequences of one window. Sequence i has pieces starts[i] … starts[i + 1] − 1."""

    starts: NDArray[np.int64]
    offsets: NDArray[np.int64]  # index in its document of each piece's first token
    lengths: NDArray[np.int64]
    tokens: NDArray[np.int64]  # index in .bin of each piece's first token


class PackedSamples:
    """Samples of one indexed dataset, packed best-fit."""

    masked = True  # Padding, and the token that a cut repeats, are read but have no loss.

    def __init__(self, dataset: IndexedDataset, sequence_length: int, key: int, cache_dir: Path | None = None) -> None:
        """`key` determines packing and order. `cache_dir` is the folder of the cached tables."""
        check_readable(dataset)
        self.dataset = dataset
        self.sequence_length = sequence_length
        self.key = key
        self._cache_dir = cache_dir
        self._window = functools.lru_cache(2)(self._pack)
        self._epoch = functools.lru_cache(2)(self._order)

    @functools.cached_property
    def _pieces(self) -> NDArray[np.uint64]:
        """Number of pieces before every 64th document; u64[ceil(documents / 64) + 1]."""
        documents = self.dataset.document_count
        return self._cached(
            "pieces",
            -(-documents // BLOCK) + 1,
            "fl_count_pieces",
            documents,
            self.sequence_length,
            BLOCK,
        )

    @functools.cached_property
    def packed(self) -> NDArray[np.uint64]:
        """Number of sequences of each window."""
        documents = self.dataset.document_count
        windows = -(-int(self._pieces[-1]) // WINDOW)
        order = (documents, self.sequence_length, BLOCK, self._pieces, self.key, WINDOW)
        return self._cached("packed", windows, "fl_count_packed", *order)

    @property
    def piece_count(self) -> int:
        """Number of pieces: one per uncut document, several per document that is cut."""
        return int(self._pieces[-1])

    @property
    def samples_per_epoch(self) -> int:
        """Number of sequences of one epoch, which together hold all documents."""
        return int(self.packed.sum())

    def _cached(self, purpose: str, length: int, function: str, *arguments: object) -> NDArray[np.uint64]:
        def build(out: NDArray[np.uint64]) -> None:
            call(function, *documents_of(self.dataset), *arguments, threads(), out, where=self.dataset.prefix)

        parameters = (self.key, self.sequence_length, BLOCK, WINDOW)
        return index_table(
            self.dataset,
            length,
            lambda: index_path(self.dataset, self._cache_dir, purpose, *parameters),
            build,
        )

    def _pack(self, number: int) -> _Window:
        dataset = self.dataset
        starts = np.empty(WINDOW + 1, np.int64)
        out = np.empty((4, WINDOW), np.int64)
        tables = (dataset.sequence_lengths, dataset.document_indices, dataset.sequence_pointers, dataset.document_count)
        order = (self.sequence_length, BLOCK, self._pieces, self.key, WINDOW, number)
        sequences = call(
            "fl_pack",
            *tables,
            *order,
            starts,
            *out,
            where=dataset.prefix,
        )
        if sequences != self.packed[number]:
            raise DataError(
                FAILURES[-2],
                where=dataset.prefix,
                fix="delete the folder data.cache_dir; by default this is index_cache/ beside the dataset",
            )
        _, offsets, sizes, document_bytes = out
        return _Window(starts, offsets, sizes, document_bytes // dataset.dtype.itemsize + offsets)

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (numbers of the windows in the epoch's order, number of the epoch's samples before each window)."""
        order = permute(
            self.packed.size,
            derive_key("windows", self.key, epoch),
            np.arange(self.packed.size, dtype=np.uint64),
        ).astype(np.int64)
        return order, np.concatenate([[0], np.cumsum(self.packed[order].astype(np.int64))])

    def prepare(self, samples: int) -> None:
        """Build and cache the tables of the packing. They do not depend on the number of samples."""
        _ = self.packed

    def locate(self, k: int) -> tuple[int, int]:
        """Return (window, sequence within it) of sample k."""
        epoch, place = divmod(k, self.samples_per_epoch)
        order, before = self._epoch(epoch)
        turn = int(np.searchsorted(before, place, side="right")) - 1
        window = int(order[turn])
        key = derive_key("sequences", self.key, epoch, window)
        inside = np.array([place - int(before[turn])], np.uint64)
        return window, int(permute(int(self.packed[window]), key, inside)[0])

    def _pieces_of(self, k: int) -> tuple[list[int], list[int], list[int]]:
        """Return the pieces of sample k: first token in .bin, number of tokens, and offset in the document of each."""
        number, sequence = self.locate(k)
        window = self._window(number)
        own = slice(int(window.starts[sequence]), int(window.starts[sequence + 1]))
        return window.tokens[own].tolist(), window.lengths[own].tolist(), window.offsets[own].tolist()

    def parts(self, k: int) -> Iterator[tuple[int, int]]:
        """Yield (first token in .bin, number of tokens) of each piece of sample k, without padding."""
        starts, lengths, _ = self._pieces_of(k)
        yield from zip(starts, lengths, strict=True)

    def fill(
        self,
        k: int,
        tokens_S1: NDArray[np.int64],
        learnt_S1: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:
        """Write sample k into `tokens_S1`.

        Return the lengths of the sample's pieces of documents. Padding counts as the last piece.
        """
        filled = 0
        starts, lengths, offsets = self._pieces_of(k)
        for start, length, offset in zip(starts, lengths, offsets, strict=True):
            tokens_S1[filled : filled + length] = self.dataset.read(start, length)
            if learnt_S1 is not None:
                learnt_S1[filled : filled + length] = self.dataset.learnt(start, length)
                # the first token after a cut was already a target of the previous piece
                learnt_S1[filled] &= offset == 0
            filled += length
        if filled < tokens_S1.size:
            tokens_S1[filled:] = tokens_S1[filled - 1]
            lengths.append(tokens_S1.size - filled)
            if learnt_S1 is not None:
                learnt_S1[filled:] = False
        return np.array(lengths, np.int64)

    def origin(self, k: int, place: int) -> Origin:
        """Return the origin of the token at index `place` of sample k: its dataset and its index there.

        Padding has the origin of the token that it repeats.
        """
        starts, lengths, _ = self._pieces_of(k)
        ends = np.cumsum(lengths)
        place = min(place, int(ends[-1]) - 1)
        piece = int(np.searchsorted(ends, place, side="right"))
        inside = place - int(ends[piece] - lengths[piece])
        return Origin(self.dataset, starts[piece] + inside)
