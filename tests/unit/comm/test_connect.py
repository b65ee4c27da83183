"""A rendezvous that fails says which rank, on which host, where it asked, and what to check."""

from __future__ import annotations

import re
import socket

import pytest
import torch.distributed as dist

from frontier_llm.cluster.launchers import free_port
from frontier_llm.comm import connect, disconnect
from frontier_llm.errors import BackendError, RankFailure


@pytest.fixture(autouse=True)
def _left() -> object:
    yield
    disconnect()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stays_alone_names_itself_its_host_and_the_address(rank: int) -> None:
    port = free_port()
    expected = f"rank {rank} of 2 on {socket.gethostname()} could not join the rendezvous at 127.0.0.1:{port} within 1 s"
    with pytest.raises(RankFailure, match=re.escape(expected)) as caught:
        connect(rank, 2, "127.0.0.1", port, "gloo", timeout_s=1.0)
    assert "check that every rank started" in str(caught.value)
    assert not dist.is_initialized()


def test_a_back_end_that_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: False)
    with pytest.raises(BackendError, match="this torch was built without nccl"):
        connect(0, 1, "127.0.0.1", free_port(), "nccl", timeout_s=1.0)
