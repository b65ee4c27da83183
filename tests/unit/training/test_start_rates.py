"""Tests which nodes the measurement before the first step reports as slow. Most tests replace the measured times by
given times.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch

from frontier_llm import failpoints
from frontier_llm.comm import build_mesh
from frontier_llm.config import GuardConfig
from frontier_llm.errors import RankFailure
from frontier_llm.run.failure import Failure
from frontier_llm.run.launchers import RankEnv
from frontier_llm.topology.grid import Grid
from frontier_llm.training import start_rates
from frontier_llm.training.start_rates import (
    MEASURES,
    SLOW_BELOW,
    RankTimes,
    check_rates,
    judge_rates,
    pair_rounds,
    slow_nodes,
    summary,
)
from tests.harness import cgroups
from tests.harness.pool import RankPool

RANKS_PER_NODE = 2
HEALTHY = (1.0, 1.0, 1.0, 1.0)


def times(changed: dict[int, tuple[float | None, ...]], nodes: int = 5) -> list[RankTimes]:
    """Return the times of all ranks. `changed` has the times of single ranks."""
    ranks = range(nodes * RANKS_PER_NODE)
    return [RankTimes(f"n{rank // RANKS_PER_NODE}", changed.get(rank, HEALTHY)) for rank in ranks]


@pytest.mark.parametrize("number", range(len(MEASURES)))
def test_one_slow_rank_makes_its_node_slow_in_each_measure(number: int) -> None:
    seconds = list(HEALTHY)
    seconds[number] = 1.25
    found = slow_nodes(times({3: tuple(seconds)}))
    assert [(host, node.rank, node.measure, node.rate) for host, node in found.items()] == [
        ("n1", 3, MEASURES[number], 0.8)
    ]
    failure = judge_rates(found, {f"n{number}" for number in range(5)})
    assert failure is not None and failure.cause == "node failure" and failure.host_suspect
    assert (failure.rank, failure.host, failure.excluded_hosts) == (3, "n1", ("n1",))
    assert f"n1 reaches 0.80 of the median rate: its {MEASURES[number]} takes 1.25 s (rank 3)" in failure.what
    assert "n1 has 0.80 of its rate" in summary(times({3: tuple(seconds)}))[number]


def test_a_rate_of_nine_tenths_is_healthy() -> None:
    assert slow_nodes(times({3: (1 / 0.901,) * 4})) == {}
    assert list(slow_nodes(times({3: (1 / 0.899,) * 4}))) == ["n1"]


def test_a_measure_that_no_rank_has_made_is_left_out() -> None:
    ranks = dict.fromkeys(range(10), (1.0, 1.0, None, None))
    assert slow_nodes(times({**ranks, 0: (2.0, 1.0, None, None)})).keys() == {"n0"}
    assert len(summary(times(ranks))) == 2


def test_half_of_the_nodes_are_not_excluded(capsys: pytest.CaptureFixture[str]) -> None:
    found = slow_nodes(times({0: (1.6, *HEALTHY[1:]), 2: (1.0, 1.6, *HEALTHY[2:])}, nodes=4))
    assert set(found) == {"n0", "n1"} and judge_rates(found, {"n0", "n1", "n2", "n3"}) is None
    assert "2 of 4 nodes are slower than the others" in capsys.readouterr().err


@pytest.mark.parametrize(("nodes", "rounds"), [(1, 0), (2, 1), (3, 3), (4, 2), (7, 3), (384, 2)])
def test_each_node_meets_both_neighbours_and_only_a_slow_node_is_slow_in_all_rounds(nodes: int, rounds: int) -> None:
    found = pair_rounds(nodes)
    assert len(found) == rounds
    assert all(pairs[pairs[node]] == node for pairs in found for node in pairs)
    for node in range(nodes if nodes > 1 else 0):
        partners = {pairs[node] for pairs in found if node in pairs}
        assert partners == {(node + 1) % nodes, (node - 1) % nodes}


def test_only_large_jobs_are_measured_by_default() -> None:
    assert [start_rates._is_wanted(GuardConfig(), nodes) for nodes in (15, 16)] == [False, True]
    assert start_rates._is_wanted(GuardConfig(start_rates=True), 1)
    assert not start_rates._is_wanted(GuardConfig(start_rates=False), 384)


def _place(rank: int, per_node: int) -> RankEnv:
    local = rank % per_node
    return RankEnv(rank, 4, local, per_node, f"n{rank // per_node}", "127.0.0.1", 1, "local")


def _measured_on(rank: int) -> tuple[list[int], list[tuple[str, Failure]], str]:
    """Measure as two nodes of two ranks, and then as four nodes, of which the third node takes twice the time."""
    mesh = build_mesh(Grid(1, 1, 4), rank)
    device = torch.device("cpu")
    measured = start_rates._measure(_place(rank, 2), mesh, device)
    counts = [sum(seconds is not None and seconds > 0 for seconds in one.seconds) for one in measured]
    recorded: list[Failure] = []
    os.environ["SLURMD_NODENAME"] = f"n{rank}"
    failpoints.arm(f"start.rates%=fill:{2 if rank == 2 else 1}")
    try:
        check_rates(GuardConfig(start_rates=True), _place(rank, 1), mesh, device, recorded.append)
    except RankFailure as error:
        return counts, [(failure.host, failure) for failure in recorded], str(error)
    finally:
        failpoints.arm("")
        del os.environ["SLURMD_NODENAME"]
    return counts, [], "no error"


def test_real_ranks_measure_all_and_end_the_start_if_a_node_is_slow(ranks: RankPool) -> None:
    results = ranks.run(4, _measured_on)
    assert [counts for counts, _, _ in results] == [[4, 4, 4, 4]] * 4
    assert [[host for host, _ in recorded] for _, recorded, _ in results] == [["n2"], [], [], []]
    for _, _, error in results:
        assert "n2 reaches 0.50 of the median rate" in error and "guard.start_rates=false" in error


def _measured_with_a_limit(rank: int, share: float | None) -> list[RankTimes]:
    """Measure as four nodes. The third may use `share` of a core. None: no limit."""
    mesh = build_mesh(Grid(1, 1, 4), rank)
    os.environ["SLURMD_NODENAME"] = f"n{rank}"
    limit = cgroups.cpu_limited(share) if rank == 2 and share is not None else nullcontext()
    try:
        with limit:
            return start_rates._measure(_place(rank, 1), mesh, torch.device("cpu"))
    finally:
        del os.environ["SLURMD_NODENAME"]


def test_a_node_that_a_cgroup_slows_down_is_found(ranks: RankPool) -> None:
    """The limit is a twentieth of a core, which is less than a busy machine leaves to each of the other ranks."""
    if reason := cgroups.why_unavailable():
        pytest.skip(reason)
    measured = ranks.run(4, _measured_with_a_limit, 0.05)[0]
    products = [one.seconds[0] for one in measured]
    assert products[2] == max(products), summary(measured)
    found = slow_nodes([RankTimes(one.host, (one.seconds[0], None, None, None)) for one in measured])
    assert found["n2"].rate < SLOW_BELOW, summary(measured)
    failure = judge_rates({"n2": found["n2"]}, {"n0", "n1", "n2", "n3"})
    assert failure is not None and failure.excluded_hosts == ("n2",) and "its matrix product" in failure.what
