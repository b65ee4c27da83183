"""Consecutive things in groups of bounded size: parameters in buckets, tensors in files, inputs in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def packed(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Groups of neighbours of at most `limit` together, in their order; a larger item stands alone."""
    group: list[T] = []
    held = 0
    for item in items:
        size = size_of(item)
        if group and held + size > limit:
            yield group
            group = []
            held = 0
        group.append(item)
        held += size
    if group:
        yield group
