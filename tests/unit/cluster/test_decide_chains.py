"""Simulated chains of jobs and starts: the supervisor's decisions alone lead a run to its end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from frontier_llm.cluster.decide import (
    Decision,
    Done,
    GiveUp,
    Now,
    Requeue,
    Start,
    decide,
)
from frontier_llm.run.run_dir import Attempt
from tests.harness.decisions import (
    JOB,
    NEW,
    NODES,
    NOW,
    made,
)


def test_months_of_a_run_are_simulated_in_a_moment() -> None:
    """The decisions alone lead a run with failures to its end. Two simulations give the same result."""

    def simulate() -> tuple[int, list[str]]:
        history = replace(NEW, target_step=3000)
        clock = NOW.unix_s
        left_s = 0.0
        jobs = 0
        kinds: list[str] = []
        while not isinstance(decision := decide(JOB, history, Now(clock, NODES, time_left_s=left_s or 43200.0)), Done):
            kinds.append(type(decision).__name__)
            if isinstance(decision, Start):
                clock += decision.wait_s + 7200.0
                left_s = max(0.0, (left_s or 43200.0) - decision.wait_s - 7200.0)
                over = left_s < 7200.0
                cause = "interrupted" if over else "crash" if len(kinds) % 5 else "node failure"
                ended = made(
                    cause,
                    history.saved_step,
                    history.saved_step + 3,
                    nodes=decision.nodes,
                    failed_host="" if over else decision.nodes[-1],
                    started_unix_s=clock - 7200.0,
                    ended_unix_s=clock,
                )
                history = history.after(ended, ended.end_step)
            else:
                assert isinstance(decision, Requeue), decision
                history = replace(history, is_own=False)
                left_s = 0.0
                jobs += 1
        return jobs, kinds

    jobs, kinds = simulate()
    assert jobs > 100 and kinds.count("Start") == 1000
    assert simulate() == (jobs, kinds)


def chain_of_starts(seed: int, good_share: float) -> Decision:
    """Return the last decision for a chain of jobs on 384 nodes. Only the share `good_share` of the starts reaches a
    step.

    A good start trains until the walltime of 12 h. Every other start fails after ten minutes.
    """
    drawn = random.Random(seed)
    job = replace(JOB, nodes=384, spares=4, failed_start_node_hours=None)
    nodes = tuple(f"n{number}" for number in range(job.all_nodes))
    history = replace(NEW, target_step=30)
    clock = NOW.unix_s
    left_s = 43200.0
    while True:
        decision = decide(job, history, Now(clock, nodes, time_left_s=left_s))
        if isinstance(decision, Requeue):
            history = replace(history, is_own=False)
            left_s = 43200.0
        elif isinstance(decision, Start):
            is_good = drawn.random() < good_share
            seconds = left_s - 120.0 if is_good else 600.0
            step = history.saved_step + is_good
            ended = Attempt(
                incarnation=1,
                job_id="7",
                nodes=decision.nodes,
                start_step=history.saved_step,
                end_step=step,
                exit_code=75 if is_good else 1,
                cause="interrupted" if is_good else "crash",
                started_unix_s=clock,
                ended_unix_s=clock + seconds,
                last_step=step,
            )
            clock += seconds
            left_s -= seconds
            history = history.after(ended, step)
        else:
            return decision


@pytest.mark.thorough
def test_chains_with_less_than_half_good_starts_reach_their_end() -> None:
    """With a limit of three failed starts in a row, nearly every one of these chains was given up."""
    ends = [chain_of_starts(seed, good_share=0.45) for seed in range(100)]
    assert [type(end) for end in ends] == [Done] * len(ends)


def test_a_chain_without_a_good_start_ends_within_its_node_hours() -> None:
    end = chain_of_starts(seed=0, good_share=0.0)
    assert isinstance(end, GiveUp)
    assert "19 starts in a row failed before their first step and used 1,216.0 node-hours" in str(end.problem)
    assert "the limit is 1,164.0" in str(end.problem)
