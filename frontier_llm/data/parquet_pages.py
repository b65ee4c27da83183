"""Read the decompressed sizes of a parquet column's pages from their headers, before anything is decoded.

The totals in the footer cannot be trusted. A decoder allocates the size in each page's own header, which can claim up
to 2 GiB for a page of some kilobytes. Headers use Thrift's compact protocol (parquet-format, PageHeader). Field 2 is
the size after decompression, field 3 the size in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

from frontier_llm.data.remote import located
from frontier_llm.errors import DataError

MOST_PAGES = 1 << 16  # Limit for a column in a row group. Writers make about one page per MiB.
# Sizes that are tried for a page header. A header with long values in its statistics needs LONGEST_HEADER_BYTES.
HEADER_BYTES = 4 << 10
LONGEST_HEADER_BYTES = 1 << 20
# Limit for a group of more than a million rows. The limit is high, because equal values compress to almost nothing.
ROWS_PER_BYTE = 64
_DEEPEST = 16
_UNCOMPRESSED = 2
_COMPRESSED = 3


def largest_page_bytes(path: str | Path, group: Any, column: int) -> int:
    """Return the decompressed size of a column's largest page. `group` is pyarrow's metadata of the row group.

    Raises DataError for damaged headers, and for more rows or pages than a real column has.
    """
    chunk = group.column(column)
    start = chunk.data_page_offset
    if chunk.dictionary_page_offset:
        start = min(start, chunk.dictionary_page_offset)
    stop = start + chunk.total_compressed_size
    largest = 0
    if group.num_rows > (1 << 20) + ROWS_PER_BYTE * chunk.total_compressed_size:
        raise DataError(
            f"has a row group of {group.num_rows} rows in {chunk.total_compressed_size} bytes, which is impossible",
            where=str(path),
        )
    with located(path).open("rb") as file:
        for _ in range(MOST_PAGES):
            if start == stop:
                return largest
            header_bytes, sizes = _read_header(file, start, path)
            uncompressed = sizes.get(_UNCOMPRESSED, -1)
            compressed = sizes.get(_COMPRESSED, -1)
            if uncompressed < 0 or compressed < 0 or start + header_bytes + compressed > stop:
                raise DataError(f"has a damaged page at byte {start}", where=str(path))
            largest = max(largest, uncompressed)
            start += header_bytes + compressed
    raise DataError(f"has more than {MOST_PAGES} pages of a column in one row group", where=str(path))


def _read_header(file: BinaryIO, start: int, path: str | Path) -> tuple[int, dict[int, int]]:
    """Return (bytes of the header, its integers by field)."""
    for length in (HEADER_BYTES, LONGEST_HEADER_BYTES):
        file.seek(max(start, 0))
        reader = _Compact(file.read(length))
        try:
            sizes = reader.struct(_DEEPEST)
            return reader.at, sizes
        except IndexError:  # the header is longer than the bytes that were read
            continue
        except ValueError as error:
            raise DataError(f"has a damaged page at byte {start}: {error}", where=str(path)) from None
    raise DataError(f"has a page at byte {start} whose header does not end", where=str(path))


class _Compact:
    """Reader of Thrift's compact protocol that keeps only the integers of a struct."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def struct(self, depth: int) -> dict[int, int]:
        """Return the integers among a struct's own fields, by field number."""
        numbers: dict[int, int] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._zigzag()
            value = self._value(head & 15, depth)
            if value is not None:
                numbers[field] = value
        return numbers

    def _value(self, kind: int, depth: int) -> int | None:
        if depth == 0:
            raise ValueError("nested too deeply")
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind in (9, 10):  # list, set
            head = self._byte()
            count = head >> 4 if head >> 4 != 15 else self._varint()
            for _ in range(count):
                self._element(head & 15, depth)
        elif kind == 12:
            self.struct(depth - 1)
        elif kind in (3, 7, 8):  # byte, double, binary
            self._skip({3: 1, 7: 8}.get(kind) or self._varint())
        elif kind not in (1, 2):  # true, false
            raise ValueError(f"a field of the unknown type {kind}")
        return None

    def _element(self, kind: int, depth: int) -> None:
        if kind in (1, 2):
            self._skip(1)
        else:
            self._value(kind, depth)

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise IndexError

    def _varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
