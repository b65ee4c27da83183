"""Finds the largest token id of a dataset, and the first id outside of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.meta import read_meta

CHUNK_TOKENS = 1 << 24
# largest dataset that is scanned before the start if its ids are not recorded: 128 MB, some tenths of a second
SCANNED_TOKENS = 1 << 26


@dataclass(frozen=True)
class IdScan:
    """Result of a scan of every token."""

    prefix: str
    documents: int
    tokens: int
    smallest_id: int | None  # None for an empty dataset
    largest_id: int | None
    vocab_size: int | None  # vocabulary size that the ids were compared with
    outside: str | None  # place and value of the first id that is negative or outside the vocabulary

    @property
    def is_sound(self) -> bool:
        """True if every id is in the vocabulary."""
        return self.outside is None


def scan(
    prefix: str,
    vocab_size: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> IdScan:
    """Read every entry of the index and every token.

    If `vocab_size` is None, the size in the dataset's record is used, if there is a record. `progress` receives the
    number of tokens read and the total. Raises DataError for a damaged dataset.
    """
    dataset = IndexedDataset(prefix, scan=True)
    dataset.check_token_ids()
    if vocab_size is None:
        meta = read_meta(prefix)
        vocab_size = None if meta is None else meta.vocab_size
    smallest: int | None = None
    largest: int | None = None
    outside: str | None = None
    for start in range(0, dataset.token_count, CHUNK_TOKENS):
        chunk = dataset.tokens[start : start + CHUNK_TOKENS]
        low = int(chunk.min())
        high = int(chunk.max())
        smallest = low if smallest is None else min(smallest, low)
        largest = high if largest is None else max(largest, high)
        is_outside = low < 0 or (vocab_size is not None and high >= vocab_size)
        if outside is None and is_outside:
            bad = chunk < 0
            if vocab_size is not None:
                bad |= chunk >= vocab_size
            place = int(bad.argmax())
            outside = f"{dataset.place_of(start + place)} is {chunk[place]}"
        progress(min(start + CHUNK_TOKENS, dataset.token_count), dataset.token_count)
    return IdScan(
        prefix=prefix,
        documents=dataset.document_count,
        tokens=dataset.token_count,
        smallest_id=smallest,
        largest_id=largest,
        vocab_size=vocab_size,
        outside=outside,
    )


def known_largest_id(prefix: str) -> int | None:
    """Return the largest token id of a dataset, or None if it is not known.

    The value comes from the dataset's record. If the record lacks it, a dataset of at most SCANNED_TOKENS tokens is
    read. Raises DataError for a damaged record or dataset.
    """
    meta = read_meta(prefix)
    if meta is not None and meta.largest_id is not None:
        return meta.largest_id
    dataset = IndexedDataset(prefix, scan=False)
    dataset.check_token_ids()
    if 0 < dataset.token_count <= SCANNED_TOKENS:
        return int(dataset.tokens.max())
    return None
