"""What happens before the first communicator: the machine's variables, said with reasons; and the check of the network after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontier_llm.cluster.launchers import RankEnv
from frontier_llm.cluster.rank_env import environ
from frontier_llm.comm import serial_mesh
from frontier_llm.config import load_run
from frontier_llm.errors import BackendError
from frontier_llm.machine.env import environment
from frontier_llm.train import join

PLACE = RankEnv(8, 16, 0, 8, 1, "n1", "n0", 23456, "slurm")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (
        [variable.name for variable in environment("frontier", 2)]
        + list(join.LOG_VARIABLES)
        + ["NCCL_DEBUG_FILE", "TORCH_FR_DUMP_TEMP_FILE"]
    ):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    return monkeypatch


def test_variables_are_set_with_reasons_and_the_users_stay(clean: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    clean.setenv("NCCL_CROSS_NIC", "0")
    assert join._set_environment(load_run("bench", ["machine=frontier"]), PLACE)
    said = capfd.readouterr().err
    assert environ("FI_CXI_RDZV_PROTO") == "alt_read" and environ("NCCL_NET") == "AWS Libfabric"
    assert environ("NCCL_CROSS_NIC") == "0" and "kept NCCL_CROSS_NIC=0, which you exported, over 1" in said
    assert "FI_MR_CACHE_MONITOR (memory-registration cache" in said
    assert (environ("TORCH_FR_DUMP_TEMP_FILE") or "").endswith("/logs/flight_torch_rank_")


def test_another_name_of_a_setting_that_the_user_exported_keeps_ours_away(clean: pytest.MonkeyPatch) -> None:
    """torch 2.13 takes PYTORCH_HIP_ALLOC_CONF before PYTORCH_ALLOC_CONF: ours would silently replace the user's."""
    clean.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    join._set_environment(load_run("bench", ["machine=frontier"]), PLACE)
    assert environ("PYTORCH_HIP_ALLOC_CONF") is None
    clean.delenv("PYTORCH_ALLOC_CONF")
    join._set_environment(load_run("bench", ["machine=frontier"]), PLACE)
    assert environ("PYTORCH_HIP_ALLOC_CONF") == "max_split_size_mb:512"


def test_one_node_and_unknown_machines_forbid_nothing(clean: pytest.MonkeyPatch) -> None:
    assert not join._set_environment(load_run("bench", ["machine=frontier"]), RankEnv(0, 8, 0, 8, 0, "n0", "n0", 23456, "slurm"))
    assert not join._set_environment(load_run("bench", ["machine=frontier"]), None)


def test_a_log_that_says_socket_ends_the_run(clean: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rccl.log"
    clean.setattr(join, "_rccl_log", lambda place: str(path))
    assert join._set_environment(load_run("bench", ["machine=frontier"]), PLACE)
    path.write_text("n1:1:1 [0] NCCL INFO Using network Socket\n")
    with pytest.raises(BackendError, match="RCCL uses Socket between nodes"):
        join._check_network(serial_mesh(), PLACE)
    path.write_text("NCCL INFO NET/OFI Selected provider is cxi\nNCCL INFO Using network AWS Libfabric\n")
    join._check_network(serial_mesh(), PLACE)
    assert "collectives between nodes: AWS Libfabric" in capfd.readouterr().err and not path.exists()
    clean.setenv("NCCL_DEBUG_FILE", "/elsewhere")
    join._check_network(serial_mesh(), PLACE)
    assert "the network is not checked" in capfd.readouterr().err
