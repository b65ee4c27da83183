"""Where parameters lie in flat buckets: what is alike travels together, and owners' slices of a bucket are of one
length.

The runtime fills its buckets by this plan (`optim/buckets.py`) and the planner counts their bytes and padding by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Generic, TypeVar

from frontier_llm.blueprint.optimizers import OptimizerRule
from frontier_llm.blueprint.parameters import Parameter
from frontier_llm.topology.shards import BUCKET_ALIGNMENT

T = TypeVar("T")

# share of a bucket that may be padding before an optimizer that can gather tensors from cut slices does so: padding
# costs memory for
# weights and gradients and time for their sums, gathering costs the sending of the tensors' 16 bits once more
MOST_PADDING = 1 / 8


@dataclass(frozen=True)
class BucketPlan(Generic[T]):
    """One bucket."""

    members: list[T]  # by offset
    offsets: list[int]
    numel: int  # padding included; a multiple of the owners
    whole: bool  # the optimizer wants its tensors whole
    apart: bool  # and no tensor lies in two owners' slices


def plan_buckets(
    members: Sequence[T],
    of: Callable[[T], tuple[Parameter, int]],
    rule: OptimizerRule,
    replicas: Callable[[str], int],
    sharded: bool,
    limit: int,
) -> Iterator[BucketPlan[T]]:
    """Buckets of at most `limit` elements of `members`, in the order in which backward completes them.

    `of` says a member's parameter and how many of its elements are here; `replicas`, how many ranks an axis of replicas
    has. Each computes a part of a bucket's norm, and, where the optimizer is `sharded` (ZeRO), owns a slice of it.
    """

    def alike(member: T) -> tuple[Any, ...]:
        parameter = of(member)[0]
        return (
            parameter.decay,
            parameter.partial_axes(),
            rule.whole(parameter),
            rule.kinds(parameter),
            parameter.replicas,
            parameter.wide,
            bool(rule.statistics(parameter)),
        )

    def numel(member: T) -> int:
        return of(member)[1]

    def room(member: T) -> int:
        return _aligned(numel(member), BUCKET_ALIGNMENT)

    for _, equals in groupby(sorted(members, key=alike), key=alike):
        same = list(equals)
        parameter = of(same[0])[0]
        whole = rule.whole(parameter)
        parts = replicas(parameter.replicas)
        owners = parts if sharded else 1
        # whole parameters need room for one in each owner's slice, or most of a bucket would be padding
        most = max(limit, owners * max(map(numel, same))) if whole else limit
        for group in packed(same, numel, most):
            row = _in_a_row(group, room, parts)
            apart = _apart(group, room, owners, parts) if whole else row
            close = whole and (not rule.gathers or apart.numel <= (1 + MOST_PADDING) * row.numel)
            chosen = apart if close else row
            yield BucketPlan(chosen.members, chosen.offsets, chosen.numel, whole, close)


def _aligned(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _in_a_row(members: list[T], room: Callable[[T], int], parts: int) -> BucketPlan[T]:
    """Without gaps; owners' slices begin anywhere."""
    ends = list(accumulate(map(room, members)))
    return BucketPlan(members, [0, *ends[:-1]], _aligned(ends[-1], BUCKET_ALIGNMENT * parts), False, False)


def _apart(members: list[T], room: Callable[[T], int], owners: int, parts: int) -> BucketPlan[T]:
    """With no member in two owners' slices: the largest first, each to the owner who has least."""
    filled = [0] * owners
    places = list[tuple[int, int, T]]()
    for member in sorted(members, key=room, reverse=True):
        owner = filled.index(min(filled))
        places.append((owner, filled[owner], member))
        filled[owner] += room(member)
    size = _aligned(max(filled), BUCKET_ALIGNMENT * (parts // owners))
    places.sort(key=lambda place: place[:2])
    return BucketPlan(
        [member for *_, member in places],
        [owner * size + start for owner, start, _ in places],
        owners * size,
        True,
        True,
    )


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
