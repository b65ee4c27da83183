"""Read one column of every sample of Mosaic Streaming's MDS shards, without the streaming package.

A shard is little-endian. The format is version 2, as read from mosaicml-streaming 0.13.0 and checked against shards
that it wrote:

    u32 n | u32 offsets[n + 1], absolute | UTF-8 JSON with column_names, column_encodings, column_sizes | samples

A sample is a u32 size for each column of variable size, then the columns' bytes in the order of column_names. The
encoding of a token column is `ndarray:DTYPE[:shape]`, `ndarray` (each value stores its type) or `bytes` (int64 by
default, as in LLM Foundry). A `pkl` column is refused, because reading it runs code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frontier_llm.data.inputs import MAXIMUM_BYTES, PACKED_SUFFIXES, TOO_LARGE, open_packed
from frontier_llm.data.remote import RemoteFile, located
from frontier_llm.errors import DataError, FrontierError, suggest
from frontier_llm.units import format_bytes

DAMAGED = "the file is damaged or incomplete: copy it again from its source"
SHAPE_DTYPES = ("<u1", "<u2", "<u4", "<u8")
VALUE_DTYPES = {
    8: "u1",
    9: "i1",
    16: "u2",
    17: "i2",
    18: "f2",
    32: "u4",
    33: "i4",
    34: "f4",
    64: "u8",
    65: "i8",
    66: "f8",
}


def open_column(
    path: str | Path | RemoteFile,
    column: str,
    max_bytes: int = MAXIMUM_BYTES,
) -> tuple[str, Iterator[bytes]]:
    """Return a column's declared encoding and an iterator over its raw values.

    Raises DataError if the file is not a shard or has no such column. The iterator raises DataError with the byte
    offset of a damaged sample.
    """
    shard = located(path)
    data, header = _open(shard, max_bytes)
    names: list[str] = header["column_names"]
    if column not in names:
        raise DataError(f"has no column {column!r}", where=str(path), fix=suggest(column, names))
    place = names.index(column)
    return str(header["column_encodings"][place]), _values(shard, data, header["column_sizes"], place)


def _values(path: Path | RemoteFile, data: bytes, sizes: list[int | None], place: int) -> Iterator[bytes]:
    offsets = np.frombuffer(data, "<u4", int.from_bytes(data[:4], "little") + 1, 4).tolist()
    variable = [index for index, size in enumerate(sizes) if size is None]
    table_bytes = 4 * len(variable)
    for sample, (begin, end) in enumerate(pairwise(offsets)):
        widths = [size or 0 for size in sizes]
        if begin + table_bytes <= end <= len(data):
            for index, size in zip(variable, struct.unpack_from(f"<{len(variable)}I", data, begin), strict=True):
                widths[index] = size
        if begin + table_bytes + sum(widths) != end:
            what = f"at byte {begin}: sample {sample} needs {table_bytes + sum(widths)} bytes, but has {end - begin}"
            raise DataError(what, where=str(path), fix=DAMAGED)
        start = begin + table_bytes + sum(widths[:place])
        yield data[start : start + widths[place]]


def read_texts(path: str | Path | RemoteFile, column: str, max_bytes: int = MAXIMUM_BYTES) -> Iterator[str]:
    """Yield the texts of a `str` column. Raises DataError for another encoding and for text that is not UTF-8."""
    encoding, values = open_column(path, column, max_bytes)
    if encoding != "str":
        fix = "give a str column with --text-key; for a column of tokens, use `frontier-llm data import`"
        raise DataError(f"column {column!r} has the encoding {encoding}, not str", where=str(path), fix=fix)
    for sample, value in enumerate(values):
        try:
            yield value.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"sample {sample} is not UTF-8: {error.reason}",
                where=str(path),
                fix=DAMAGED,
            ) from error


def read_tokens(
    path: str | Path | RemoteFile,
    column: str,
    bytes_dtype: str = "int64",
    max_bytes: int = MAXIMUM_BYTES,
) -> Iterator[NDArray[Any]]:
    """Yield the arrays of a token column. `bytes_dtype` is the type of a `bytes` column.

    Raises DataError for other encodings and for damaged values.
    """
    encoding, values = open_column(path, column, max_bytes)
    decode = _token_decoder(path, encoding, column, bytes_dtype)
    for sample, value in enumerate(values):
        try:
            yield decode(value)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"sample {sample} is not an array of tokens: {error}",
                where=str(path),
                fix=DAMAGED,
            ) from error


def _open(path: Path | RemoteFile, max_bytes: int) -> tuple[bytes, dict[str, Any]]:
    """Return the shard's decompressed bytes and its header."""
    try:
        with open_packed(path) if path.suffix in PACKED_SUFFIXES else path.open("rb") as content:
            data = content.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise DataError(TOO_LARGE.format(format_bytes(max_bytes)), where=str(path))
        count = int.from_bytes(data[:4], "little")
        first = struct.unpack_from("<I", data, 4)[0]
        last = struct.unpack_from("<I", data, 4 + 4 * count)[0]
        header = json.loads(data[8 + 4 * count : first])
        if not all(size is None or (isinstance(size, int) and size >= 0) for size in header["column_sizes"]):
            raise ValueError(f"column_sizes {header['column_sizes']}")
        columns = {key: len(header[key]) for key in ("column_names", "column_encodings", "column_sizes")}
    except FrontierError:
        raise
    except Exception as error:  # struct, json, gzip and pyarrow have no common base
        raise DataError(
            f"is not an MDS shard: {error}",
            where=str(path),
            fix="copy it again, or give the directory of an MDS dataset",
        ) from error
    if last != len(data):
        raise DataError(
            f"at byte {4 + 4 * count}: expected {last} bytes, found {len(data)}",
            where=str(path),
            fix=DAMAGED,
        )
    if len(set(columns.values())) != 1:
        counts = ", ".join(f"{number} {key}" for key, number in columns.items())
        raise DataError(f"its header lists {counts}, not the same number of each", where=str(path), fix=DAMAGED)
    return data, header


def _token_decoder(
    path: str | Path | RemoteFile,
    encoding: str,
    column: str,
    bytes_dtype: str,
) -> Callable[[bytes], NDArray[Any]]:
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    if kind == "bytes":
        return lambda value: np.frombuffer(value, np.dtype(bytes_dtype).newbyteorder("<"))
    if kind != "ndarray":
        why = ", which runs code when it is read" if kind == "pkl" else ""
        raise DataError(
            f"column {column!r} has the encoding {encoding}{why}; tokens need ndarray or bytes",
            where=str(path),
            fix="give the column of the tokens with --column",
        )

    def decode(value: bytes) -> NDArray[Any]:
        at, name = (0, dtype) if dtype else (1, VALUE_DTYPES[value[0]])
        if not shape:  # a u8 (ndim << 2 | index of the shape's dtype) and the shape come first
            at += 1 + (value[at] >> 2) * np.dtype(SHAPE_DTYPES[value[at] & 3]).itemsize
        return np.frombuffer(value, np.dtype(name).newbyteorder("<"), offset=at)

    return decode
