"""The first communication of each group has a time limit, and its error names the group."""

from __future__ import annotations

import pytest
import torch

from frontier_llm import failpoints
from frontier_llm.comm import build_mesh
from frontier_llm.comm.warm_up import first_use
from frontier_llm.errors import RankFailure
from frontier_llm.schedule import round_robin
from frontier_llm.topology.grid import Grid
from tests.harness.pool import RankPool


def test_the_thread_works_on_this_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda index, name=name: calls.append((name, index)))
    first_use(60.0, "dp", [0, 1], torch.device("cuda"), lambda: calls.append("work"))
    assert calls == [("set_device", 5), "work", ("synchronize", 5)]


def refusal(rank: int, plant: str) -> str:
    """Return the error from building a mesh of two stages and two replicas. Rank 3 sleeps at the first use of a
    group.
    """
    failpoints.arm(plant, rank)
    try:
        build_mesh(Grid(1, 2, 2), rank, round_robin(2), timeout_s=3.0)
    except RankFailure as error:
        return str(error)
    finally:
        failpoints.arm("")
    return ""


@pytest.mark.parametrize(
    ("axis", "members"), [("dp", "global ranks 2, 3 (2)"), ("pp.backward", "global ranks 1, 3 (2)")]
)
def test_a_group_that_hangs_at_its_first_use_is_named(ranks: RankPool, axis: str, members: str) -> None:
    texts = ranks.run(4, refusal, f"comm.warm_up.{axis}@3=sleep:6")
    expected = f"the first communication of axis {axis} among {members} did not end within 3 s"
    assert expected in texts[3] and "exclude one of its nodes" in texts[3]
