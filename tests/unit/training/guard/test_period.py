"""Heartbeats must not overload the store of a large job."""

from __future__ import annotations

from frontier_llm.machine.env import STORE_CHECKS_PER_S
from frontier_llm.training.guard.cause import period_s


def test_a_whole_machine_posts_no_faster_than_the_store_takes() -> None:
    assert period_s(1) == period_s(3072) == 0.25
    assert 75_264 / period_s(75_264) <= STORE_CHECKS_PER_S
