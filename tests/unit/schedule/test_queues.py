"""Streams that share hardware queues: which schedules hang with how many, and that the environment gives enough."""

from __future__ import annotations

import pytest

from frontier_llm.machine.env import environment
from frontier_llm.schedule import ScheduleError, build, check_queues, communication_streams

SCHEDULES = [("gpipe", 4, 8, 1), ("1f1b", 2, 4, 1), ("1f1b", 4, 8, 1), ("1f1b", 8, 16, 1), ("zb-h1", 4, 8, 1), ("zb-h1", 8, 16, 1),
             ("interleaved", 2, 4, 2), ("interleaved", 4, 8, 2), ("interleaved", 4, 8, 4), ("1f1b", 1, 4, 1)]  # fmt: skip


@pytest.mark.parametrize("name, pp, m, v", SCHEDULES)
def test_a_queue_for_each_stream_never_hangs(name: str, pp: int, m: int, v: int) -> None:
    check_queues(build(name, pp, m, v), communication_streams(pp, v))


@pytest.mark.parametrize("name, pp, m, v", [case for case in SCHEDULES if case[1] > 1])
def test_one_queue_for_all_communication_hangs(name: str, pp: int, m: int, v: int) -> None:
    """A posted receive holds up the tensor-parallel collective that its own sender waits for, at the other end of a loop."""
    with pytest.raises(ScheduleError, match=r"hangs at .* with 1 hardware queues"):
        check_queues(build(name, pp, m, v), 1)


@pytest.mark.parametrize("name, pp, m, v", SCHEDULES)
def test_the_eight_queues_of_rocm_machines_are_enough_for_two_stage_axes(name: str, pp: int, m: int, v: int) -> None:
    """Their 12 streams do share queues then, but none in a loop."""
    two_stage = ("dp", "world")
    assert pp < 3 or communication_streams(pp, v, two_stage) == 12
    check_queues(build(name, pp, m, v), 8, two_stage=two_stage)
    if pp > 1:
        with pytest.raises(ScheduleError, match="hangs at"):
            check_queues(build(name, pp, m, v), 1, two_stage=two_stage)


def test_hip_s_default_of_four_is_not_enough_for_every_schedule() -> None:
    with pytest.raises(ScheduleError, match="stage 0: hangs at"):
        check_queues(build("interleaved", 2, 4, 2), 4, apart=False)
    check_queues(build("interleaved", 2, 4, 2), 4)


def test_rocm_machines_give_each_communicator_a_queue() -> None:
    most = max(communication_streams(pp, v) for pp in range(1, 17) for v in (1, 2, 4))
    for machine in ("frontier", "lumi", "mi250"):
        values = {variable.name: variable.value for variable in environment(machine, 384)}
        assert int(values["GPU_MAX_HW_QUEUES"]) >= most == 8
        assert values["TORCH_NCCL_HIGH_PRIORITY"] == "1"  # what apart=True takes for granted
