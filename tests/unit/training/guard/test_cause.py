"""Tests which rank is reported as the first that failed, from heartbeats on a simulated clock."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontier_llm.run.failure import Evidence, Failure
from frontier_llm.training.guard import cause
from frontier_llm.training.guard.cause import ANSWER_S, PATIENCE_S, Inquiry, period_s

RANKS = 4


class HeartbeatStore:
    """Stand-in for the heartbeats: each rank sends one per period until it is silent.

    A rank may be late with its next heartbeat.
    """

    outlives_rank_0 = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.silent_since: dict[int, float] = {}
        self.late: dict[int, tuple[float, float]] = {}  # rank: times between which it sends no heartbeat
        self.progress = [7.0, 7.5, 6.5, 7.5]
        self.claims: dict[str, str] = {}
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep, strftime=time.strftime)
        monkeypatch.setattr(cause, "time", clock)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def read(self, rank: int) -> dict[str, Any]:
        at_s = min(self.now_s, self.silent_since.get(rank, self.now_s))
        first_s, last_s = self.late.get(rank, (0.0, 0.0))
        at_s = first_s if first_s < at_s < last_s else at_s
        place = {"host": f"n{rank}", "step": 7, "section": "train", "collectives": 70 + rank, "call": "all_reduce"}
        return {**place, "posts": int((at_s + 0.01 * rank) / period_s(RANKS)), "progress": self.progress[rank]}

    def claim(self, name: str, value: str) -> str:
        return self.claims.setdefault(name, value)

    def claimed(self, name: str) -> str | None:
        return self.claims.get(name)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HeartbeatStore:
    return HeartbeatStore(monkeypatch)


def found(store: HeartbeatStore, tmp_path: Path, by: int = 0) -> tuple[Failure, float]:
    """Return the failure that a rank finds after an alarm, and the seconds that it took."""
    began_s = store.now_s
    own = Failure("", Evidence.SYMPTOM, rank=by, host=f"n{by}", step=7, section="train")
    inquiry = Inquiry(store, by, RANKS, tmp_path, lambda what: replace(own, what=what))  # type: ignore[arg-type]
    return inquiry.find("Connection closed by peer"), store.now_s - began_s


def test_the_only_one_without_a_sign_of_life_is_named_within_a_second(store: HeartbeatStore, tmp_path: Path) -> None:
    store.silent_since[2] = 99.9
    first, took_s = found(store, tmp_path)
    assert (first.rank, first.host) == (2, "n2") and "it died or was stopped" in first.what
    assert took_s < 1.0


def test_one_that_is_late_is_not_taken_for_the_dead(store: HeartbeatStore, tmp_path: Path) -> None:
    store.late[1], store.silent_since[2] = (99.9, 101.6), 99.9
    first, took_s = found(store, tmp_path)
    assert first.rank == 2 and 1.6 <= took_s < PATIENCE_S


def test_several_that_died_cost_no_more_than_patience(store: HeartbeatStore, tmp_path: Path) -> None:
    store.silent_since |= {2: 99.9, 3: 99.9}
    first, took_s = found(store, tmp_path)
    assert first.rank == 2 and PATIENCE_S <= took_s < PATIENCE_S + 2 * period_s(RANKS)


def test_when_all_live_the_one_furthest_behind_is_named(store: HeartbeatStore, tmp_path: Path) -> None:
    first, took_s = found(store, tmp_path)
    assert (
        first.rank == 2 and "all ranks send heartbeats, and this one is furthest behind (72 collectives" in first.what
    )
    assert took_s < 1.0


def test_a_cause_that_a_rank_tells_of_itself_wins(store: HeartbeatStore, tmp_path: Path) -> None:
    store.silent_since[2] = 99.9
    other = Inquiry(
        store,
        3,
        RANKS,
        tmp_path,
        lambda what: Failure(what, Evidence.SYMPTOM, rank=3, host="n3", step=7, section="train"),
    )  # type: ignore[arg-type]
    assert other.explain(ValueError("boom")).rank == 3
    assert found(store, tmp_path)[0].what == "ValueError: boom"


def test_a_dead_rank_0_is_named_by_another_rank_within_three_seconds(store: HeartbeatStore, tmp_path: Path) -> None:
    store.silent_since[0] = 99.9
    first, took_s = found(store, tmp_path, by=2)
    assert (first.rank, first.host) == (0, "n0") and "it died or was stopped" in first.what
    assert took_s < 3.0
    assert found(store, tmp_path, by=3)[0] == first, "the others take over what one has found"


def test_a_rank_0_that_lives_and_does_not_answer_is_replaced(store: HeartbeatStore, tmp_path: Path) -> None:
    """Rank 0 sends heartbeats, but its main thread holds the interpreter lock, so that its watchdog cannot run."""
    store.progress[0] = 1.0
    first, took_s = found(store, tmp_path, by=2)
    assert first.rank == 0 and "all ranks send heartbeats, and this one is furthest behind" in first.what
    assert took_s < ANSWER_S + PATIENCE_S


def test_of_several_ranks_one_investigates_for_a_dead_rank_0(store: HeartbeatStore, tmp_path: Path) -> None:
    store.silent_since |= {0: 99.9, 2: 99.9}
    store.claims["stand-in for rank 0"] = "2"  # rank 2 died before it had an answer
    first, _ = found(store, tmp_path, by=3)
    assert first.evidence is Evidence.SYMPTOM, "no answer: this rank's own symptom"
