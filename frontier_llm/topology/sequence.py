"""Which tokens of a sequence each context-parallel rank holds."""

from __future__ import annotations


def held_positions(length: int, cp: int, rank: int) -> tuple[range, ...]:
    """Positions of `rank` in stretches, in ascending order.

    The sequence is cut in 2·cp chunks, and rank r holds chunks r and 2·cp − 1 − r. A query of chunk c scores the keys
    of about c + 1/2 chunks, so each rank has as many scores to compute as any other; cut in cp chunks, the last rank
    would have 2·cp − 1 times the work of the first.
    """
    if cp == 1:
        return (range(length),)
    size = length // (2 * cp)
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * cp - 1 - rank))
