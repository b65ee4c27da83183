"""Shared-memory groups: values, order, overlap, overlapping groups and failures, against sums computed here."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from frontier_llm.comm import (
    Axis,
    all_gather,
    all_reduce_,
    barrier,
    broadcast_,
    build_mesh,
    groups,
    host_memory,
    post_receive,
    reduce_scatter,
    shm,
    start_all_gather_into,
    start_all_reduce_,
    start_all_to_all_into,
    start_reduce_scatter,
    start_reduce_scatter_into,
)
from frontier_llm.config import CommConfig
from frontier_llm.errors import BackendError, RankFailure
from frontier_llm.schedule import round_robin
from frontier_llm.topology.grid import Grid
from tests.harness.marks import but_first
from tests.harness.pool import RankError, RankPool, wait_for_file

pytestmark = pytest.mark.skipif(
    bool(host_memory.why_unavailable()), reason=host_memory.why_unavailable() or "available"
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
SIZES = (1, 1000, 8193, 300_007)  # the largest needs several slots; none is a multiple of a slot


def _axis(rank: int, size: int, timeout_s: float = 30.0) -> Axis:
    return build_mesh(Grid(size, 1, 1), rank, timeout_s=timeout_s, comm=CommConfig(transport="shm")).tp


def _contribution(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + elements)
    if dtype.is_floating_point:
        return torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 30, (elements,), generator=generator).to(dtype)


def _summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sum in rank order. 16-bit types are summed in fp32 and rounded once. The library guarantees exactly these
    bits.
    """
    total = parts[0].float() if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].clone()
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    return total.to(parts[0].dtype)


def _check_values(rank: int, size: int) -> int:
    axis = _axis(rank, size)
    checked = 0
    for dtype in DTYPES:
        for elements in SIZES:
            everyone = [_contribution(peer, elements, dtype) for peer in range(size)]
            mine = everyone[rank]
            assert torch.equal(all_reduce_(mine.clone(), axis), _summed(everyone)), (dtype, elements, "sum")
            assert torch.equal(all_reduce_(mine.clone(), axis, "max"), torch.stack(everyone).amax(0)), (
                dtype,
                elements,
                "max",
            )
            assert torch.equal(all_gather(mine, axis), torch.cat(everyone)), (dtype, elements, "gather")
            whole = [_contribution(peer, elements * size, dtype) for peer in range(size)]
            expected = _summed(whole).chunk(size)[rank]
            assert torch.equal(reduce_scatter(whole[rank], axis), expected), (dtype, elements, "reduce-scatter")
            arriving = torch.empty_like(whole[rank])
            start_all_to_all_into(arriving, whole[rank], axis).wait()
            assert torch.equal(arriving, torch.cat([other.chunk(size)[rank] for other in whole])), (
                dtype,
                elements,
                "all-to-all",
            )
            source = elements % size
            assert torch.equal(broadcast_(mine.clone(), axis, source), everyone[source]), (dtype, elements, "broadcast")
            checked += 1
    return checked


@pytest.mark.parametrize("size", but_first([3, 2, 4]))
def test_values_equal_sums_in_rank_order_bit_by_bit(ranks: RankPool, size: int) -> None:
    assert ranks.run(size, _check_values, size) == [len(DTYPES) * len(SIZES)] * size


def _check_special_values(rank: int) -> None:
    axis = _axis(rank, 2)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = special.to(dtype) if rank == 0 else torch.ones(4, dtype=dtype)
        y = special.to(dtype) if rank == 1 else torch.ones(4, dtype=dtype)
        for op, expected in (("sum", special.to(dtype) + 1), ("max", torch.maximum(special, torch.ones(4)).to(dtype))):
            for operand in (x, y):
                result = all_reduce_(operand.clone(), axis, op)
                assert torch.equal(result.isnan(), expected.isnan()) and torch.equal(result[1:], expected[1:]), (
                    dtype,
                    op,
                    result,
                )


def test_nan_and_infinity_pass_through(ranks: RankPool) -> None:
    ranks.run(2, _check_special_values)


def _check_in_place(rank: int, size: int) -> None:
    axis = _axis(rank, size)
    for elements in (5, 300_007):
        whole = [_contribution(peer, elements * size, torch.float32) for peer in range(size)]
        x = whole[rank].clone()
        own = x.view(size, elements)[rank]
        start_reduce_scatter_into(own, x, axis).wait()
        assert torch.equal(own, _summed(whole).view(size, elements)[rank])
        start_all_gather_into(x, own, axis).wait()
        assert torch.equal(x, _summed(whole))


def test_own_part_of_a_buffer_may_be_input_and_output(ranks: RankPool) -> None:
    ranks.run(3, _check_in_place, 3)


def _check_overlap(rank: int, size: int) -> None:
    """Many collectives are in flight and are waited for in another order. The ranks run at different speeds."""
    axis = _axis(rank, size)
    for round_number in range(4):
        elements = [10, 300_000, 1, 70_000, 4000, 200_000]
        parts = [
            [_contribution(peer + 7 * round_number, n * size, torch.float32) for peer in range(size)] for n in elements
        ]
        if (round_number + rank) % size == 0:
            time.sleep(0.005)
        reduced = [part[rank].clone() for part in parts]
        started = []
        for index in range(len(elements)):
            started.append(
                (start_all_reduce_(reduced[index], axis), *reversed(start_reduce_scatter(parts[index][rank], axis)))
            )
        for index in (3, 0, 5, 1, 2, 4):
            first, second, scattered = started[index]
            second.wait()
            assert torch.equal(scattered, _summed(parts[index]).chunk(size)[rank]), (round_number, index)
            first.wait()
            assert torch.equal(reduced[index], _summed(parts[index])), (round_number, index)


@pytest.mark.parametrize("size", but_first([2, 4]))
def test_collectives_under_way_complete_in_any_order_of_waiting(ranks: RankPool, size: int) -> None:
    ranks.run(size, _check_overlap, size)


def _start_early(rank: int, told: str) -> None:
    """Rank 0 starts a collective and continues to compute. Rank 1 must get the result although rank 0 has not yet
    waited for it.
    """
    axis = _axis(rank, 2)
    x = torch.full((100_000,), float(rank + 1))
    barrier(axis)
    pending = start_all_reduce_(x, axis)
    if rank == 0:
        wait_for_file(told)
    pending.wait()
    if rank == 1:
        Path(told).touch()
    assert float(x.sum()) == 300_000
    barrier(axis)


def test_a_started_collective_does_not_make_the_peer_wait(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _start_early, str(tmp_path / "told"))


def _check_overlapping_groups(rank: int) -> list[float]:
    """tp, dp and world of a 2 × 2 mesh communicate at once. Every axis has its own memory."""
    mesh = build_mesh(Grid(2, 1, 2), rank, timeout_s=30.0, comm=CommConfig(transport="shm"))
    assert {axis.name: axis.ranks for axis in (mesh.tp, mesh.dp)} == {
        "tp": (0, 1) if rank < 2 else (2, 3),
        "dp": (0, 2) if rank % 2 == 0 else (1, 3),
    }
    for round_number in range(50):
        values = [torch.full((5000,), float(10**rank + round_number)) for _ in range(3)]
        pending = [
            start_all_reduce_(value, axis) for value, axis in zip(values, (mesh.tp, mesh.dp, mesh.world), strict=True)
        ]
        for work in reversed(pending):
            work.wait()
    return [
        float(value[0]) - 49 * axis.size for value, axis in zip(values, (mesh.tp, mesh.dp, mesh.world), strict=True)
    ]


def test_groups_that_overlap_do_not_mix(ranks: RankPool) -> None:
    assert ranks.run(4, _check_overlapping_groups) == [
        [11, 101, 1111],
        [11, 1010, 1111],
        [1100, 101, 1111],
        [1100, 1010, 1111],
    ]


def _check_messages(rank: int, size: int) -> None:
    """Many messages around the ring of ranks are received late. They wrap around the end of the arena, the ring buffer
    for messages between two ranks. Two channels are in use at once.
    """
    mesh = build_mesh(
        Grid(1, size, 1), rank, placement=round_robin(size, 2), timeout_s=30.0, comm=CommConfig(transport="shm")
    )
    after = (rank + 1) % size
    before = (rank - 1) % size
    forward = mesh.channels["forward"]
    wrap = mesh.channels["forward-wrap"]
    assert forward.group is not None and wrap.group is not None
    shapes = [(1,), (40_000, 3), (7,), (2048, 512), (0,)] * 6
    for _ in range(2):
        receives = [
            (post_receive(shape, torch.float32, torch.device("cpu"), c, before), c)
            for shape in shapes
            for c in (forward, wrap)
        ]
        for index, shape in enumerate(shapes):
            forward.group.send(torch.full(shape, rank + index / 100), after).wait()
            wrap.group.send(torch.full(shape, -rank - index / 100), after).wait()
        for number in reversed(range(len(receives))):
            receive, channel = receives[number]
            sign = 1 if channel is forward else -1
            shape = shapes[number // 2]
            assert torch.equal(receive.wait(), torch.full(shape, sign * (before + number // 2 / 100))), number
        barrier(mesh.world)


@pytest.mark.parametrize("size", but_first([3, 2]))
def test_messages_arrive_in_order_on_each_channel(ranks: RankPool, size: int) -> None:
    ranks.run(size, _check_messages, size)


def _lag_by_more_than_an_arena(rank: int) -> None:
    """The sender must wait when the arena is full, and the arena is reused many times."""
    # this process runs other tests too, so the sizes are restored below
    shm.ARENA_BYTES = 1 << 20
    shm.PIECE_BYTES = 1 << 17
    try:
        axis = _axis(rank, 2)
        assert axis.group is not None
        for number in range(40):
            elements = 1 + 9973 * number
            if rank == 0:
                axis.group.send(torch.full((elements,), float(number)), 1).wait()
            else:
                if number % 10 == 0:
                    time.sleep(0.02)
                x = post_receive((elements,), torch.float32, torch.device("cpu"), axis, 0).wait()
                assert torch.equal(x, torch.full((elements,), float(number)))
        barrier(axis)
    finally:
        shm.ARENA_BYTES = 1 << 30
        shm.PIECE_BYTES = 1 << 27


def test_a_full_arena_makes_the_sender_wait(ranks: RankPool) -> None:
    ranks.run(2, _lag_by_more_than_an_arena)


def _time_out(rank: int, told: str) -> str:
    axis = _axis(rank, 2, timeout_s=3.0)
    if rank == 1:
        wait_for_file(told)
        return ""
    with pytest.raises(RankFailure) as caught:
        all_reduce_(torch.ones(1), axis)
    Path(told).touch()
    return str(caught.value)


def test_a_silent_peer_is_named_after_the_time_out(ranks: RankPool, tmp_path: Path) -> None:
    message = ranks.run(2, _time_out, str(tmp_path / "told"))[0]
    assert (
        "axis tp" in message
        and "rank 1 of axis tp (global rank 1)" in message
        and "within 3 s" in message
        and "[2, 1]" in message
    ), message


def _die(rank: int) -> str:
    axis = _axis(rank, 3)
    barrier(axis)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    try:
        while True:
            all_reduce_(torch.ones(1000), axis)
    except RankFailure as error:
        # the rank pool shows only one line
        raise AssertionError(f"{error.problems[0].what} after {time.monotonic() - start_s:.2f} s") from error


def test_a_killed_peer_is_named_at_once_and_leaves_no_file(ranks: RankPool) -> None:
    before = set(os.listdir(host_memory.MEMORY_DIR))
    with pytest.raises(RankError) as caught:
        ranks.run(3, _die)
    message = str(caught.value)
    assert "rank 2 of axis tp (global rank 2) has died" in message
    assert min(float(seconds) for seconds in re.findall(r"after (\d+\.\d+) s", message)) < 20.0  # the time-out is 30 s
    assert {
        name for name in set(os.listdir(host_memory.MEMORY_DIR)) - before if name.startswith("frontier-llm")
    } == set()


def _come_late(rank: int) -> float:
    make = groups.ShmGroup
    if rank == 1:
        groups.ShmGroup = lambda *args: (time.sleep(0.5), make(*args))[1]  # type: ignore[assignment,misc]
    try:
        last_made = build_mesh(Grid(3, 1, 1), rank, timeout_s=30.0, comm=CommConfig(transport="shm")).world
        return float(all_reduce_(torch.ones(1), last_made))
    finally:
        groups.ShmGroup = make  # type: ignore[misc]


def test_a_peer_that_has_not_come_yet_is_not_taken_for_dead(ranks: RankPool) -> None:
    assert ranks.run(3, _come_late) == [3.0, 3.0, 3.0]


def _disagree(rank: int, kind: str) -> None:
    axis = _axis(rank, 2)
    with pytest.raises(RankFailure, match="another operation, or passes another shape"):
        if kind == "operation":
            (all_reduce_ if rank else reduce_scatter)(torch.ones(8), axis)
        elif kind == "shape":
            all_reduce_(torch.ones(8 + rank), axis)
        else:
            all_reduce_(torch.ones(8, dtype=torch.float32 if rank else torch.int32), axis)


@pytest.mark.parametrize("kind", ["operation", "shape", "dtype"])
def test_ranks_that_disagree_are_told_so(ranks: RankPool, kind: str) -> None:
    ranks.run(2, _disagree, kind)


def _unknown_dtype(rank: int) -> None:
    axis = _axis(rank, 2)
    with pytest.raises(BackendError, match="complex64"):
        all_reduce_(torch.ones(1, dtype=torch.complex64), axis)


def test_an_unknown_dtype_is_refused_by_name(ranks: RankPool) -> None:
    ranks.run(2, _unknown_dtype)


def _pretend_other_host(rank: int, transport: str) -> str:
    identity = host_memory.host_identity
    host_memory.host_identity = lambda: bytes([rank]) * 32  # type: ignore[assignment]
    try:
        axis = build_mesh(Grid(2, 1, 1), rank, timeout_s=30.0, comm=CommConfig(transport=transport)).tp  # type: ignore[arg-type]
        assert float(all_reduce_(torch.ones(1), axis)) == 2.0
        return type(axis.group).__name__
    except BackendError as error:
        return str(error)
    finally:
        host_memory.host_identity = identity


def test_ranks_of_two_hosts_keep_to_sockets_and_asking_for_memory_is_an_error(ranks: RankPool) -> None:
    assert ranks.run(2, _pretend_other_host, "auto") == ["TorchGroup", "TorchGroup"]
    refusals = ranks.run(2, _pretend_other_host, "shm")
    assert all("cannot use shared memory: its ranks are on several hosts" in text for text in refusals), refusals


def _automatic(rank: int) -> str:
    return type(build_mesh(Grid(2, 1, 1), rank, timeout_s=30.0).tp.group).__name__


def test_gloo_ranks_of_one_host_share_memory_unasked(ranks: RankPool) -> None:
    assert ranks.run(2, _automatic) == ["ShmGroup", "ShmGroup"]
