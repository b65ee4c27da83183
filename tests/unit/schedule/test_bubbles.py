"""Compares the closed forms of activations in flight and idle time with the actions of each schedule."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontier_llm.errors import LayoutError
from frontier_llm.schedule import (
    Action,
    Kind,
    build,
    peak_bytes,
    peak_in_flight,
    peak_waiting,
    peak_waiting_in_backward,
    register,
    registry,
    rule,
    simulate,
    split_share,
    v_names,
)
from tests.harness.dry_run import check, in_flight, waiting
from tests.unit.schedule.drawn import SHIPPED, UNIT, V_SHAPED


@pytest.mark.parametrize("name", SHIPPED)
def test_declared_peaks_are_what_the_actions_hold(name: str) -> None:
    """The declared peak is exact in general.

    It is an upper bound if interleaved chunks have an incomplete last round, or if a V has no more microbatches than
    stages.
    """
    sizes = itertools.product(
        range(1, 9),
        (1, 2, 3, 5, 8, 13, 21),
        [chunks for chunks in rule(name).chunks if chunks <= 3],
    )
    for stages, microbatches, chunks in sizes:
        schedule = build(name, stages, microbatches, chunks)
        for stage in range(stages):
            declared = peak_in_flight(name, stages, chunks, microbatches, stage)
            counted = in_flight(schedule, stage)
            late = peak_waiting(name, stages, chunks, microbatches, stage)
            behind = waiting(schedule, stage)
            where = (stages, microbatches, chunks, stage)
            if (name not in V_SHAPED and chunks > 1 and microbatches % stages) or (
                name in V_SHAPED and microbatches <= stages
            ):
                assert declared >= counted, where
            else:
                assert (declared, late) == (counted, behind), where


@pytest.mark.parametrize("name", SHIPPED)
def test_bytes_are_summed_over_all_actions(name: str) -> None:
    """A waiting activation of different size on each position is counted, also after the last forward.

    With equal sizes, a position's bytes are at most those of the declared numbers.
    """
    sizes = itertools.product(
        (1, 2, 3, 5, 8),
        (1, 2, 3, 5, 8, 13, 21, 40),
        [chunks for chunks in rule(name).chunks if chunks <= 3],
    )
    for stages, microbatches, chunks in sizes:
        schedule = build(name, stages, microbatches, chunks, messages=False)
        kept = [1.0 + position % 3 for position in range(stages * chunks)]
        waiting = [5.0 + position % 4 for position in range(stages * chunks)]
        listed = peak_bytes(name, stages, chunks, microbatches, kept, waiting)
        equal = peak_bytes(name, stages, chunks, microbatches, [1.0] * stages * chunks, [9.0] * stages * chunks)
        for stage in range(stages):
            counted = max(_bytes(schedule.compute[stage], kept, waiting))
            if name not in V_SHAPED and chunks > 1 and microbatches % stages:  # an incomplete last round
                assert listed[stage] >= counted, (stages, microbatches, chunks, stage)
            else:
                assert listed[stage] == counted, (stages, microbatches, chunks, stage)
            most_kept, late = (
                float(of(name, stages, chunks, microbatches, stage))
                for of in (peak_in_flight, peak_waiting_in_backward)
            )
            assert equal[stage] <= most_kept + 8.0 * late, (stages, microbatches, chunks, stage)


def _bytes(actions: Sequence[Action], kept: list[float], waiting: list[float]) -> Iterator[float]:
    """Yield the bytes that a rank keeps after each action."""
    alive: dict[tuple[int, int], float] = {}
    for action in actions:
        each = action.microbatch, action.position
        if action.kind is Kind.FORWARD:
            alive[each] = kept[action.position]
        elif action.kind is Kind.BACKWARD_INPUT:
            alive[each] = waiting[action.position]
        else:
            del alive[each]
        yield sum(alive.values())


@pytest.mark.parametrize("name", SHIPPED)
def test_the_declared_share_of_split_backwards_is_that_of_the_actions(name: str) -> None:
    """The declared share is exact. It is approximate if DualPipeV has fewer microbatches than positions."""
    chunks = rule(name).chunks[0]
    for stages, microbatches in itertools.product(range(1, 9), (1, 2, 3, 5, 8, 16, 21)):
        kinds = Counter(
            action.kind
            for order in build(name, stages, microbatches, chunks, messages=False).actions
            for action in order
        )
        counted = kinds[Kind.BACKWARD_INPUT] / (kinds[Kind.BACKWARD_INPUT] + kinds[Kind.BACKWARD])
        near = 0.25 if name == "dualpipe-v" and microbatches < 2 * stages else 1e-12
        assert split_share(name, stages, microbatches) == pytest.approx(counted, abs=near), (stages, microbatches)


def test_peaks_are_arrays_and_counted_where_none_is_declared() -> None:
    stages = np.array([4, 8])
    microbatches = np.array([16, 2])
    stage = np.array([[0], [3]])
    assert peak_in_flight("1f1b", stages, 1, microbatches, stage).tolist() == [[4, 2], [1, 2]]
    with patch.dict(registry._RULES):
        for name in ("1f1b", "zb-h1", "gpipe", "interleaved"):
            shipped_rule = rule(name)
            register(
                "undeclared",
                replace(shipped_rule, peak_in_flight=None, peak_waiting=None, peak_waiting_in_backward=None),
            )
            chunks = 2 if 2 in shipped_rule.chunks else 1
            for of in (peak_in_flight, peak_waiting, peak_waiting_in_backward)[: 2 if name == "interleaved" else 3]:
                declared, counted = (
                    np.broadcast_to(of(each, stages, chunks, 64 * stages, stage), (2, 2)).tolist()
                    for each in (name, "undeclared")
                )
                assert counted == declared, name
            assert peak_in_flight("undeclared", 4, chunks, 64, 1) == peak_in_flight(name, 4, chunks, 64, 1)
    shipped = subprocess.run(  # a separate process, because other tests register schedules too
        [sys.executable, "-c", "from frontier_llm.schedule import names; print(*names())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(shipped.stdout.split()) == sorted(SHIPPED)
    with pytest.raises(LayoutError, match="did you mean '1f1b'"):
        peak_in_flight("1f1", 4, 1, 8, 0)


@given(st.integers(1, 8), st.integers(1, 24), st.floats(0.1, 3), st.floats(0.1, 6))
def test_bubble_of_gpipe_and_1f1b(stages: int, microbatches: int, forward_s: float, backward_s: float) -> None:
    for name in ("gpipe", "1f1b"):
        timeline = simulate(
            build(name, stages, microbatches),
            lambda _, action: forward_s if action.kind is Kind.FORWARD else backward_s,
        )
        assert timeline.bubble_fraction == pytest.approx((stages - 1) / microbatches)
        assert timeline.makespan_s == pytest.approx((microbatches + stages - 1) * (forward_s + backward_s))


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4))
def test_bubble_of_interleaved(stages: int, rounds: int, chunks: int) -> None:
    microbatches = rounds * stages
    timeline = simulate(
        build("interleaved", stages, microbatches, chunks),
        lambda _, action: UNIT[action.kind] / chunks,
    )
    assert timeline.bubble_fraction == pytest.approx((stages - 1) / (chunks * microbatches))


@given(st.integers(2, 6), st.integers(1, 20), st.integers(2, 4))
def test_an_incomplete_round_costs_at_most_a_full_one(stages: int, microbatches: int, chunks: int) -> None:
    full = -(-microbatches // stages) * stages
    ragged, whole = (
        simulate(build("interleaved", stages, m, chunks), lambda _, action: UNIT[action.kind])
        for m in (microbatches, full)
    )
    assert ragged.makespan_s <= whole.makespan_s + 1e-9


@given(st.integers(1, 8), st.integers(0, 16))
def test_bubble_of_zero_bubble_h1(stages: int, more: int) -> None:
    """The bubble is (pp - 1)(F + I - W), Qi et al., table 2. With F = I = W that is (pp - 1) / 3m, a third of 1F1B's
    bubble.
    """
    microbatches = stages + more
    timeline = simulate(build("zb-h1", stages, microbatches), lambda _, action: UNIT[action.kind])
    assert timeline.makespan_s == 3 * microbatches + (stages - 1)
    assert timeline.bubble_fraction == pytest.approx((stages - 1) / (3 * microbatches))


@given(st.integers(1, 8), st.integers(0, 16))
@settings(max_examples=40)
def test_bubbles_of_the_zero_bubble_papers(stages: int, more: int) -> None:
    """F = I = W. ZB-H2 never idles between a rank's first and last action.

    ZB-V idles half a forward per stage, in its ramp.
    """
    deep = simulate(build("zb-h2", stages, 2 * stages + more), lambda _, action: UNIT[action.kind])
    for rank in range(stages):
        assert deep.end_s[rank][-1] - deep.start_s[rank][0] == deep.busy_s(rank)
    vee = simulate(build("zb-v", stages, 2 * stages + more, 2), lambda _, action: UNIT[action.kind] / 2)
    assert vee.makespan_s == 3 * (2 * stages + more) + (stages - 1) / 2


@given(st.integers(1, 8), st.integers(0, 16))
@settings(max_examples=40)
def test_dual_pipe_idles_as_little_as_zb_v_in_pairs_of_which_neither_half_needs_the_other(
    stages: int, more: int
) -> None:
    """F = I = W. Neither action of a pair needs the result of the other."""
    microbatches = 2 * stages + more
    dual = simulate(build("dualpipe-v", stages, microbatches, 2), lambda _, action: UNIT[action.kind] / 2)
    assert dual.makespan_s == 3 * microbatches + (stages - 1) / 2
    for rank, actions in enumerate(dual.schedule.compute):
        pairs = [
            (one, other)
            for one, other in itertools.pairwise(actions)
            if (one.kind, other.kind) == (Kind.FORWARD, Kind.BACKWARD)
        ]
        assert len(pairs) >= 2 * (more + rank + 1)
        assert all(one.microbatch > other.microbatch or one.position < other.position for one, other in pairs)


@given(st.integers(2, 6), st.integers(2, 4), st.integers(2, 4))
@settings(max_examples=40)
def test_bubble_of_interleaved_zero_bubble(stages: int, rounds: int, chunks: int) -> None:
    """The bubble is (pp - 1)(F + I - W) / v."""
    timeline = simulate(
        build("interleaved-zb", stages, rounds * stages, chunks),
        lambda _, action: UNIT[action.kind] / chunks,
    )
    assert timeline.makespan_s == pytest.approx(3 * rounds * stages + (stages - 1) / chunks)


@pytest.mark.parametrize(
    ("name", "memory", "idle"),
    [("v-half", 1 / 2, 1 / 2), ("v-min", 1 / 3, 2 / 3), ("zb-v", 1, 1 / 6)],
)
def test_v_shapes_keep_their_share_of_the_memory_and_of_the_bubble(name: str, memory: float, idle: float) -> None:
    """The shares are relative to 1F1B, up to a constant number of activations.

    Qi et al. 2024, table 1: V-Half 1/2 and 1/2, V-Min 1/3 and 2/3.
    """
    for stages in (8, 16, 24):
        vee = simulate(build(name, stages, 4 * stages, 2), lambda _, action: UNIT[action.kind] / 2)
        alive = [in_flight(vee.schedule, rank) / 2 for rank in range(stages)]
        assert memory * stages <= max(alive) <= memory * stages + 3 and min(alive) >= max(alive) - 1
        assert vee.makespan_s - 12 * stages == pytest.approx(3 * (stages - 1) * idle, abs=1)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, 12])
def test_every_v_has_an_order_and_its_memory(stages: int) -> None:
    """A rank holds the share of activations that the schedule declares, plus at most six."""
    for name in v_names():
        schedule = build(name, stages, 2 * stages + 3, 2)
        check(schedule)
        held = max(in_flight(schedule, rank) for rank in range(stages))
        assert held <= 2 * stages * (1 - rule(name).idle if rule(name).idle > 1 / 6 else 1) + 6


def test_a_v_of_unknown_distances_is_refused() -> None:
    for name in ("v:9,9,9,9", "v:", "v:1,1", "v:1,1,1,x"):
        with pytest.raises(LayoutError, match="is not a schedule"):
            build(name, 4, 8, 2)
