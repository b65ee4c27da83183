"""Builds records of starts of the ranks, and checks the supervisor's decisions after them, for tables of tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from frontier_llm.cluster.decide import History, Now, decide
from frontier_llm.run.job import Job
from frontier_llm.run.run_dir import Attempt

JOB = Job(run_dir="/run", words=("run.yaml",), site="local", nodes=2, spares=1, warning_s=120.0)
NODES = ("n0", "n1", "n2")
NOW = Now(unix_s=1_000_000.0, nodes=NODES, time_left_s=7200.0)
NEW = History(target_step=100)
FIRST_TWO = ("n0", "n1")
WITHOUT_N1 = ("n0", "n2")


def made(
    cause: str, start_step: int = 0, end_step: int = 0, *, hours: float = 1.0, exit_code: int = 1, **fields: Any
) -> Attempt:
    """Return a start of the ranks on n0 and n1 that ends now."""
    values = {
        "incarnation": 1,
        "job_id": "7",
        "nodes": FIRST_TWO,
        "started_unix_s": NOW.unix_s - 3600 * hours,
        "ended_unix_s": NOW.unix_s,
        **fields,
    }
    return Attempt(start_step=start_step, end_step=end_step, exit_code=exit_code, cause=cause, **values)


def after(*attempts: Attempt, own: int = 1, history: History = NEW) -> History:
    """Return the history with these starts. The last `own` of them belong to this supervisor."""
    for number, attempt in enumerate(attempts):
        history = history.after(attempt, attempt.end_step, is_own=number >= len(attempts) - own)
    return history


def failed_start(cause: str = "crash", **fields: Any) -> Attempt:
    """Return a start that ended after half an hour, before its first step."""
    return made(cause, 5, 5, hours=0.5, last_step=5, **fields)


def out_of_memory(plan: tuple[str, ...]) -> Attempt:
    """Return a start that was out of memory in the step after the newest checkpoint."""
    return made("out of memory", 5, 5, plan=plan)


NO_PROGRESS = [made("crash", 5, 5)] * 3
STOPPED_EARLY = [made("interrupted", 5, 5, exit_code=75)] * 3
NEVER = replace(JOB, continuation="never")
SUCCESSOR = replace(JOB, continuation="successor")
BUDGET = replace(JOB, max_node_hours=12.0)
OWN_PLAN = ("parallel.tensor=2",)
ROOMY_PLAN = ("parallel.tensor=8",)
TWO_PLANS = replace(JOB, plans=(OWN_PLAN, ROOMY_PLAN))

# (behaviour, job, history, now, class of the decision, expected fields)
Row = tuple[str, Job, History, Now, type, dict[str, Any]]


def table_test(rows: list[Row]) -> Callable[[Row], None]:
    """Return a test with one case per row, which compares the decision with the row's class and fields."""

    @pytest.mark.parametrize("row", [pytest.param(row, id=row[0]) for row in rows])
    def test_decision(row: Row) -> None:
        check_decision(row)

    return test_decision


def check_decision(row: Row) -> None:
    """Compare the decision with the row's class and fields. A text need only be a part of the field."""
    _, job, history, now, kind, expected = row
    decision = decide(job, history, now)
    assert type(decision) is kind, decision
    for name, value in expected.items():
        found = getattr(decision, name)
        if isinstance(value, str):
            assert value in str(found)
        else:
            assert found == (pytest.approx(value) if isinstance(value, float) else value), name
