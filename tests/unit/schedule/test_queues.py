"""If all ranks issue parts of one common order, no assignment of streams to hardware queues has a circular wait.

If ranks have different orders, each stream needs a queue of its own. Streams that share a queue can deadlock.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from frontier_llm.schedule import Schedule, ScheduleError, build
from frontier_llm.schedule.dry_run import ListEntry, steps
from frontier_llm.schedule.order import posted_ahead
from tests.harness.queues import Packet, execute, packets
from tests.unit.schedule.test_order import inside_and_behind, posted_ahead_of_use

CASES = [("1f1b", 4, 7, 1), ("zb-h1", 3, 5, 1), ("interleaved", 3, 6, 2), ("zb-v", 3, 4, 2), ("gpipe", 2, 3, 1)]
DRAWS = 20


def issued(schedule: Schedule, one_in_flight: bool) -> list[list[Packet]]:
    """Return the packets of each rank on pp x dp 2 x tp 2 ranks."""
    listed = steps(schedule, inside_and_behind(schedule), tp=2, dp=2)
    return [packets(each, one_in_flight) for each in listed]


def early_receives(schedule: Schedule) -> Schedule:
    """Return the schedule as the engine runs it with many communications in flight."""
    return replace(schedule, actions=tuple(tuple(posted_ahead(actions)) for actions in schedule.actions))


def by_packet(seed: int) -> Callable[[int, Packet], int]:
    """Return a random assignment of packets to one to six queues, so that streams also move between queues."""
    draw = random.Random(seed)
    queues = draw.randint(1, 6)
    return lambda rank, packet: draw.randrange(queues)


def by_stream(seed: int, queues: int) -> Callable[[int, Packet], int]:
    """Return a random assignment of each rank's streams to queues."""
    draw = random.Random(seed)
    places: dict[tuple[int, str], int] = {}
    return lambda rank, packet: places.setdefault((rank, packet.stream), draw.randrange(queues))


def own_queues() -> Callable[[int, Packet], int]:
    """Return an assignment with a queue for each stream."""
    places: dict[tuple[int, str], int] = {}
    return lambda rank, packet: places.setdefault((rank, packet.stream), len(places))


@pytest.mark.parametrize("name, pp, m, v", CASES)
def test_one_in_flight_ends_for_any_assignment_of_streams_to_queues(name: str, pp: int, m: int, v: int) -> None:
    ranks = issued(build(name, pp, m, v), one_in_flight=True)
    for seed in range(DRAWS):
        execute(ranks, by_packet(seed))
        execute(ranks, by_stream(seed, queues=3))


@pytest.mark.parametrize("name, pp, m, v", CASES)
def test_receives_one_action_ahead_keep_one_order(name: str, pp: int, m: int, v: int) -> None:
    """The engine's order with many in flight is a common order too, so that this model finds no deadlock in it."""
    ranks = issued(early_receives(build(name, pp, m, v)), one_in_flight=False)
    execute(ranks, own_queues())
    for seed in range(DRAWS):
        execute(ranks, by_packet(seed))


@pytest.mark.parametrize("name, pp, m, v", [("1f1b", 4, 7, 1), ("zb-h1", 3, 5, 1), ("interleaved", 3, 6, 2)])
def test_ranks_with_orders_of_their_own_need_a_queue_for_each_stream(name: str, pp: int, m: int, v: int) -> None:
    ranks = issued(posted_ahead_of_use(build(name, pp, m, v)), one_in_flight=False)
    execute(ranks, own_queues())
    with pytest.raises(ScheduleError, match="deadlock: queues wait for"):
        for seed in range(DRAWS):
            execute(ranks, by_stream(seed, queues=3))


@pytest.mark.parametrize("name, pp, m, v", [("1f1b", 2, 4, 1), ("zb-h1", 3, 5, 1)])
def test_one_in_flight_needs_the_common_order(name: str, pp: int, m: int, v: int) -> None:
    ranks = issued(posted_ahead_of_use(build(name, pp, m, v)), one_in_flight=True)
    with pytest.raises(ScheduleError, match="deadlock: queues wait for"):
        execute(ranks, own_queues())


def sharded_step(dp: int, blocks: int, microbatches: int, copies: bool) -> list[list[ListEntry]]:
    """Return each rank's list of communications in a step of FSDP, which ends with a sum over the world.

    FSDP has one communicator for all-gathers and reduce-scatters. With `copies` (HSDP) the last sums over the copies
    are issued by a second stream. Their place among the gathers of the next block depends on each rank's host.
    """
    world = tuple(range(dp))

    def of_rank(rank: int) -> list[ListEntry]:
        listed: list[ListEntry] = []

        def communicate(what: str, stream: str = "shards") -> None:
            listed.append(ListEntry(what, stream, world))

        for microbatch in range(microbatches):
            for block in range(blocks):
                communicate(f"gather {block} of {microbatch}")
                listed.append(ListEntry("compute", after=(len(listed) - 1,)))
            for block in reversed(range(blocks)):
                late = copies and rank % 2
                if copies and not late:
                    communicate(f"sum of copies {block} of {microbatch}", "copies")
                communicate(f"gather {block} of {microbatch} again")
                listed.append(ListEntry("compute", after=(len(listed) - 1,)))
                communicate(f"scatter {block} of {microbatch}")
                if late:
                    communicate(f"sum of copies {block} of {microbatch}", "copies")
        # `comm.end_communication`: the host waits before it issues this package's communication
        listed.append(ListEntry("wait", after=tuple(index for index, step in enumerate(listed) if step.ranks)))
        communicate("sum of losses", "world")
        listed.append(ListEntry("host waits", after=(len(listed) - 1,)))
        return listed

    return [of_rank(rank) for rank in world]


def test_fsdp_alone_ends_for_any_assignment_of_streams_to_queues() -> None:
    """The communication of a rank is one sequence, equal on all ranks: FSDP's communicator, then the world's sums."""
    ranks = [packets(each, one_in_flight=False) for each in sharded_step(dp=4, blocks=3, microbatches=2, copies=False)]
    for seed in range(DRAWS):
        execute(ranks, by_packet(seed))
        execute(ranks, by_stream(seed, queues=2))


def test_sums_over_copies_beside_gathers_can_deadlock() -> None:
    """This is why HSDP is refused with one communication in flight."""
    ranks = [packets(each, one_in_flight=False) for each in sharded_step(dp=4, blocks=3, microbatches=2, copies=True)]
    execute(ranks, own_queues())
    with pytest.raises(ScheduleError, match="deadlock: queues wait for"):
        for seed in range(DRAWS):
            execute(ranks, by_stream(seed, queues=2))
