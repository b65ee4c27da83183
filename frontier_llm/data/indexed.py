"""Megatron's indexed dataset, `.bin` + `.idx`: the file format and a memory-mapped reader.

indexed_writer.py writes the format. Files are byte-compatible with Megatron's in both directions. `.bin` holds the
tokens in C order without a header. `.idx` is little-endian. The layout below was read from megatron-core 0.16.1's
indexed_dataset.py. The tests compare our files byte for byte with files that its builder writes:

    offset  type     content
    0       9 bytes  magic "MMIDIDX\\0\\0"
    9       u64      version, 1
    17      u8       dtype code
    18      u64      S, number of sequences
    26      u64      D, number of documents + 1
    34      i32[S]   sequence lengths in tokens
    ..      i64[S]   sequence pointers: byte offsets into .bin
    ..      i64[D]   document indices: first sequence of each document; first 0, last S
    ..      i8[S]    sequence modes (optional): 1 = input without a loss, such as the prompt before an answer

A document is one or more consecutive sequences in `.bin`. Nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import struct
from bisect import bisect_left, bisect_right
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frontier_llm.config.token_files import DTYPE_NAMES, HEADER, MAGIC
from frontier_llm.errors import DataError, closest

LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype[Any]] = {code: np.dtype(name).newbyteorder("<") for code, name in DTYPE_NAMES.items()}
DTYPE_CODES = {dtype.newbyteorder("="): code for code, dtype in DTYPES.items()}
READ_ONLY = 1  # Mode of a sequence whose tokens are read but have no loss.
# Largest number of sequences (20 MB of .idx) with which a file is checked completely each time it is opened. A larger
# file is checked when its sample index is built.
SCAN_LIMIT = 1 << 20
SCAN_CHUNK = 1 << 20
DIGEST_BLOCK_BYTES = 1 << 16
SAMPLE_BLOCK_BYTES = 1 << 12  # size of a block of .bin that `identity` reads
DIGEST_BLOCKS = 256


def optimal_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return Megatron's token type: two bytes below 65500 ids, otherwise four."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    """Return the path of a dataset's tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of a dataset's index."""
    return Path(f"{prefix}.idx")


class IndexedDataset:
    """A dataset opened for reading. Both files are memory-mapped, so the time to open it does not depend on its size.

    `sequence_lengths` i32[S], `sequence_pointers` i64[S], `document_indices` i64[D] and `tokens` are views of the
    files.
    """

    def __init__(self, prefix: str | Path, scan: bool | None = None) -> None:
        """Open and validate the dataset.

        The header, the file sizes and both ends of every table are always checked. With `scan`, every entry is checked
        too. If `scan` is None, this is done for at most 2^20 sequences. Raises a DataError that names the file, the
        byte offset, the expected and the found value.
        """
        self.prefix = str(prefix)
        _require_files(self.prefix)
        path = idx_path(prefix)
        self._index_map: mmap.mmap | None = None
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size:
                self._index_map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map = np.frombuffer(self._index_map or b"", np.uint8)
        code, self.sequence_count, documents_plus_1 = _read_header(path, self._map)
        self.dtype = DTYPES[code]
        self.document_count = documents_plus_1 - 1
        sizes = (4 * self.sequence_count, 8 * self.sequence_count, 8 * documents_plus_1)
        offsets = [HEADER.size, HEADER.size + sizes[0], HEADER.size + sizes[0] + sizes[1], HEADER.size + sum(sizes)]
        if self._map.size not in (offsets[3], offsets[3] + self.sequence_count):
            wanted = f"{offsets[3]} bytes for {self.sequence_count} sequences and {self.document_count} documents"
            raise _damaged(
                path,
                18,
                wanted,
                f"{self._map.size} bytes",
                "the file is truncated or incomplete; copy it again, or create it again",
            )
        self._offsets = offsets
        bin_bytes = bin_path(prefix).stat().st_size
        self._check_ends(path, bin_bytes, offsets)
        self.token_count = bin_bytes // self.dtype.itemsize
        self._file: FileIO | None = None
        self.scanned = False
        if scan or (scan is None and self.sequence_count <= SCAN_LIMIT):
            self.scan()

    @functools.cached_property
    def tokens(self) -> NDArray[Any]:
        """All tokens, a view of .bin. The file is mapped at the first use, because training only calls `read`."""
        if not self.token_count:
            return np.zeros(0, self.dtype)
        try:
            return np.memmap(bin_path(self.prefix), self.dtype, "r")
        except OSError as error:
            raise _unreadable(bin_path(self.prefix), error) from error

    @property
    def sequence_lengths(self) -> NDArray[Any]:
        """i32[S], tokens of each sequence. A view of the file."""
        return self._view("<i4", self._offsets[0], self._offsets[1])

    @property
    def sequence_pointers(self) -> NDArray[Any]:
        """i64[S], byte offset in .bin of each sequence. A view of the file."""
        return self._view("<i8", self._offsets[1], self._offsets[2])

    @property
    def document_indices(self) -> NDArray[Any]:
        """i64[D], the first sequence of each document. A view of the file."""
        return self._view("<i8", self._offsets[2], self._offsets[3])

    @property
    def modes(self) -> NDArray[Any] | None:
        """i8[S], the mode of each sequence, or None if the file has no modes. A view of the file."""
        has_modes = self._map.size > self._offsets[3]
        if has_modes:
            return self._view("i1", self._offsets[3], self._offsets[3] + self.sequence_count)
        return None

    def _view(self, dtype: str, start: int, stop: int) -> NDArray[Any]:
        return self._index()[start:stop].view(np.ndarray).view(dtype)

    def _index(self) -> NDArray[np.uint8]:
        """Return the mapped .idx.

        Raises DataError if the file has been truncated since it was opened. Reading beyond the end of the file would
        end the process with SIGBUS.
        """
        path = idx_path(self.prefix)
        try:
            size_bytes = self._index_map.size() if self._index_map is not None else 0  # current size of the file
        except OSError as error:
            raise _unreadable(path, error) from error
        if size_bytes < self._map.size:
            fix = (
                "the file was truncated while it was in use; restore the file and start again: the run continues "
                "from its checkpoint"
            )
            raise _damaged(path, size_bytes, f"{self._map.size} bytes, as at the start", f"{size_bytes}", fix)
        return self._map

    def _check_ends(self, path: Path, bin_bytes: int, offsets: list[int]) -> None:
        """Check the first and last entry of each table and the size of .bin, in O(1)."""
        first_document = int(self.document_indices[0])
        last_document = int(self.document_indices[-1])
        if first_document != 0 or last_document != self.sequence_count:
            wanted = f"document indices from 0 to {self.sequence_count}"
            raise _damaged(
                path,
                offsets[2],
                wanted,
                f"{first_document} to {last_document}",
                "the index is damaged; copy it again, or create it again",
            )
        end_bytes = 0
        if self.sequence_count:
            end_bytes = int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        if bin_bytes != end_bytes:
            fix = (
                "the two files belong to different datasets, or .bin is incomplete; copy both again, or tokenize again"
            )
            raise _damaged(
                bin_path(self.prefix),
                min(bin_bytes, end_bytes),
                f"{end_bytes} bytes, as recorded in {path.name}",
                f"{bin_bytes}",
                fix,
            )

    def scan(self) -> None:
        """Check every entry: lengths >= 0, pointers without gaps, document indices that never decrease.

        Raises DataError at the first bad entry.
        """
        itemsize = self.dtype.itemsize
        expected = 0
        lengths_at = HEADER.size
        pointers_at = HEADER.size + 4 * self.sequence_count
        documents_at = pointers_at + 8 * self.sequence_count
        for start in range(0, self.sequence_count, SCAN_CHUNK):
            lengths = self.sequence_lengths[start : start + SCAN_CHUNK].astype(np.int64)
            pointers = self.sequence_pointers[start : start + SCAN_CHUNK]
            ends = expected + np.cumsum(lengths * itemsize)
            starts = ends - lengths * itemsize
            for at in np.flatnonzero((lengths < 0) | (pointers != starts))[:1].tolist():
                if lengths[at] < 0:
                    raise self._bad_entry(
                        lengths_at + 4 * (start + at),
                        f"a length >= 0 for sequence {start + at}",
                        lengths[at],
                    )
                raise self._bad_entry(
                    pointers_at + 8 * (start + at),
                    f"pointer {starts[at]} for sequence {start + at}",
                    pointers[at],
                )
            expected = int(ends[-1])
        for start in range(0, self.document_count, SCAN_CHUNK):
            chunk = self.document_indices[start : start + SCAN_CHUNK + 1]
            for at in (np.flatnonzero(chunk[1:] < chunk[:-1])[:1] + 1).tolist():
                raise self._bad_entry(
                    documents_at + 8 * (start + at),
                    f"document index {start + at} >= {chunk[at - 1]}",
                    chunk[at],
                )
        self.scanned = True

    def _bad_entry(self, offset: int, expected: str, entry: np.integer[Any]) -> DataError:
        return _damaged(
            idx_path(self.prefix),
            offset,
            expected,
            str(entry),
            "the index is damaged; copy it again, or create it again",
        )

    def place_of(self, token: int) -> str:
        """Return the place of a token of `tokens`, for a message: 'document 3, token 17', counted from 0."""
        document = self.document_at(token)
        return f"document {document}, token {token - self.document_start(document)}"

    def document_start(self, document: int) -> int:
        """Return the position in `tokens` of a document's first token."""
        sequence = int(self.document_indices[document])
        if sequence == self.sequence_count:
            return self.token_count
        return int(self.sequence_pointers[sequence]) // self.dtype.itemsize

    def document_starts(self) -> NDArray[np.int64]:
        """Return the position in `tokens` of each document's first token, and the number of tokens."""
        starts = np.full(self.document_count + 1, self.token_count, np.int64)
        for first in range(0, starts.size, SCAN_CHUNK):
            sequences = self.document_indices[first : first + SCAN_CHUNK]
            is_inside = sequences < self.sequence_count
            pointers = self.sequence_pointers[sequences[is_inside]]
            starts[first : first + SCAN_CHUNK][is_inside] = pointers // self.dtype.itemsize
        return starts

    def document(self, document: int) -> NDArray[Any]:
        """Return the tokens of one document, a view of the file."""
        return self.tokens[self.document_start(document) : self.document_start(document + 1)]

    def document_at(self, token: int) -> int:
        """Return the document that contains the token at a position in `tokens`."""
        # np.searchsorted would copy the complete table, because the tables of a .idx are not aligned.
        sequence = bisect_right(self.sequence_pointers, token * self.dtype.itemsize) - 1
        return bisect_right(self.document_indices, sequence) - 1

    def check_token_ids(self) -> None:
        """Raise DataError if the dataset's values are not integers."""
        if self.dtype.kind not in "iu":
            raise DataError(
                f"has values of type {self.dtype}, not token ids", where=self.prefix, fix="give a token dataset"
            )

    def learnt(self, start: int, count: int) -> NDArray[np.bool_]:
        """Return for each of the tokens [start, start + count) whether it has a loss. Tokens in sequences of mode 1
        have none.
        """
        modes = self.modes
        if modes is None or not count:
            return np.ones(count, np.bool_)
        pointers = self.sequence_pointers
        size = self.dtype.itemsize
        first = bisect_right(pointers, start * size) - 1
        last = bisect_left(pointers, (start + count) * size)
        borders = np.append(np.maximum(pointers[first:last] // size, start), start + count)
        return np.repeat(modes[first:last] != READ_ONLY, np.diff(borders))

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Return tokens [start, start + count), read with one pread.

        Unlike a page fault in the memory map, pread releases the GIL. A background thread that waits for a disk then
        does not stop the training thread. A parallel file system receives one request of the right size. Raises
        DataError if the file has shrunk or cannot be read.
        """
        size = self.dtype.itemsize
        inside = 0 <= start <= start + count <= self.token_count  # False only for a damaged index
        try:
            if self._file is None:
                self._file = bin_path(self.prefix).open("rb", buffering=0)
            data = os.pread(self._file.fileno(), count * size, start * size) if inside else b""
        except OSError as error:
            raise _unreadable(bin_path(self.prefix), error) from error
        if not inside or len(data) != count * size:
            fix = "the file was changed during the run, or its index is damaged; restore both"
            raise _damaged(bin_path(self.prefix), start * size, f"{count * size} bytes", f"{len(data)}", fix)
        return np.frombuffer(data, self.dtype)

    @property
    def one_sequence_per_document(self) -> bool:
        """True if document d is sequence d: D = S + 1, and each document has one sequence. Usual for tokenized text."""
        if self.document_count != self.sequence_count:
            return False
        chunks = (
            (start, self.document_indices[start : start + SCAN_CHUNK])
            for start in range(0, self.document_count + 1, SCAN_CHUNK)
        )
        return all(np.array_equal(chunk, np.arange(start, start + chunk.size)) for start, chunk in chunks)

    def digest(self) -> str:
        """Return a digest of the index: its sizes and 256 evenly spaced 64 KiB blocks of .idx (all of it up to 16 MiB).

        Reading the complete index of a billion documents would take 20 GB on every rank. The sample index detects
        changes that this digest misses.
        """
        state = hashlib.sha256(struct.pack("<QQ", self._map.size, self.token_count))
        for start in _evenly(self._map.size, DIGEST_BLOCK_BYTES):
            state.update(self._index()[start : start + DIGEST_BLOCK_BYTES].tobytes())
        return state.hexdigest()

    def identity(self) -> str:
        """Return a digest of the dataset: the index's digest and 256 evenly spaced 4 KiB blocks of .bin (all of it up
        to 1 MiB).

        One rank computes it at each start and reads one megabyte. Hashing a terabyte of tokens would take ten minutes.
        """
        state = hashlib.sha256(self.digest().encode())
        count = SAMPLE_BLOCK_BYTES // self.dtype.itemsize
        for start in _evenly(self.token_count, count):
            state.update(self.read(start, min(count, self.token_count - start)).tobytes())
        return state.hexdigest()


def _evenly(size: int, block: int) -> list[int]:
    """Return the starts of DIGEST_BLOCKS evenly spaced blocks, including the first and the last block.

    If there are fewer blocks, return the starts of all of them.
    """
    last = -(-size // block) - 1
    if size:
        return sorted({number * last // (DIGEST_BLOCKS - 1) * block for number in range(DIGEST_BLOCKS)})
    return []


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot be read: {error.strerror}",
        where=str(path),
        fix="check its permissions and its disk, or restore it from a copy",
    )


def _maker(prefix: str) -> str:
    """Return the command that makes a dataset of this name."""
    folder = Path(prefix).parent
    return f"frontier-llm data stdlib {folder}" if folder.name == "stdlib" else "frontier-llm data tokenize"


def _require_files(prefix: str) -> None:
    missing = [path for path in (bin_path(prefix), idx_path(prefix)) if not os.path.isfile(path)]
    if not missing:
        for path in (bin_path(prefix), idx_path(prefix)):
            try:
                path.open("rb").close()
            except OSError as error:
                raise _unreadable(path, error) from error
        return
    siblings = [str(path.with_suffix("")) for path in Path(prefix).parent.glob("*.idx")]
    near = closest(prefix, siblings)
    if near:
        fix = f"did you mean {near!r}?"
    else:
        fix = (
            f"give the path without .bin/.idx, relative to the working directory, or create it with `{_maker(prefix)}`"
        )
    if prefix.endswith((".bin", ".idx")):
        fix = f"give the path without its ending: {prefix[:-4]}"
    raise DataError(
        "no such file" + "".join(f", nor {path.name}" for path in missing[1:]),
        where=str(missing[0].absolute()),
        fix=fix,
    )


def _read_header(path: Path, content: NDArray[np.uint8]) -> tuple[int, int, int]:
    """Return (dtype code, S, D). Raises DataError if the content does not begin with a valid MMIDIDX header."""
    head = content[: HEADER.size].tobytes()
    if head.startswith(LEGACY_MAGIC):
        what = "is a legacy TNTIDX index (fairseq's cached format, before Megatron's MMIDIDX)"
        raise DataError(what, where=str(path), fix="tokenize the text again with `frontier-llm data tokenize`")
    if not head.startswith(MAGIC):
        raise _damaged(path, 0, f"magic {MAGIC!r}", repr(head[:9]), "this is not a Megatron .idx file; check the path")
    if len(head) < HEADER.size:
        raise _damaged(
            path,
            len(head),
            f"a header of {HEADER.size} bytes",
            f"{len(head)} bytes",
            "the file is truncated; copy it again, or create it again",
        )
    _, version, code, sequences, documents = HEADER.unpack(head)
    rules = [
        (9, version, version == VERSION, f"version {VERSION}"),
        (17, code, code in DTYPES, f"a dtype code in {sorted(DTYPES)}"),
        (26, documents, documents >= 1, "at least 1 document index"),
    ]
    for offset, value, holds, expected in rules:
        if not holds:
            raise _damaged(
                path,
                offset,
                expected,
                str(value),
                "the header is damaged or has a newer format; copy the file again, or create it again",
            )
    return code, sequences, documents


def _damaged(path: Path, offset: int, expected: str, actual: str, fix: str) -> DataError:
    return DataError(f"at byte {offset}: expected {expected}, found {actual}", where=str(path), fix=fix)
