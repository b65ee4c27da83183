"""Level 0: every schedule is legal, deadlock-free and within its bound, and a uniform simulation gives the closed-form bubble."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.errors import LayoutError
from frontier_llm.schedule import (
    FORWARD_ONLY,
    ORDERS,
    Action,
    Channel,
    Kind,
    Schedule,
    ScheduleError,
    build,
    channel_of,
    check,
    forward_only,
    in_flight,
    peer_of,
    pending_receives,
    render_figure,
    render_text,
    simulate,
    with_communication,
)

SINGLE_CHUNK = ("gpipe", "1f1b", "zb-h1")
UNIT = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(ORDERS)))
    chunks = draw(st.integers(1, 4)) if name == "interleaved" else 1
    return build(name, draw(st.integers(1, 9)), draw(st.integers(1, 24)), chunks)


def swap(schedule: Schedule, stage: int, first: Action, second: Action) -> Schedule:
    """The same schedule with two actions of a stage exchanged."""
    change = {first: second, second: first}
    actions = list(schedule.actions)
    actions[stage] = tuple(change.get(action, action) for action in actions[stage])
    return dataclasses.replace(schedule, actions=tuple(actions))


def drop(schedule: Schedule, stage: int, gone: Action) -> Schedule:
    actions = list(schedule.actions)
    actions[stage] = tuple(action for action in actions[stage] if action != gone)
    return dataclasses.replace(schedule, actions=tuple(actions))


# ---------------------------------------------------------------------------------------------------------- legality


@given(schedules())
@settings(max_examples=150)
def test_every_schedule_is_legal_and_deadlock_free(schedule: Schedule) -> None:
    check(schedule)


@given(schedules())
@settings(max_examples=100)
def test_one_outstanding_send_per_channel_is_enough(schedule: Schedule) -> None:
    """Whatever bound the engine puts on sends under way, it cannot deadlock: training and evaluation live with the smallest."""
    check(schedule, outstanding_sends=1)
    check(forward_only(schedule), outstanding_sends=1)


def test_evaluation_has_the_forwards_alone() -> None:
    schedule = build("interleaved", 2, 3, 2)
    kinds = {action.kind for actions in forward_only(schedule).actions for action in actions}
    assert kinds == {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD}
    with pytest.raises(ScheduleError, match="B0 does not belong here"):
        check(dataclasses.replace(schedule, name=forward_only(schedule).name))


def test_check_finds_a_deadlock_of_bounded_sends() -> None:
    """All of chunk 0 before all of chunk 1: the last stage's messages for chunk 1 pile up while stage 0 still sends chunk 0."""
    order = [Action(Kind.FORWARD, microbatch, chunk) for chunk in range(2) for microbatch in range(32)]
    piled = Schedule(FORWARD_ONLY, 2, 32, 2, with_communication([order] * 2, 2))
    check(piled)
    check(piled, outstanding_sends=15)
    with pytest.raises(ScheduleError, match=r"deadlock: .* waits for earlier sends to be taken"):
        check(piled, outstanding_sends=14)


@given(schedules())
@settings(max_examples=100)
def test_few_receives_are_pending(schedule: Schedule) -> None:
    assert all(pending_receives(schedule, stage) <= 2 for stage in range(schedule.stages))


@given(schedules())
@settings(max_examples=100)
def test_sends_follow_their_compute_directly(schedule: Schedule) -> None:
    makes = {Kind.SEND_FORWARD: (Kind.FORWARD,), Kind.SEND_BACKWARD: (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
    for actions in schedule.actions:
        for before, action in itertools.pairwise(actions):
            if action.kind in makes:
                assert before.kind in makes[action.kind]
                assert (before.microbatch, before.chunk) == (action.microbatch, action.chunk)


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_one_stage_communicates_nothing(name: str) -> None:
    schedule = build(name, 1, 5, 3 if name == "interleaved" else 1)
    check(schedule)
    assert schedule.actions[0] == schedule.compute_actions(0)


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_communication_fits_any_order_of_compute(forwards: list[int], backwards: list[int]) -> None:
    """All forwards in any order, then all backwards in any other, the same on each stage: still legal."""
    order = [*(Action(Kind.FORWARD, m) for m in forwards), *(Action(Kind.BACKWARD, m) for m in backwards)]
    check(Schedule("custom", 3, 4, 1, with_communication([order] * 3, 1)))


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_stages_may_disagree_on_the_order(first: list[int], second: list[int]) -> None:
    """Stage 1 consumes in another order than stage 0 sends: receives follow the sender, so the FIFO still matches."""
    orders = [[*(Action(Kind.FORWARD, m) for m in order), *(Action(Kind.BACKWARD, m) for m in range(4))] for order in (first, second)]
    check(Schedule("custom", 2, 4, 1, with_communication(orders, 1)))


@pytest.mark.parametrize(
    ("name", "sizes"), [("2f2b", (2, 4, 1)), ("1f1b", (0, 4, 1)), ("gpipe", (2, 0, 1)), ("interleaved", (2, 4, 0)), ("zb-h1", (2, 4, 2))]
)
def test_build_refuses(name: str, sizes: tuple[int, int, int]) -> None:
    with pytest.raises(LayoutError):
        build(name, *sizes)


def test_build_reports_all_problems_at_once() -> None:
    with pytest.raises(LayoutError) as caught:
        build("1f1", 0, 0)
    assert len(caught.value.problems) == 3
    assert "did you mean '1f1b'" in str(caught.value)


# ------------------------------------------------------------------------------------------- the checker finds mistakes


@given(schedules(), st.data())
@settings(max_examples=100)
def test_check_finds_any_dropped_action(schedule: Schedule, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, schedule.stages - 1))
    gone = data.draw(st.sampled_from(schedule.actions[stage]))
    with pytest.raises(ScheduleError, match=f"{gone} is missing".replace(".", r"\.")):
        check(drop(schedule, stage, gone))


def test_check_finds_a_repeated_action() -> None:
    schedule = build("1f1b", 2, 3)
    twice = dataclasses.replace(schedule, actions=(schedule.actions[0] + (Action(Kind.BACKWARD, 2),), schedule.actions[1]))
    with pytest.raises(ScheduleError, match="B2 occurs 2 times"):
        check(twice)


def test_check_finds_a_missing_stage() -> None:
    schedule = build("1f1b", 2, 3)
    with pytest.raises(ScheduleError, match="1 lists of actions for 2 stages"):
        check(dataclasses.replace(schedule, actions=schedule.actions[:1]))


@pytest.mark.parametrize(
    ("name", "stage", "first", "second", "says"),
    [
        ("1f1b", 1, Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0), "B0 comes before F0"),
        ("zb-h1", 0, Action(Kind.BACKWARD_INPUT, 1), Action(Kind.BACKWARD_WEIGHT, 1), "W1 comes before I1"),
        ("1f1b", 0, Action(Kind.FORWARD, 0), Action(Kind.SEND_FORWARD, 0), "SF0 comes before F0"),
        ("1f1b", 1, Action(Kind.RECV_FORWARD, 1), Action(Kind.FORWARD, 1), "F1 comes before RF1"),
        ("zb-h1", 1, Action(Kind.BACKWARD_INPUT, 1), Action(Kind.SEND_BACKWARD, 1), "SB1 comes before I1"),
    ],
)
def test_check_finds_wrong_order(name: str, stage: int, first: Action, second: Action, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        check(swap(build(name, 2, 3), stage, first, second))


def test_check_finds_messages_out_of_step() -> None:
    schedule = build("gpipe", 2, 3)
    swapped = swap(schedule, 1, Action(Kind.RECV_FORWARD, 0), Action(Kind.RECV_FORWARD, 1))
    swapped = swap(swapped, 1, Action(Kind.FORWARD, 0), Action(Kind.FORWARD, 1))
    with pytest.raises(ScheduleError, match="channel"):
        check(swapped)


def test_check_finds_a_deadlock_between_stages() -> None:
    """Stage 0 wants the gradient of microbatch 0 before it sends microbatch 1, stage 1 wants microbatch 1 first."""
    first = [Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0), Action(Kind.FORWARD, 1), Action(Kind.BACKWARD, 1)]
    second = [Action(Kind.FORWARD, 0), Action(Kind.FORWARD, 1), Action(Kind.BACKWARD, 0), Action(Kind.BACKWARD, 1)]
    with pytest.raises(ScheduleError) as caught:
        check(Schedule("custom", 2, 2, 1, with_communication([first, second], 1)))
    assert "stage 0: deadlock: B0 waits for RB0" in str(caught.value)
    assert "stage 1: deadlock: F1 waits for RF1" in str(caught.value)


def test_check_finds_a_deadlock_on_one_rank() -> None:
    """Chunk 1 before chunk 0 with both on the same rank."""
    order = [Action(Kind.FORWARD, 0, 1), Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 1), Action(Kind.BACKWARD, 0, 0)]
    with pytest.raises(ScheduleError, match=r"F0\.1 waits for F0"):
        check(Schedule("custom", 1, 1, 2, (tuple(order),)))


def test_a_receive_before_a_send_of_the_same_channel_deadlocks() -> None:
    """Why `with_communication` puts the send first: all receives up front starve every send behind them."""
    schedule = build("gpipe", 3, 2)
    middle = schedule.actions[1]
    early = tuple(action for action in middle if action.kind is Kind.RECV_FORWARD)
    greedy = early + tuple(action for action in middle if action not in early)
    actions = (schedule.actions[0], greedy, schedule.actions[2])
    one_f_one_b = [[Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0), Action(Kind.FORWARD, 1), Action(Kind.BACKWARD, 1)]] * 3
    careful = with_communication(one_f_one_b, 1)
    check(Schedule("custom", 3, 2, 1, careful))
    check(dataclasses.replace(schedule, actions=actions))  # harmless while stage 0 sends without waiting ...
    starved = tuple(action for action in careful[1] if action.kind is not Kind.RECV_FORWARD)
    with pytest.raises(ScheduleError, match="deadlock"):  # ... fatal once it waits for a gradient in between
        check(Schedule("custom", 3, 2, 1, (careful[0], early + starved, careful[2])))


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_both_ends_agree_on_the_channel(stages: int) -> None:
    pairs = ((Kind.SEND_FORWARD, Kind.RECV_FORWARD), (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD))
    for send, receive in pairs:
        for stage in range(stages):
            peer = peer_of(send, stage, stages)
            assert peer_of(receive, peer, stages) == stage
            assert channel_of(send, stage, stages) is channel_of(receive, peer, stages)
    assert channel_of(Kind.SEND_FORWARD, stages - 1, stages) is Channel.FORWARD_WRAP
    assert channel_of(Kind.SEND_BACKWARD, 0, stages) is Channel.BACKWARD_WRAP


# -------------------------------------------------------------------------------------------------------- in flight


@given(st.integers(1, 10), st.integers(1, 30))
def test_in_flight_of_single_chunk_schedules(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        assert in_flight(build("gpipe", stages, microbatches), stage) == microbatches
        assert in_flight(build("1f1b", stages, microbatches), stage) == min(microbatches, stages - stage)
        assert in_flight(build("zb-h1", stages, microbatches), stage) == min(microbatches, stages)  # 1F1B's peak, on every stage


@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 4))
def test_in_flight_of_interleaved(stages: int, rounds: int, chunks: int) -> None:
    """Megatron's warm-up, 2 (pp - 1 - stage) + (v - 1) pp, and the forward that follows it."""
    microbatches = rounds * stages
    for stage in range(stages):
        warmup = 2 * (stages - 1 - stage) + (chunks - 1) * stages
        assert in_flight(build("interleaved", stages, microbatches, chunks), stage) == min(microbatches * chunks, warmup + 1)


@given(st.integers(2, 6), st.integers(1, 20), st.integers(2, 4))
def test_an_incomplete_round_never_holds_more(stages: int, microbatches: int, chunks: int) -> None:
    full = -(-microbatches // stages) * stages
    for stage in range(stages):
        assert in_flight(build("interleaved", stages, microbatches, chunks), stage) <= in_flight(
            build("interleaved", stages, full, chunks), stage
        )


# ------------------------------------------------------------------------------------------------------- simulation


@given(st.integers(1, 8), st.integers(1, 24), st.floats(0.1, 3), st.floats(0.1, 6))
def test_bubble_of_gpipe_and_1f1b(stages: int, microbatches: int, forward_s: float, backward_s: float) -> None:
    for name in ("gpipe", "1f1b"):
        timeline = simulate(build(name, stages, microbatches), lambda _, action: forward_s if action.kind is Kind.FORWARD else backward_s)
        assert timeline.bubble_fraction == pytest.approx((stages - 1) / microbatches)
        assert timeline.makespan_s == pytest.approx((microbatches + stages - 1) * (forward_s + backward_s))


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4))
def test_bubble_of_interleaved(stages: int, rounds: int, chunks: int) -> None:
    microbatches = rounds * stages
    timeline = simulate(build("interleaved", stages, microbatches, chunks), lambda _, action: UNIT[action.kind] / chunks)
    assert timeline.bubble_fraction == pytest.approx((stages - 1) / (chunks * microbatches))


@given(st.integers(2, 6), st.integers(1, 20), st.integers(2, 4))
def test_an_incomplete_round_costs_at_most_a_full_one(stages: int, microbatches: int, chunks: int) -> None:
    full = -(-microbatches // stages) * stages
    ragged, whole = (simulate(build("interleaved", stages, m, chunks), lambda _, action: UNIT[action.kind]) for m in (microbatches, full))
    assert ragged.makespan_s <= whole.makespan_s + 1e-9


@given(st.integers(1, 8), st.integers(0, 16))
def test_bubble_of_zero_bubble_h1(stages: int, more: int) -> None:
    """(pp - 1)(F + I - W) of Qi et al., table 2; with F = I = W that is (pp - 1) / 3m, a third of 1F1B's."""
    microbatches = stages + more
    timeline = simulate(build("zb-h1", stages, microbatches), lambda _, action: UNIT[action.kind])
    assert timeline.makespan_s == 3 * microbatches + (stages - 1)
    assert timeline.bubble_fraction == pytest.approx((stages - 1) / (3 * microbatches))


def test_transfers_take_time_and_share_their_link() -> None:
    """Two stages, one microbatch: F, transfer, F, B, transfer, B."""
    timeline = simulate(build("1f1b", 2, 1), lambda _, action: UNIT[action.kind], send_s=0.25)
    assert timeline.makespan_s == 1 + 0.25 + 1 + 2 + 0.25 + 2
    slow_back = simulate(
        build("1f1b", 2, 1), lambda _, action: UNIT[action.kind], send_s=lambda source, target: 0.25 if source < target else 1
    )
    assert slow_back.makespan_s == timeline.makespan_s + 0.75
    choked = simulate(build("gpipe", 2, 4), lambda _, action: 0.1, send_s=1.0)
    assert choked.start_s[1][:4] == pytest.approx([1.1, 2.1, 3.1, 4.1])  # one message at a time


@given(schedules(), st.floats(0, 2))
@settings(max_examples=60)
def test_timeline_respects_dependencies(schedule: Schedule, send_s: float) -> None:
    timeline = simulate(schedule, lambda stage, action: UNIT[action.kind] * (1 + 0.1 * stage), send_s)
    begins, ends = {}, {}
    for stage in range(schedule.stages):
        clock = 0.0
        for action, start_s, end_s in timeline.spans(stage):
            assert start_s >= clock
            assert end_s - start_s == pytest.approx(UNIT[action.kind] * (1 + 0.1 * stage))
            clock = end_s
            name = Kind.BACKWARD if action.kind is Kind.BACKWARD_INPUT else action.kind
            key = (name, action.microbatch, action.chunk * schedule.stages + stage)
            begins[key], ends[key] = start_s, end_s
    across = 0.0 if schedule.stages == 1 else send_s
    for (kind, microbatch, place), start_s in begins.items():
        step = {Kind.FORWARD: -1, Kind.BACKWARD: 1}.get(kind)
        before = step and ends.get((kind, microbatch, place + step))
        if before is not None:
            assert start_s >= before + across - 1e-9
        if kind is Kind.BACKWARD:
            assert start_s >= ends[(Kind.FORWARD, microbatch, place)]


def test_a_trillion_parameter_schedule_simulates_in_seconds() -> None:
    """1600 microbatches on 64 stages, 614,000 actions; about 0.6 s on one core, bounded here for loaded machines."""
    schedule = build("1f1b", 64, 1600)
    begin_s = time.process_time()
    timeline = simulate(schedule, lambda _, action: UNIT[action.kind])
    assert time.process_time() - begin_s < 4
    assert timeline.bubble_fraction == pytest.approx(63 / 1600)


# ---------------------------------------------------------------------------------------------------------- renderer


def test_text_shows_stages_idle_time_and_bubble() -> None:
    text = render_text(simulate(build("1f1b", 2, 2), lambda _, action: UNIT[action.kind]))
    assert text.splitlines() == [
        "stage 0 |F0 F1 ······B0    ···B1    ",
        "stage 1 |···F0 B0    F1 B1    ······",
        "1f1b, 2 stages, 2 microbatches: makespan 9, bubble 50.0% of compute",
    ]


def test_long_text_is_cut_and_says_so() -> None:
    lines = render_text(simulate(build("gpipe", 3, 50), lambda _, action: UNIT[action.kind]), columns=60).splitlines()
    assert all(line.endswith("…") and len(line) == len("stage 0 |") + 60 for line in lines[:3])


def test_png_is_written(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    render_figure(simulate(build("interleaved", 2, 4, 2), lambda _, action: UNIT[action.kind]), path)
    assert path.read_bytes().startswith(b"\x89PNG")
