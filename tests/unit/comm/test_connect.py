"""A failed rendezvous reports the rank, its host, the address that it used, and what to check."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from frontier_llm.comm import Meeting, connect, disconnect
from frontier_llm.errors import BackendError, RankFailure
from frontier_llm.run.job_secret import JobSecret
from frontier_llm.run.launchers import RankEnv, free_port
from tests.harness.pool import RankPool


@pytest.fixture(autouse=True)
def _left() -> object:
    yield
    disconnect()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stays_alone_names_itself_its_host_and_the_address(rank: int) -> None:
    port = free_port()
    expected = (
        f"rank {rank} of 2 on {socket.gethostname()} could not join the rendezvous at 127.0.0.1:{port} within 1 s"
    )
    with pytest.raises(RankFailure, match=re.escape(expected)) as caught:
        connect(rank, 2, Meeting("127.0.0.1", port, 0, 2), "gloo", timeout_s=1.0)
    assert "check that every rank started" in str(caught.value)
    assert not dist.is_initialized()


def test_a_back_end_that_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    with pytest.raises(BackendError, match="this torch was built without nccl"):
        connect(0, 1, Meeting("127.0.0.1", free_port(), 0, 1), "nccl", timeout_s=60.0)


def _meets_by_a_file(rank: int, port: int, folder: str) -> tuple[float, bool]:
    dist.barrier()
    dist.destroy_process_group()  # leave the rank pool's own process group
    secret = JobSecret(RankEnv(rank, 2, 0, 1, f"n{rank}", "127.0.0.1", port, "torchrun"), Path(folder))
    connect(rank, 2, Meeting("127.0.0.1", port, rank, 1, secret), "gloo", 30.0)
    total = torch.tensor([10.0**rank])
    dist.all_reduce(total)
    stale = secret() == b"of an earlier start"
    disconnect()
    return total.item(), stale


def test_ranks_of_two_nodes_that_nobody_gave_a_secret_find_one_in_the_run_directory(
    ranks: RankPool, tmp_path: Path
) -> None:
    port = free_port()
    left = tmp_path / f".rendezvous-{port}"
    left.write_bytes(b"of an earlier start")
    left.chmod(0o600)
    assert ranks.run(2, _meets_by_a_file, port, str(tmp_path)) == [(11.0, False)] * 2
