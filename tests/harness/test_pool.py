"""The rank pool: results by rank, isolated jobs, the first failure first, and no hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness.pool import RankError, RankPool


def summed(rank: int, value: float) -> tuple[int, float, int]:
    x = torch.tensor([value * (rank + 1)], dtype=torch.float64)
    dist.all_reduce(x)
    return rank, float(x), dist.get_world_size()


def with_subgroup(rank: int) -> float:
    group = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    x = torch.ones(1)
    if group is not None:
        dist.all_reduce(x, group=group)
    return float(x)


def process_id(rank: int) -> int:
    return os.getpid()


def fail_on_one(rank: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError("the real reason")
    dist.barrier()


def fail_one_after_another(rank: int) -> None:
    time.sleep(0.5 if rank == 0 else 0.0)
    raise ValueError(f"rank {rank} says no")


def die(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def hang(rank: int) -> None:
    if rank == 1:
        time.sleep(600)


def test_results_come_back_by_rank(ranks: RankPool) -> None:
    assert ranks.run(4, summed, 1.5) == [(rank, 15.0, 4) for rank in range(4)]


def test_jobs_of_any_size_follow_each_other_in_the_same_processes(ranks: RankPool) -> None:
    before = ranks.run(2, process_id)
    for world_size in (1, 2, 3, 2):
        assert ranks.run(world_size, summed, 1.0) == [
            (rank, world_size * (world_size + 1) / 2, world_size) for rank in range(world_size)
        ]
    assert ranks.run(3, with_subgroup) == [2.0, 2.0, 1.0]
    assert ranks.run(3, with_subgroup) == [2.0, 2.0, 1.0]  # same ranks, same group name, another world
    assert ranks.run(2, process_id) == before


def test_failures() -> None:
    """A pool of three ranks works again after each kind of failure."""
    pool = RankPool(3)
    try:
        with pytest.raises(RankError, match=r"rank 2 failed first:(.|\n)*ValueError: the real reason"):
            pool.run(3, fail_on_one, 2)
        assert pool.run(2, summed, 1.0)[0][1] == 3.0

        with pytest.raises(RankError) as caught:
            pool.run(2, fail_one_after_another)
        assert caught.value.first_rank == 1
        assert "(secondary): ValueError: rank 0 says no" in str(caught.value)

        with pytest.raises(RankError, match="rank 1 failed first:\nthe process died with exit code 3"):
            pool.run(2, die)

        with pytest.raises(RankError, match=r"no answer after 5 s; it stands in(.|\n)*in hang"):
            pool.run(2, hang, timeout_s=5.0)
        assert pool.run(3, summed, 1.0)[0][1] == 6.0
    finally:
        pool.stop()
