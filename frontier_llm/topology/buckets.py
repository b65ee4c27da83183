"""Assignment of parameters to flat buckets for gradient reduction and optimizer.

A bucket holds parameters that are reduced and updated in the same way. With ZeRO, each replica owns one of the bucket's
slices of equal length. The runtime (`optim/buckets.py`) allocates its buckets by this plan, and the planner computes
their bytes and padding from it.
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

# Largest padding of a bucket in which each tensor lies in a single slice, relative to a bucket without gaps. This limit
# applies to optimizers that can gather tensors (Muon). If more padding is needed, the slices cut tensors, and the
# update gathers these tensors. Padding costs memory and reduction time for weights and gradients. Gathering costs one
# more transfer of the tensors in 16 bits.
MOST_PADDING = 1 / 8


@dataclass(frozen=True)
class BucketPlan(Generic[T]):
    """Parameters and size of one bucket. Offsets and sizes are in elements."""

    members: list[T]  # In the order of their offsets.
    offsets: list[int]
    numel: int  # Padding is included. A multiple of the number of owners.
    whole: bool  # The optimizer's update needs complete tensors.
    apart: bool  # `whole` is true, and each tensor lies in the slice of a single owner.


def plan_buckets(
    members: Sequence[T],
    of: Callable[[T], tuple[Parameter, int]],
    rule: OptimizerRule,
    replicas: Callable[[str], int],
    sharded: bool,
    limit: int,
) -> Iterator[BucketPlan[T]]:
    """Yield buckets of at most `limit` elements. A bucket holds only parameters that are reduced and updated in the
    same way.

    Such parameters are placed in the order of `members`. A bucket may be longer than `limit` if a member is longer, or
    if `rule` needs complete tensors.

    Args:
        members: the tensors of this rank.
        of: maps a member to its parameter and to the number of its elements on this rank.
        rule: the optimizer.
        replicas: maps an axis of replicas ("dp", "edp") to its number of ranks. Each of these ranks computes a part of
            the bucket's gradient norm.
        sharded: whether each replica owns a slice of the bucket (ZeRO).
        limit: elements of a bucket.
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
        # a smaller bucket of complete tensors would leave some owners without a tensor, so it would be mostly padding
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
    """Place the members without gaps, so that the slices of two owners may cut a member."""
    ends = list(accumulate(map(room, members)))
    return BucketPlan(members, [0, *ends[:-1]], _aligned(ends[-1], BUCKET_ALIGNMENT * parts), False, False)


def _apart(members: list[T], room: Callable[[T], int], owners: int, parts: int) -> BucketPlan[T]:
    """Place each member inside one owner's slice: the largest member first, each into the emptiest slice."""
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
    """Yield groups of consecutive items of at most `limit` in total.

    An item larger than `limit` forms a group of its own.
    """
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
