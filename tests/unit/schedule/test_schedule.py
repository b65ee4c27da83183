"""Level 0: every schedule is legal, deadlock-free and within its bound, and a uniform simulation gives the closed-form bubble."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.errors import LayoutError
from frontier_llm.schedule import (
    FORWARD_ONLY,
    Action,
    Channel,
    Kind,
    Placement,
    Schedule,
    ScheduleError,
    ScheduleRule,
    build,
    forward_only,
    peak_in_flight,
    peak_waiting,
    posted_ahead,
    register,
    registry,
    render_text,
    round_robin,
    rule,
    simulate,
    timeline_chart,
    v_names,
    with_messages,
)
from tests.harness.dry_run import check, in_flight, waiting

V_SHAPED = ("zb-v", "v-half", "v-min")
SHIPPED = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", *V_SHAPED)
UNIT = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SHIPPED))
    chunks = 2 if name in V_SHAPED else draw(st.integers(1, 4)) if name.startswith("interleaved") else 1
    return build(name, draw(st.integers(1, 9)), draw(st.integers(1, 24)), chunks)


def action(text: str, position: int) -> Action:
    """'SF3' at a position."""
    letters = text.rstrip("0123456789")
    return Action(Kind(letters), int(text.removeprefix(letters)), position)


def custom(*orders: list[str], stages: int | None = None) -> Schedule:
    """One list of actions per stage, or the same on all `stages`; messages in the one order."""
    listed = [[action(text, stage) for text in order] for stage, order in enumerate(orders * (stages or 1))]
    placement = round_robin(len(listed))
    return Schedule("custom", placement, sum(text.startswith("F") for text in orders[0]), with_messages(placement, listed))


def at_their_use(schedule: Schedule) -> Schedule:
    """The same schedule with each receive directly before its use, in the sequence of the sender."""
    lists = []
    for actions in schedule.actions:
        arriving: deque[Action] = deque()
        used: list[Action] = []
        for one in actions:
            needs = schedule.placement.received_by(one.kind, one.position) if one.kind.computes else None
            while needs and Action(needs, one.microbatch, one.position) in arriving:
                used.append(arriving.popleft())
            (arriving if one.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD) else used).append(one)
        lists.append(tuple(used))
    return dataclasses.replace(schedule, actions=tuple(lists))


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
    """With a single communication in flight on each rank, so with any bound; training and evaluation."""
    check(schedule)
    check(schedule, in_flight=None)
    check(forward_only(schedule))


def test_evaluation_has_the_forwards_alone() -> None:
    schedule = build("interleaved", 2, 3, 2)
    kinds = {action.kind for actions in forward_only(schedule).actions for action in actions}
    assert kinds == {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD}
    with pytest.raises(ScheduleError, match="B0@0 does not belong here"):
        check(dataclasses.replace(schedule, name=forward_only(schedule).name))


def test_check_finds_a_deadlock_of_bounded_sends() -> None:
    """All of chunk 0 before all of chunk 1: the last stage's messages for chunk 1 pile up while stage 0 still sends chunk 0."""
    placement = round_robin(2, 2)
    orders = [[Action(Kind.FORWARD, microbatch, position) for position in held for microbatch in range(32)] for held in ((0, 2), (1, 3))]
    check(Schedule(FORWARD_ONLY, placement, 32, with_messages(placement, orders)))  # taken when they come, into 31 buffers
    piled = at_their_use(Schedule(FORWARD_ONLY, placement, 32, with_messages(placement, orders)))
    check(piled, in_flight=None)
    with pytest.raises(ScheduleError, match="deadlock: waits for F"):
        check(piled, in_flight=15)


def pending_receives(schedule: Schedule, actions: Sequence[Action]) -> int:
    """Peak number of receives of one kind that are posted and not yet consumed: the receive buffers of a direction."""
    peak, pending = 0, Counter[Kind]()
    for action in actions:
        if action.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
            pending[action.kind] += 1
            peak = max(peak, pending[action.kind])
        elif action.kind.computes and (needs := schedule.placement.received_by(action.kind, action.position)):
            pending[needs] -= 1
    return peak


@given(schedules())
@settings(max_examples=100)
def test_few_receives_are_pending(schedule: Schedule) -> None:
    most = 2 if schedule.chunks == 1 else schedule.stages
    assert all(pending_receives(schedule, actions) <= most for actions in schedule.actions)


@given(schedules())
@settings(max_examples=100)
def test_receives_posted_ahead_leave_the_messages_in_sequence(schedule: Schedule) -> None:
    for actions in schedule.actions:
        ahead = posted_ahead(actions)
        for wanted in (True, False):
            assert [a for a in ahead if a.kind.computes is wanted] == [a for a in actions if a.kind.computes is wanted]
    early = dataclasses.replace(schedule, actions=tuple(tuple(posted_ahead(actions)) for actions in schedule.actions))
    check(early)


@given(schedules())
@settings(max_examples=100)
def test_sends_follow_their_compute_directly(schedule: Schedule) -> None:
    """Nothing but other messages stands between."""
    makes = {Kind.SEND_FORWARD: (Kind.FORWARD,), Kind.SEND_BACKWARD: (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
    for actions in schedule.actions:
        for action in actions:
            if action.kind.computes:
                last = action
            elif action.kind in makes:
                assert last.kind in makes[action.kind]
                assert (last.microbatch, last.position) == (action.microbatch, action.position)


@pytest.mark.parametrize("name", SHIPPED)
def test_one_stage_communicates_nothing(name: str) -> None:
    schedule = build(name, 1, 5, rule(name).chunks[-1 if name in V_SHAPED else 0])
    check(schedule)
    assert schedule.actions == schedule.compute


@given(schedules())
@settings(max_examples=50)
def test_a_schedule_for_simulation_has_the_same_compute(schedule: Schedule) -> None:
    bare = build(schedule.name, schedule.stages, schedule.microbatches, schedule.chunks, messages=False)
    assert bare.compute == schedule.compute == bare.actions
    assert bare.length == schedule.length == sum(map(len, schedule.actions))


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_communication_fits_any_order_of_compute(forwards: list[int], backwards: list[int]) -> None:
    """All forwards in any order, then all backwards in any other, the same on each stage: still legal."""
    check(custom([f"F{m}" for m in forwards] + [f"B{m}" for m in backwards], stages=3))


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_stages_may_disagree_on_the_order(first: list[int], second: list[int]) -> None:
    """Stage 1 consumes in another order than stage 0 sends: receives follow the sender, so the FIFO still matches."""
    check(custom(*([f"F{m}" for m in order] + [f"B{m}" for m in range(4)] for order in (first, second))))


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
    with pytest.raises(ScheduleError, match=f"{gone} is missing"):
        check(drop(schedule, stage, gone))


def test_check_finds_a_repeated_action() -> None:
    schedule = build("1f1b", 2, 3)
    twice = dataclasses.replace(schedule, actions=(schedule.actions[0] + (Action(Kind.BACKWARD, 2, 0),), schedule.actions[1]))
    with pytest.raises(ScheduleError, match="B2@0 occurs 2 times"):
        check(twice)


def test_check_finds_a_missing_stage() -> None:
    schedule = build("1f1b", 2, 3)
    with pytest.raises(ScheduleError, match="1 lists of actions for 2 stages"):
        check(dataclasses.replace(schedule, actions=schedule.actions[:1]))


@pytest.mark.parametrize(
    ("name", "stage", "first", "second", "says"),
    [
        ("1f1b", 1, "F0", "B0", "B0@1 comes before F0@1"),
        ("zb-h1", 0, "I1", "W1", "W1@0 comes before I1@0"),
        ("1f1b", 0, "F0", "SF0", "SF0@0 comes before F0@0"),
        ("1f1b", 1, "RF1", "F1", "F1@1 comes before RF1@1"),
        ("zb-h1", 1, "I1", "SB1", "SB1@1 comes before I1@1"),
    ],
)
def test_check_finds_wrong_order(name: str, stage: int, first: str, second: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        check(swap(build(name, 2, 3), stage, action(first, stage), action(second, stage)))


def test_check_finds_messages_out_of_step() -> None:
    schedule = build("gpipe", 2, 3)
    swapped = swap(schedule, 1, action("RF0", 1), action("RF1", 1))
    swapped = swap(swapped, 1, action("F0", 1), action("F1", 1))
    with pytest.raises(ScheduleError, match="channel"):
        check(swapped)


def test_stages_that_wait_for_each_other_have_no_order() -> None:
    """Stage 0 wants the gradient of microbatch 0 before it sends microbatch 1, stage 1 wants microbatch 1 first."""
    with pytest.raises(ScheduleError) as caught:
        custom(["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"])
    assert "stage 0: deadlock: B0@0 waits for its neighbour" in str(caught.value)
    assert "stage 1: deadlock: F1@1 waits for its neighbour" in str(caught.value)


def test_check_finds_a_deadlock_between_stages() -> None:
    legal = custom(["F0", "F1", "B0", "B1"], ["F0", "F1", "B0", "B1"])
    first = tuple(action(text, 0) for text in ("F0", "SF0", "RB0", "B0", "F1", "SF1", "RB1", "B1"))
    with pytest.raises(ScheduleError, match="deadlock: waits for"):
        check(dataclasses.replace(legal, actions=(first, legal.actions[1])), in_flight=None)


def test_check_finds_a_wrong_order_on_one_rank() -> None:
    """Chunk 1 before chunk 0 with both on the same rank."""
    order = tuple(Action(kind, 0, position) for kind in (Kind.FORWARD, Kind.BACKWARD) for position in (1, 0))
    with pytest.raises(ScheduleError, match=r"F0@1 comes before F0@0"):
        check(Schedule("custom", Placement((0, 0)), 1, (order,)))


@pytest.mark.parametrize("placement", [round_robin(2), round_robin(5), round_robin(2, 2), round_robin(3, 2), Placement((0, 1, 2, 2, 1, 0))])
def test_both_ends_agree_on_the_channel_and_a_pair_has_one_writer(placement: Placement) -> None:
    pairs = ((Kind.SEND_FORWARD, Kind.RECV_FORWARD), (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD))
    writers: dict[tuple[Channel, frozenset[int]], set[int]] = {}
    for (send, receive), (position, rank) in itertools.product(pairs, enumerate(placement.rank_of)):
        other = placement.other_end(send, position)
        if not 0 <= other <= placement.last or placement.rank_of[other] == rank:
            continue
        assert placement.rank_of[other] == placement.peer(send, position) and placement.peer(receive, other) == rank
        assert placement.channel(send, position) is placement.channel(receive, other)
        pair = frozenset((rank, placement.rank_of[other]))
        writers.setdefault((placement.channel(send, position), pair), set()).add(rank)
        assert (rank, placement.rank_of[other]) in placement.streams[placement.channel(send, position)]
    assert all(len(ranks) == 1 for ranks in writers.values())
    assert set(placement.streams) == {channel for channel, _ in writers}


def test_the_turn_of_a_v_needs_no_message() -> None:
    v = Placement((0, 1, 1, 0))
    assert (v.ranks, v.chunks, v.ends, v.positions_of(0), v.positions_of(1)) == (2, 2, (0,), (0, 3), (1, 2))
    assert [v.sent_by(Kind.FORWARD, position) for position in range(4)] == [Kind.SEND_FORWARD, None, Kind.SEND_FORWARD, None]
    assert v.channel(Kind.SEND_FORWARD, 0) is Channel.FORWARD and v.channel(Kind.SEND_FORWARD, 2) is Channel.FORWARD_WRAP


# -------------------------------------------------------------------------------------------------------- in flight


@pytest.mark.parametrize("name", SHIPPED)
def test_declared_peaks_are_what_the_actions_hold(name: str) -> None:
    """Exactly, and as a bound where interleaved chunks have an incomplete last round or a V no more microbatches than stages."""
    sizes = itertools.product(range(1, 9), (1, 2, 3, 5, 8, 13, 21), [chunks for chunks in rule(name).chunks if chunks <= 3])
    for stages, microbatches, chunks in sizes:
        schedule = build(name, stages, microbatches, chunks)
        for stage in range(stages):
            declared, counted = peak_in_flight(name, stages, chunks, microbatches, stage), in_flight(schedule, stage)
            late, behind = peak_waiting(name, stages, chunks, microbatches, stage), waiting(schedule, stage)
            where = (stages, microbatches, chunks, stage)
            if (name not in V_SHAPED and chunks > 1 and microbatches % stages) or (name in V_SHAPED and microbatches <= stages):
                assert declared >= counted, where
            else:
                assert (declared, late) == (counted, behind), where


def test_peaks_are_arrays_and_a_bound_where_none_is_declared() -> None:
    stages, microbatches, stage = np.array([4, 8]), np.array([16, 2]), np.array([[0], [3]])
    assert peak_in_flight("1f1b", stages, 1, microbatches, stage).tolist() == [[4, 2], [1, 2]]
    with patch.dict(registry._RULES):
        register("undeclared", ScheduleRule(lambda placement, microbatches, rank: [], splits_backward=True))
        assert peak_in_flight("undeclared", stages, 2, microbatches, stage).tolist() == [32, 4]
        assert peak_waiting("undeclared", stages, 2, microbatches, stage).tolist() == [32, 4]
    shipped = subprocess.run(  # in a process of its own: other tests register schedules too
        [sys.executable, "-c", "from frontier_llm.schedule import names; print(*names())"], capture_output=True, text=True, check=True
    )
    assert shipped.stdout.split() == ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "interleaved-zb"]
    with pytest.raises(LayoutError, match="did you mean '1f1b'"):
        peak_in_flight("1f1", 4, 1, 8, 0)


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


@given(st.integers(1, 8), st.integers(0, 16))
@settings(max_examples=40)
def test_bubbles_of_the_zero_bubble_papers(stages: int, more: int) -> None:
    """Where F = I = W: ZB-H2 idles nowhere between a rank's first and last action; ZB-V half a forward per stage, which is its ramp."""
    deep = simulate(build("zb-h2", stages, 2 * stages + more), lambda _, action: UNIT[action.kind])
    for rank in range(stages):
        assert deep.end_s[rank][-1] - deep.start_s[rank][0] == deep.busy_s(rank)
    vee = simulate(build("zb-v", stages, 2 * stages + more, 2), lambda _, action: UNIT[action.kind] / 2)
    assert vee.makespan_s == 3 * (2 * stages + more) + (stages - 1) / 2


@given(st.integers(2, 6), st.integers(2, 4), st.integers(2, 4))
@settings(max_examples=40)
def test_bubble_of_interleaved_zero_bubble(stages: int, rounds: int, chunks: int) -> None:
    """(pp - 1)(F + I - W) / v."""
    timeline = simulate(build("interleaved-zb", stages, rounds * stages, chunks), lambda _, action: UNIT[action.kind] / chunks)
    assert timeline.makespan_s == pytest.approx(3 * rounds * stages + (stages - 1) / chunks)


@pytest.mark.parametrize(("name", "memory", "idle"), [("v-half", 1 / 2, 1 / 2), ("v-min", 1 / 3, 2 / 3), ("zb-v", 1, 1 / 6)])
def test_v_shapes_keep_their_share_of_the_memory_and_of_the_bubble(name: str, memory: float, idle: float) -> None:
    """Of what 1F1B has, up to a constant number of activations (Qi et al. 2024, table 1: V-Half 1/2 and 1/2, V-Min 1/3 and 2/3)."""
    for stages in (8, 16, 24):
        vee = simulate(build(name, stages, 4 * stages, 2), lambda _, action: UNIT[action.kind] / 2)
        alive = [in_flight(vee.schedule, rank) / 2 for rank in range(stages)]
        assert memory * stages <= max(alive) <= memory * stages + 3 and min(alive) >= max(alive) - 1
        assert vee.makespan_s - 12 * stages == pytest.approx(3 * (stages - 1) * idle, abs=1)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, 12])
def test_every_v_has_an_order_and_its_memory(stages: int) -> None:
    """Of a rank's activations those that its name promises, up to the turns' few."""
    for name in v_names():
        schedule = build(name, stages, 2 * stages + 3, 2)
        check(schedule)
        held = max(in_flight(schedule, rank) for rank in range(stages))
        assert held <= 2 * stages * (1 - rule(name).idle if rule(name).idle > 1 / 6 else 1) + 6


def test_a_v_of_unknown_distances_is_refused() -> None:
    for name in ("v:9,9,9,9", "v:", "v:1,1", "v:1,1,1,x"):
        with pytest.raises(LayoutError, match="is not a schedule"):
            build(name, 4, 8, 2)


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
            key = (name, action.microbatch, action.position)
            begins[key], ends[key] = start_s, end_s
    rank_of = schedule.placement.rank_of
    for (kind, microbatch, place), start_s in begins.items():
        step = {Kind.FORWARD: -1, Kind.BACKWARD: 1}.get(kind)
        before = step and ends.get((kind, microbatch, place + step))
        if before is not None:
            assert step is not None
            across = 0.0 if rank_of[place] == rank_of[place + step] else send_s  # a V turns round inside a rank
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


def test_the_figure_shows_every_action_and_what_is_idle() -> None:
    chart = timeline_chart(simulate(build("interleaved", 2, 4, 2), lambda _, action: UNIT[action.kind]))
    idle, *kinds = chart.traces
    assert [trace["name"] for trace in chart.traces] == ["idle", "forward", "backward"]
    assert idle["y"] == [0, 1] and idle["x"][0] == max(
        base + x for trace in kinds for base, x in zip(trace["base"], trace["x"], strict=True)
    )
    assert [len(trace["x"]) for trace in kinds] == [16, 16]  # 4 microbatches, 2 chunks, 2 ranks
    assert kinds[0]["hovertext"][0] == "forward, microbatch 0, virtual stage 0"
    assert len(set(kinds[0]["marker"]["color"])) == 2, "a rank's second chunk is lighter"
