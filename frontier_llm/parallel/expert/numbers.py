"""Counts and permutations of experts' numbers, from which the rows of a dispatch are planned."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def beyond_capacity(experts_Nk: Tensor, weights_Nk: Tensor, chosen_E: Tensor, room: int) -> Tensor:
    """Return which choices (N, k) are dropped if each expert takes at most `room` rows.

    An expert drops the choices with the smallest weights. `chosen_E` is the number of choices of each expert.
    """
    experts_A = experts_Nk.flatten()
    by_weight = weights_Nk.detach().flatten().argsort(descending=True, stable=True)
    order = by_weight[experts_A[by_weight].argsort(stable=True)]  # sorted by expert, and within an expert by weight
    first_A = (chosen_E.cumsum(0) - chosen_E)[experts_A[order]]
    late = torch.arange(len(order), device=order.device) - first_A >= room
    return torch.empty_like(late).index_copy_(0, order, late).view(experts_Nk.shape)


def slots(experts_Nk: Tensor, dropped_Nk: Tensor | None, ranks: int, local: int, etp: int) -> Tensor:
    """Return for each choice the index of (rank, expert of the rank).

    Groups of etp consecutive ranks hold the same experts. Dropped choices get the index after the last valid index.
    """
    if etp == 1:
        slot_A = experts_Nk.flatten()
    else:
        part = torch.arange(etp, device=experts_Nk.device)
        rank_Nk = experts_Nk // local
        slot_A = ((rank_Nk[..., None] * etp + part) * local + (experts_Nk % local)[..., None]).flatten()
    if dropped_Nk is None:
        return slot_A
    return slot_A.masked_fill(dropped_Nk[..., None].expand(*dropped_Nk.shape, etp).flatten(), ranks * local)


def count_numbers(numbers_A: Tensor, count: int) -> Tensor:
    """Count how often each number below `count` occurs in a row: (…, A) → (…, count), int64.

    A GPU adds with atomics. Sums of integers do not depend on their order, so two runs are equal.
    torch.bincount is not used, because it computes the largest number first, and the host waits for the result.
    """
    assert numbers_A.dtype == torch.int64
    return numbers_A.new_zeros(*numbers_A.shape[:-1], count).scatter_(-1, numbers_A, 1, reduce="add")


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    count = len(order)
    numbers = _numbers(1 << count.bit_length(), order.device)[:count]
    return torch.empty_like(order).index_copy_(0, order, numbers)


@cache
def _numbers(count: int, device: torch.device) -> Tensor:
    """Return the tensor 0, 1, … count - 1. The tensor is cached, because creating it would be one launch per layer."""
    return torch.arange(count, device=device)


@cache
def expert_numbers(experts: int, ranks: int, device: torch.device) -> Tensor:
    """Return the indices 0, 1, … of a rank's experts, repeated for each rank that sends rows to these experts."""
    return torch.arange(experts, device=device).repeat(ranks)
