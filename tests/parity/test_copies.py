"""Hybrid sharding (HSDP): several copies of the weights, each sharded over neighbouring replicas.

test_engines.py compares the training of such runs with other runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from frontier_llm.topology.plan import plan_problems
from frontier_llm.training.guard import ReplicaCheck, ReplicaDrift
from frontier_llm.training.step import train_step
from tests.harness.pool import RankPool
from tests.parity.cases import Case
from tests.parity.test_engines import KINDS, LAYOUTS, build, config_of, gathered, resume, save_and_go_on

COPIES = Case("gpt", dp=4, settings=("parallel.data_shard=2",))


@pytest.mark.thorough
def test_a_checkpoint_of_copies_is_that_of_one(ranks: RankPool, tmp_path: Path) -> None:
    """Two of four replicas together hold all state, so there are two copies.

    Only one copy is written, and all replicas read it.
    """
    written = ranks.run(4, save_and_go_on, COPIES, "fsdp", tmp_path)
    for engine, reader in (("native", LAYOUTS["native"]), ("fsdp", COPIES)):
        loaded = ranks.run(4, resume, reader, engine, tmp_path)
        for kind in KINDS:
            expected = gathered(written, kind)
            found = gathered(loaded, kind)
            assert all(np.array_equal(found[name], expected[name]) for name in expected)
        assert loaded[0].losses[0] == pytest.approx(written[0].losses[2], rel=2e-3)


def flipped(rank: int, case: Case) -> list[str]:
    """Return the problems that the replica check reports after one bit of rank 1's shard is flipped."""
    state = build(rank, case, "fsdp", "bf16")
    train_step(state)
    check = ReplicaCheck(state.optimizer, state.mesh)
    check.check(1, state.mesh.world)
    if rank == 1:
        state.optimizer.state()[-1].tensors["exp_avg"].view(torch.int32).view(-1)[0] ^= 1
    with pytest.raises(ReplicaDrift) as raised:
        check.check(2, state.mesh.world)
    return [str(problem) for problem in raised.value.problems]


@pytest.mark.thorough
def test_a_copy_that_has_drifted_is_found(ranks: RankPool) -> None:
    """Replicas 0 and 1 together hold one copy of the state, and replicas 2 and 3 hold another. The shards of the two
    copies can be compared.
    """
    for problems in ranks.run(4, flipped, COPIES):
        assert "exp_avg of " in problems[0] and "dp ranks [1, 3] differ" in problems[0]


def test_what_cannot_be_shared_out_is_refused_with_what_can(ranks: RankPool) -> None:
    config = config_of(Case("gpt", dp=4, settings=("parallel.data_shard=3",)), "fsdp", "fp32")
    assert [problem.fix for problem in plan_problems(config, 4)] == ["use one of [1, 2, 4]"]
    config = COPIES.config()
    assert "parallel.data_mode=fsdp" in plan_problems(config, 4)[0].fix
    config = config_of(Case("gpt", pp=2, dp=2, settings=("parallel.data_shard=2",)), "fsdp", "fp32")
    assert "microbatches" in plan_problems(config, 4)[0].what
