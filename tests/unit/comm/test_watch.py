"""Tests the information after a failure of communication: the failed call, how long calls blocked, and the last
calls.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from frontier_llm.comm import Ledger, all_reduce_, barrier, build_mesh, start_all_reduce_
from frontier_llm.comm.group import listed
from frontier_llm.comm.ledger import Histogram
from frontier_llm.config import CommConfig
from frontier_llm.errors import RankFailure
from frontier_llm.topology.grid import Grid
from tests.harness.pool import RankPool, wait_for_file


def _message_never_sent(rank: int, told: str) -> str:
    channel = build_mesh(Grid(1, 3, 1), rank, timeout_s=3.0, comm=CommConfig(transport="torch")).channels["forward"]
    assert channel.group is not None
    if rank != 1:
        wait_for_file(told)
        return ""
    with pytest.raises(RankFailure) as caught:
        channel.group.receive(torch.zeros(1), 0).wait()
    Path(told).touch()
    return str(caught.value)


def test_a_message_names_its_peer(ranks: RankPool, tmp_path: Path) -> None:
    message = ranks.run(3, _message_never_sent, str(tmp_path / "told"))[1]
    assert (
        "recv on axis pp.forward, rank 1 (global rank 1) with rank 0 of axis pp.forward (global rank 0), failed"
        in message
    )


def _own_timeouts(rank: int, transport: str, told: str) -> tuple[str, str]:
    """Ranks 1 and 2 do not join the collective on dp, whose time-out is short. The time-out of tp is never reached."""
    mesh = build_mesh(
        Grid(1, 1, 3),
        rank,
        timeout_s=30.0,
        comm=CommConfig(transport=transport, timeouts_s={"dp": 0.5, "tp": 3600.0, "pp": None}),
    )  # type: ignore[arg-type]
    barrier(mesh.world)
    if rank:
        wait_for_file(told)
        return "", ""
    with pytest.raises(RankFailure) as caught:
        all_reduce_(torch.ones(4), mesh.dp)
    Path(told).touch()
    return str(caught.value), mesh.ledger.last()


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_each_axis_has_its_own_time_out_and_shared_memory_names_all_who_are_missing(
    ranks: RankPool, transport: str, tmp_path: Path
) -> None:
    message, last = ranks.run(3, _own_timeouts, transport, str(tmp_path / "told"))[0]
    assert "all_reduce" in message and "on axis dp, rank 0 (global rank 0) among global ranks 0, 1, 2 (3)" in message
    assert transport == "torch" or "rank 1 of axis dp (global rank 1), rank 2 of axis dp (global rank 2)" in message
    assert last == "dp all_reduce number 1, unfinished"


def test_many_ranks_are_listed_in_short() -> None:
    assert listed(range(0, 3072, 8)) == "global ranks 0, 8, 16 … 3064 (384)"


def _dump(rank: int, folder: str) -> None:
    axis = build_mesh(Grid(2, 1, 1), rank, timeout_s=30.0).tp
    for _ in range(600):
        all_reduce_(torch.ones(3), axis)
    pending = start_all_reduce_(torch.ones(5), axis)
    axis.ledger.dump(Path(folder) / f"rank{rank}.json", "a test")
    pending.wait()


def test_the_flight_record_shows_the_unfinished_call_last(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _dump, str(tmp_path))
    for rank in range(2):
        record = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert record["reason"] == "a test" and len(record["calls"]) == 512
        last = record["calls"][-1]
        assert (last["axis"], last["operation"], last["number"], last["bytes"], last["finished"]) == (
            "tp",
            "all_reduce",
            601,
            20,
            False,
        )
        assert all(call["finished"] for call in record["calls"][:-1])


def test_histogram_quantiles_are_bin_edges() -> None:
    histogram = Histogram()
    assert histogram.quantile_us(0.5) == 0
    for us in (0.5, 3, 3, 3, 3, 3, 3, 3, 3, 1000):
        histogram.add(us * 1e-6)
    assert histogram.quantile_us(0.5) == 4 and histogram.quantile_us(0.95) == 1024 and histogram.quantile_us(0.1) == 1


def test_the_summary_says_what_each_axis_waited_for() -> None:
    ledger = Ledger()
    for _ in range(3):
        with ledger.blocked(ledger.add("dp", "all_reduce", 8)):
            time.sleep(0.002)
    row = ledger.summary()["dp all_reduce"]
    assert (row["calls"], row["bytes"], sum(row["bins"])) == (3, 24, 3)
    assert row["blocked_s"] >= 0.006 and row["p99_us"] >= row["p50_us"] >= 2048


def test_the_latency_of_an_axis_is_that_of_all_its_operations() -> None:
    ledger = Ledger()
    for operation, us in (("all_reduce", 3), ("all_reduce", 3), ("all_gather", 3), ("all_gather", 1000)):
        ledger.latency["dp", operation].add(us * 1e-6)
    ledger.latency["tp", "all_reduce"].add(100e-6)
    dp = {"calls": 4, "p50_us": 4, "p99_us": 1024}
    tp = {"calls": 1, "p50_us": 128, "p99_us": 128}
    assert ledger.latency_by_axis() == {"dp": dp, "tp": tp}


def test_nested_calls_have_latencies_of_their_own_but_block_once() -> None:
    ledger = Ledger()
    outer = ledger.add("dp", "all_reduce", 8)
    with ledger.blocked(outer):
        for _ in range(2):
            with ledger.blocked(ledger.add("dp.rail", "send", 4)):
                time.sleep(0.01)
    assert sum(ledger.blocked_s.values()) == pytest.approx(outer.blocked_s)
    assert (
        sum(ledger.latency["dp.rail", "send"].bins) == 2
        and ledger.latency["dp", "all_reduce"].quantile_us(0.5) >= 16_384
    )


def test_a_failed_call_stays_unfinished() -> None:
    ledger = Ledger()
    call = ledger.add("tp", "all_gather", 8)
    with pytest.raises(RankFailure), ledger.blocked(call):
        raise RankFailure("gone")
    assert not call.finished and not ledger.latency["tp", "all_gather"].quantile_us(1.0)
