"""Write Megatron's indexed datasets (format: indexed.py). Tokens are written as they arrive. The dataset gets its final
name only when it is complete.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frontier_llm.data.indexed import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    READ_ONLY,
    SCAN_CHUNK,
    VERSION,
    IndexedDataset,
    bin_path,
    idx_path,
)
from frontier_llm.data.meta import meta_path
from frontier_llm.errors import DataError
from frontier_llm.files import NamedFile


class IndexedWriter:
    """Writes a dataset one sequence at a time in bounded memory. Files get their final names only in `finish`.

    Lengths and document indices are written to temporary files beside the target, so memory does not grow with the
    number of documents. As a context manager it calls `finish` on success and removes all temporary files on an error.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any] | str) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype.newbyteorder("=") not in DTYPE_CODES:
            valid = ", ".join(sorted(str(dtype) for dtype in DTYPE_CODES))
            raise DataError(
                f"the format has no code for dtype {self.dtype}",
                where=self.prefix,
                fix=f"use one of {valid}",
            )
        self.sequence_count = self.document_count = self.token_count = 0
        self.largest_id: int | None = None  # largest token id so far
        bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        owner = f"{socket.gethostname()}.{os.getpid()}"  # processes of several nodes may write in one directory
        kinds = ("bin", "idx", "lengths", "documents", "modes")
        self._temporary = {kind: Path(f"{prefix}.{kind}.tmp.{owner}") for kind in kinds}
        self._bin, self._lengths, self._documents, self._modes = (
            self._create(kind) for kind in ("bin", "lengths", "documents", "modes")
        )
        self._any_mode = False
        self._documents.write(struct.pack("<q", 0))

    def _create(self, kind: str) -> io.BufferedRandom:
        return io.BufferedRandom(NamedFile(self._temporary[kind], "w+"), 1 << 20)

    def add_sequence(self, tokens: NDArray[Any] | list[int], learnt: bool = True) -> None:
        """Append one sequence to the open document. Raises DataError if a token does not fit the dtype."""
        array = np.asarray(tokens)
        converted = array.astype(self.dtype.newbyteorder("<"), copy=False)
        if array.size and array.dtype != self.dtype and not np.array_equal(converted, array):
            raise DataError(
                f"token ids up to {array.max()} do not fit {self.dtype}",
                where=self.prefix,
                fix="write the dataset with a larger dtype (optimal_dtype(vocab_size))",
            )
        self._bin.write(converted.tobytes())
        self._lengths.write(struct.pack("<i", array.size))
        self._modes.write(struct.pack("b", 0 if learnt else READ_ONLY))
        self._any_mode |= not learnt
        self.sequence_count += 1
        self.token_count += int(array.size)
        self._note_largest(array)

    def _note_largest(self, tokens: NDArray[Any]) -> None:
        if tokens.size:
            largest = int(tokens.max())
            self.largest_id = largest if self.largest_id is None else max(self.largest_id, largest)

    def end_document(self) -> None:
        """End the open document. Every document must be ended."""
        self._documents.write(struct.pack("<q", self.sequence_count))
        self.document_count += 1

    def add_document(self, tokens: NDArray[Any] | list[int]) -> None:
        """Append a document of one sequence."""
        self.add_sequence(tokens)
        self.end_document()

    def append(self, other: IndexedDataset) -> None:
        """Append all documents of another dataset by streaming. Raises DataError if its dtype differs."""
        if other.dtype.newbyteorder("=") != self.dtype.newbyteorder("="):
            raise DataError(
                f"has tokens of type {other.dtype}, not {self.dtype}",
                where=other.prefix,
                fix="join only datasets of the same tokenizer",
            )
        modes = np.broadcast_to(np.zeros(1, np.int8), other.sequence_count) if other.modes is None else other.modes
        self._any_mode |= other.modes is not None
        for tokens in _chunks(other.tokens):
            self._bin.write(tokens.data)
            self._note_largest(tokens)
        for lengths in _chunks(other.sequence_lengths):
            self._lengths.write(lengths.data)
        for part_of_modes in _chunks(modes):
            self._modes.write(np.ascontiguousarray(part_of_modes).data)
        for indices in _chunks(other.document_indices[1:]):
            self._documents.write((indices + self.sequence_count).data)
        self.sequence_count += other.sequence_count
        self.document_count += other.document_count
        self.token_count += other.token_count

    def finish(self) -> None:
        """Write the index, flush all files to disk and rename them.

        The .idx is renamed last, so that an .idx always belongs to a complete .bin.
        """
        self._bin.flush()
        os.fsync(self._bin.fileno())
        with self._create("idx") as idx:
            code = DTYPE_CODES[self.dtype.newbyteorder("=")]
            idx.write(HEADER.pack(MAGIC, VERSION, code, self.sequence_count, self.document_count + 1))
            self._lengths.seek(0)
            shutil.copyfileobj(self._lengths, idx)
            self._lengths.seek(0)
            pointer = 0
            while chunk := self._lengths.read(4 * SCAN_CHUNK):
                ends = pointer + np.cumsum(np.frombuffer(chunk, "<i4").astype(np.int64) * self.dtype.itemsize)
                idx.write(np.concatenate(([pointer], ends[:-1])).astype("<i8").tobytes())
                pointer = int(ends[-1])
            self._documents.seek(0)
            shutil.copyfileobj(self._documents, idx)
            if self._any_mode:
                self._modes.seek(0)
                shutil.copyfileobj(self._modes, idx)
            idx.flush()
            os.fsync(idx.fileno())
        # an old record or index must never lie beside a new .bin
        for old in (meta_path(self.prefix), idx_path(self.prefix)):
            old.unlink(missing_ok=True)
        self._temporary["bin"].replace(bin_path(self.prefix))
        self._temporary["idx"].replace(idx_path(self.prefix))

    def abort(self) -> None:
        """Close and remove the temporary files."""
        for spool in (self._bin, self._lengths, self._documents, self._modes):
            with contextlib.suppress(OSError):  # flushing fails on a full disk, but the data is not needed any more
                spool.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                self.finish()
        finally:
            self.abort()


def _chunks(table: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield views of at most SCAN_CHUNK items each."""
    for start in range(0, table.size, SCAN_CHUNK):
        yield table[start : start + SCAN_CHUNK]
