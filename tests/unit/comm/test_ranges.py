"""Ranges for a profiler: the names that they have, and that a step without a profiler executes no code for ranges."""

from __future__ import annotations

import pytest
import torch

from frontier_llm.comm import DONE, Axis, all_reduce_, ranges
from frontier_llm.comm.ledger import Ledger
from frontier_llm.schedule import Action, Kind


class Group:
    def start_all_reduce_(self, x, op):
        return DONE


@pytest.fixture
def events(monkeypatch):
    """Return the ranges' begins and ends, in order. No profiler listens at first."""
    for variable in ranges.LISTENERS:
        monkeypatch.delenv(variable, raising=False)
    found: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", found.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: found.append("end"))
    return found


def run_one_of_each(events):
    """Run an all-reduce and a forward, and return the ledger and the forward's function."""
    ledger = ranges.new_ledger()
    all_reduce_(torch.zeros(3), Axis("dp", 0, 2, (0, 1), Group(), ledger))
    runs = ranges.in_ranges({Kind.FORWARD: lambda action: events.append("runs")})
    runs[Kind.FORWARD](Action(Kind.FORWARD, 3, 1))
    return ledger, runs


@pytest.mark.parametrize("variable", list(ranges.LISTENERS))
def test_a_profiler_gets_actions_and_collectives_by_name(events, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    ledger, _ = run_one_of_each(events)
    assert events == [
        "dp all_reduce 1, 12 bytes",
        "end",
        "wait for dp all_reduce 1, 12 bytes",
        "end",
        "forward of microbatch 3, virtual stage 1",
        "runs",
        "end",
    ]
    assert ledger.calls["dp", "all_reduce"] == 1 and ledger.latency["dp", "all_reduce"].quantile_us(1.0) > 0


def test_without_a_profiler_the_step_has_the_plain_code(events, monkeypatch):
    """Ranges then cost no instruction: neither class nor function differs from that of a package without ranges."""
    monkeypatch.setenv("ROCPROF_MARKER_API_TRACE", "0")
    ledger, runs = run_one_of_each(events)
    assert events == ["runs"] and type(ledger) is Ledger
    assert ranges.in_ranges(runs) is runs


def test_a_range_ends_if_its_collective_fails(events, monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    monkeypatch.setattr(Group, "start_all_reduce_", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_one_of_each(events)
    assert events == ["dp all_reduce 1, 12 bytes", "end"]
