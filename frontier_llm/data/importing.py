"""Import token files of other programs into `<prefix>.bin/.idx/.meta.json`.

The formats are Mosaic MDS token columns, OLMo `.npy`, nanoGPT `.bin` and NumPy arrays. Each format stores a stream of
token ids with an end-of-document id between documents. Samples that were packed to a fixed length are joined, and then
cut at the ends of documents. Megatron `.bin/.idx` files need no import.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frontier_llm import log
from frontier_llm.data.destination import existing_dataset, sole_maker
from frontier_llm.data.indexed import optimal_dtype
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.inputs import MAXIMUM_BYTES, find_inputs
from frontier_llm.data.mds import read_tokens
from frontier_llm.data.meta import DatasetMeta, write_meta
from frontier_llm.data.remote import RemoteFile, identity_of
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.errors import DataError
from frontier_llm.units import format_count, strict_json

BLOCK_TOKENS = 1 << 20  # number of tokens that are read at a time; a longer document becomes several sequences
MDS_SUFFIXES = (".mds", ".mds.zstd", ".mds.gz")
SUFFIXES = (".npy", ".bin", *MDS_SUFFIXES)


def import_tokens(
    inputs: Iterable[str | Path],
    prefix: str | Path,
    tokenizer: str,
    dtype: str | None = None,
    column: str = "tokens",
    max_bytes: int = MAXIMUM_BYTES,
    *,
    overwrite: bool = False,
) -> DatasetMeta:
    """Join token files, in order, into one dataset. A document ends at the tokenizer's end-of-document id.

    A dataset that the same files, tokenizer and options made is returned unchanged. `dtype` is the type of headerless
    files (.npy of OLMo, .bin of nanoGPT) and of MDS `bytes` columns (None there: int64).

    Raises DataError for missing files, unknown kinds, and a directory that cannot be written. An id outside the
    tokenizer's vocabulary raises DataError with file and offset. DataError is also raised for a dataset of other inputs
    at `prefix` (unless `overwrite`), and while another process makes a dataset at `prefix`.
    """
    codec = load_tokenizer(tokenizer)
    known = (
        f"known endings: {', '.join(SUFFIXES)}; a .bin with an .idx is already a dataset; for text, use "
        "`frontier-llm data tokenize`"
    )
    files = find_inputs(inputs, _is_input, "token", known)
    plan = [codec.digest, codec.eod, dtype, column, [identity_of(path) for path in files]]
    digest = hashlib.sha256(strict_json(plan).encode()).hexdigest()
    if (before := existing_dataset(prefix, digest, overwrite)) is not None:
        return before
    with sole_maker(prefix, digest, "check space and permissions, then run the same command again"):
        with IndexedWriter(prefix, optimal_dtype(codec.vocab_size)) as writer:
            unfinished = 0
            for path in files:
                for block in _blocks(path, dtype, column, codec.vocab_size, max_bytes):
                    unfinished = _write(writer, block, codec.eod, unfinished)
            if unfinished:
                writer.end_document()
            if not writer.token_count:
                raise DataError("the inputs contain no tokens", where=str(prefix), fix="check the input paths")
        meta = DatasetMeta(
            tokenizer=codec.name,
            tokenizer_digest=codec.digest,
            vocab_size=codec.vocab_size,
            eod=codec.eod,
            documents=writer.document_count,
            tokens=writer.token_count,
            text_bytes=0,  # the text's size is not known, so no bits per byte are reported
            inputs_digest=digest,
            largest_id=writer.largest_id,
        )
        write_meta(prefix, meta)
    log.info(
        f"{prefix}: {format_count(meta.documents)} documents, {format_count(meta.tokens)} tokens from {len(files)} "
        f"files"
    )
    return meta


def _is_input(path: Path | RemoteFile) -> bool:
    """Return whether a file has tokens to import. The .bin of a dataset, such as an earlier result, is left out."""
    is_dataset = isinstance(path, Path) and path.suffix == ".bin" and path.with_suffix(".idx").exists()
    return path.name.endswith(SUFFIXES) and not is_dataset


def _blocks(
    path: Path | RemoteFile,
    dtype: str | None,
    column: str,
    vocab_size: int,
    max_bytes: int,
) -> Iterator[NDArray[Any]]:
    """Yield the file's ids in blocks. Raises DataError for an id outside the vocabulary."""
    is_mds = path.name.endswith(MDS_SUFFIXES)
    arrays = read_tokens(path, column, dtype or "int64", max_bytes) if is_mds else _raw(path, dtype)
    position = 0
    for array in arrays:
        if array.dtype.kind not in "iu":
            raise DataError(
                f"has values of type {array.dtype}, not token ids",
                where=str(path),
                fix="give the files with the tokens, or their column with --column",
            )
        for start in range(0, array.size, BLOCK_TOKENS):
            block = array[start : start + BLOCK_TOKENS]
            bad = np.flatnonzero((block < 0) | (block >= vocab_size))
            if bad.size:
                what = (
                    f"token {position + start + int(bad[0])} has the id {block[bad[0]]}, but the vocabulary has "
                    f"{vocab_size} ids"
                )
                raise DataError(
                    what,
                    where=str(path),
                    fix="give the tokenizer that made it, and its --dtype (uint16, uint32, …)",
                )
            yield block
        position += array.size


def _raw(path: Path | RemoteFile, dtype: str | None) -> Iterator[NDArray[Any]]:
    """Yield a local NumPy file as one memory-mapped array, or a headerless file of the given type block by block."""
    with path.open("rb") as content:
        if content.read(6) == b"\x93NUMPY":
            if isinstance(path, RemoteFile):
                raise DataError(
                    "is a remote .npy file, which cannot be read block by block",
                    where=str(path),
                    fix="download the file first, and give the path of the copy",
                )
            try:
                array = np.load(path, mmap_mode="r", allow_pickle=False).reshape(-1)
            # a .npy header is a Python literal; errors of tokenize, ast and NumPy have no common base
            except Exception as error:
                raise DataError(f"cannot be read: {error}", where=str(path), fix="copy it again") from error
            yield array
            return
        if dtype is None:
            raise DataError(
                "has no header, so the type of its tokens is unknown",
                where=str(path),
                fix="add --dtype uint16 (or uint32, int32, int64)",
            )
        wanted = np.dtype(dtype).newbyteorder("<")
        size = path.stat().st_size
        if size % wanted.itemsize:
            what = f"its size of {size} bytes is not a multiple of the size of a {dtype} token"
            raise DataError(
                what, where=str(path), fix="give the correct --dtype, or copy the file again: it may be truncated"
            )
        content.seek(0)
        while data := content.read(BLOCK_TOKENS * wanted.itemsize):
            yield np.frombuffer(data, wanted)


def _write(writer: IndexedWriter, block: NDArray[Any], eod: int, unfinished: int) -> int:
    """Append a block and end a document after every `eod`.

    `unfinished` is the number of tokens of the open document before the block. Return the number of tokens that the
    open document has after the block.
    """
    start = 0
    for end in (np.flatnonzero(block == eod) + 1).tolist():
        writer.add_document(block[start:end])
        start = end
        unfinished = 0
    if start < block.size:
        writer.add_sequence(block[start:])
        unfinished += block.size - start
    return unfinished
