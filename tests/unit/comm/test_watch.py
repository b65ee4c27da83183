"""What is known when something goes wrong: who is behind, how long calls blocked, and the last calls."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from frontier_llm.comm import Axis, Ledger, all_gather, all_reduce_, barrier, build_mesh, start_all_reduce_
from frontier_llm.comm.group import CLOSED_S, EXPLAIN_S, TorchGroup, listed
from frontier_llm.comm.ledger import Histogram
from frontier_llm.errors import RankFailure
from frontier_llm.topology import Grid
from tests.harness.pool import RankPool


def _sockets(rank: int, size: int, timeout_s: float) -> Axis:
    return build_mesh(Grid(size, 1, 1), rank, timeout_s=timeout_s, transport="torch").tp


def _never_come(rank: int) -> str:
    axis = _sockets(rank, 2, timeout_s=3.0)
    if rank == 1:
        time.sleep(10.0)
        return ""
    with pytest.raises(RankFailure) as caught:
        all_gather(torch.ones(4), axis)
    return str(caught.value)


def test_a_rank_that_says_nothing_is_named(ranks: RankPool) -> None:
    message = ranks.run(2, _never_come)[0]
    assert "all_gather number 1 on axis tp, rank 0" in message
    assert "no word from rank 1 of axis tp (global rank 1)" in message


class _NobodyElse:
    """A store in which only this rank writes, and a clock that only its questions move."""

    now_s = 0.0

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return False

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("words", "wait_s"), [("Connection closed by peer [127.0.0.1]:4", CLOSED_S), ("Timed out waiting 3000ms for recv", EXPLAIN_S)]
)
def test_a_dead_peer_is_not_asked_for_long(words: str, wait_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_backend", lambda _: "gloo")
    monkeypatch.setattr("frontier_llm.comm.group.time", store := _NobodyElse())
    failure = TorchGroup(None, (0, 1), "tp", store).explain("barrier", RuntimeError(words))  # type: ignore[arg-type]
    assert "no word from rank 1 of axis tp" in str(failure)
    assert wait_s <= store.now_s < wait_s + 0.1


def _fall_behind(rank: int) -> str:
    """Rank 1 stops one call early and answers the question of the others as a failing rank does."""
    axis = _sockets(rank, 2, timeout_s=3.0)
    assert axis.group is not None
    barrier(axis)
    if rank == 1:
        time.sleep(3.2)
        return str(axis.group.explain("barrier", RuntimeError("made up")))  # type: ignore[attr-defined]
    with pytest.raises(RankFailure) as caught:
        all_reduce_(torch.ones(4), axis)
    return str(caught.value)


def test_the_rank_whose_counter_is_behind_is_named(ranks: RankPool) -> None:
    for message in ranks.run(2, _fall_behind):
        assert "behind: rank 1 of axis tp (global rank 1), calls by rank [(0, 2), (1, 1)]" in message


def _message_never_sent(rank: int) -> str:
    """Stage 0 sends one of two messages; stage 2 has made fewer calls than either and has nothing to do with it."""
    channel = build_mesh(Grid(1, 3, 1), rank, timeout_s=3.0, transport="torch").channels["forward"]
    assert channel.group is not None
    byte = torch.zeros(1)
    if rank == 0:
        channel.group.send(byte, 1).wait()
        time.sleep(3.2)
        return str(channel.group.explain("send", RuntimeError("made up"), 1))  # type: ignore[attr-defined]
    if rank == 2:
        return ""
    channel.group.receive(byte, 0).wait()
    with pytest.raises(RankFailure) as caught:
        channel.group.receive(byte, 0).wait()
    return str(caught.value)


def test_a_message_is_the_fault_of_its_own_two_ranks(ranks: RankPool) -> None:
    for message in ranks.run(3, _message_never_sent)[:2]:
        assert "behind: rank 0 of axis pp.forward (global rank 0), calls by rank [(0, 2), (1, 3)]" in message  # one opened the channel


def _own_timeouts(rank: int, transport: str) -> tuple[str, float, str]:
    """Ranks 1 and 2 never come to the collective on dp, whose time-out is short; tp's would be long."""
    mesh = build_mesh(Grid(1, 1, 3), rank, timeout_s=30.0, transport=transport, timeouts_s={"dp": 0.5, "tp": 20.0, "pp": None})  # type: ignore[arg-type]
    barrier(mesh.world)
    if rank:
        time.sleep(5.0 if transport == "torch" else 1.5)
        return "", 0.0, ""
    begin_s = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        all_reduce_(torch.ones(4), mesh.dp)
    return str(caught.value), time.monotonic() - begin_s, mesh.ledger.last()


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_each_axis_has_its_own_time_out_and_names_all_who_are_missing(ranks: RankPool, transport: str) -> None:
    message, elapsed_s, last = ranks.run(3, _own_timeouts, transport)[0]
    assert 0.4 < elapsed_s < 10.0
    assert "all_reduce" in message and "on axis dp, rank 0 (global rank 0) among global ranks 0, 1, 2 (3)" in message
    assert "rank 1 of axis dp (global rank 1), rank 2 of axis dp (global rank 2)" in message
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
        assert (last["axis"], last["operation"], last["number"], last["bytes"], last["finished"]) == ("tp", "all_reduce", 601, 20, False)
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
    dp, tp = {"calls": 4, "p50_us": 4, "p99_us": 1024}, {"calls": 1, "p50_us": 128, "p99_us": 128}
    assert ledger.latency_by_axis() == {"dp": dp, "tp": tp}


def test_nested_calls_have_latencies_of_their_own_but_block_once() -> None:
    ledger = Ledger()
    outer = ledger.add("dp", "all_reduce", 8)
    with ledger.blocked(outer):
        for _ in range(2):
            with ledger.blocked(ledger.add("dp.rail", "send", 4)):
                time.sleep(0.01)
    assert sum(ledger.blocked_s.values()) == pytest.approx(outer.blocked_s)
    assert sum(ledger.latency["dp.rail", "send"].bins) == 2 and ledger.latency["dp", "all_reduce"].quantile_us(0.5) >= 16_384


def test_a_failed_call_stays_unfinished() -> None:
    ledger = Ledger()
    call = ledger.add("tp", "all_gather", 8)
    with pytest.raises(RankFailure), ledger.blocked(call):
        raise RankFailure("gone")
    assert not call.finished and not ledger.latency["tp", "all_gather"].quantile_us(1.0)
