"""Environment variables that are set before the first communicator, with reasons, and the network check after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from frontier_llm.comm import serial_mesh
from frontier_llm.config import RunConfig, load_run
from frontier_llm.config.load import find_file
from frontier_llm.errors import BackendError, ConfigError
from frontier_llm.machine.env import environment, rccl_log_variables
from frontier_llm.run.job_secret import VARIABLE
from frontier_llm.run.launchers import RankEnv
from frontier_llm.run.rank_env import environ
from frontier_llm.topology.rank_variables import ORIGINS
from frontier_llm.training import join

PLACE = RankEnv(8, 16, 0, 8, "n1", "n0", 23456, "slurm")


def set_environment(config: RunConfig, place: RankEnv | None = PLACE) -> bool:
    with join._known(config, place) as job:
        return join._set_environment(config, job)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    threads = torch.get_num_threads()
    for name in (
        [variable.name for variable in environment("frontier", 2)]
        + [variable.name for variable in rccl_log_variables(0)]
        + ["TORCH_FR_DUMP_TEMP_FILE", ORIGINS]
    ):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setenv(VARIABLE, os.urandom(32).hex())
    yield monkeypatch
    torch.set_num_threads(threads)


def test_variables_are_set_with_reasons_and_the_users_stay(
    clean: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clean.setenv("NCCL_CROSS_NIC", "0")
    assert set_environment(load_run("bench", ["machine=frontier"]))
    said = capfd.readouterr().err
    assert environ("FI_CXI_RDZV_PROTO") == "alt_read" and environ("NCCL_NET") == "AWS Libfabric"
    kept = "NCCL_CROSS_NIC=0 (exported before the start, instead of 1 of frontier_llm/machine/env.py: rings may"
    assert environ("NCCL_CROSS_NIC") == "0" and kept in said
    assert "FI_MR_CACHE_MONITOR=kdreg2 (frontier_llm/machine/env.py: memory-registration cache" in said
    assert (environ("TORCH_FR_DUMP_TEMP_FILE") or "").endswith("/logs/flight_torch_rank_")


def test_another_name_of_a_setting_that_the_user_exported_keeps_ours_away(clean: pytest.MonkeyPatch) -> None:
    """torch 2.13 prefers PYTORCH_HIP_ALLOC_CONF to PYTORCH_ALLOC_CONF. The package's value would silently replace the
    user's.
    """
    clean.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    set_environment(load_run("bench", ["machine=frontier"]))
    assert environ("PYTORCH_HIP_ALLOC_CONF") is None
    clean.delenv("PYTORCH_ALLOC_CONF")
    set_environment(load_run("bench", ["machine=frontier"]))
    assert environ("PYTORCH_HIP_ALLOC_CONF") == "max_split_size_mb:512"


def test_fsdp_keeps_its_queues(clean: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """With one queue FSDP's gathers would wait behind the compute that they should overlap."""
    for setting, value in (("parallel.data_mode=zero", "1"), ("parallel.data_mode=fsdp", None)):
        clean.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        set_environment(load_run("bench", ["machine=h200", setting]))
        assert environ("CUDA_DEVICE_MAX_CONNECTIONS") == value
    clean.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    set_environment(load_run("bench", ["machine=h200", "parallel.data_mode=fsdp"]))
    assert environ("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and "cannot overlap with compute" in capfd.readouterr().err


def test_threads_are_those_that_are_claimed(clean: pytest.MonkeyPatch) -> None:
    """torch reads OMP_NUM_THREADS only when it is imported."""
    torch.set_num_threads(3)
    set_environment(load_run("bench", ["machine=frontier"]))
    assert (environ("OMP_NUM_THREADS"), torch.get_num_threads()) == ("7", 7)
    clean.setenv("OMP_NUM_THREADS", "2")  # set by the user and read by torch itself
    set_environment(load_run("bench", ["machine=frontier"]))
    assert torch.get_num_threads() == 7


def test_a_machine_file_of_ones_own_has_the_environment_of_its_base_or_is_refused(
    clean: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (find_file("frontier", "machines")).read_text()
    for name, content in (
        ("based", "base: frontier\n"),
        ("named", f"environment: frontier\n{text}"),
        ("unknown", text),
    ):
        (tmp_path / f"{name}.yaml").write_text(content)
    for name in ("based", "named"):
        clean.delenv("HSA_FORCE_FINE_GRAIN_PCIE", raising=False)
        assert set_environment(load_run("bench", [f"machine={tmp_path}/{name}.yaml"]))
        assert environ("HSA_FORCE_FINE_GRAIN_PCIE") == "1"
    with pytest.raises(
        ConfigError, match=r"no environment is known for machine 'unknown'[\s\S]*`environment:`[\s\S]*frontier"
    ):
        set_environment(load_run("bench", [f"machine={tmp_path}/unknown.yaml"]))


def test_one_node_and_one_process_forbid_nothing(clean: pytest.MonkeyPatch) -> None:
    assert not set_environment(load_run("bench", ["machine=frontier"]), RankEnv(0, 8, 0, 8, "n0", "n0", 23456, "slurm"))
    assert not set_environment(load_run("bench", ["machine=frontier"]), None)


def test_a_log_that_says_socket_ends_the_run(clean: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    config = load_run("bench", ["machine=frontier"])
    with join._known(config, PLACE) as job:
        assert job is not None and join._set_environment(config, job)
        path = Path(environ("NCCL_DEBUG_FILE") or "")
        assert path.parent == job.folder == Path(environ("MIOPEN_USER_DB_PATH") or "").parent
        path.write_text("n1:1:1 [0] NCCL INFO Using network Socket\n")
        with pytest.raises(BackendError, match="RCCL uses Socket between nodes"):
            join._check_network(serial_mesh(), job)
        path.write_text("NCCL INFO NET/OFI Selected provider is cxi\nNCCL INFO Using network AWS Libfabric\n")
        join._check_network(serial_mesh(), job)
        assert "network of the collectives between nodes: AWS Libfabric" in capfd.readouterr().err and not path.exists()
        clean.setenv("NCCL_DEBUG_FILE", "/elsewhere")
        join._check_network(serial_mesh(), job)
        assert "the network is not checked" in capfd.readouterr().err
    assert not job.folder.exists()


@pytest.mark.parametrize(
    ("value", "kind", "is_said"),
    [
        ("auto", "torch", False),
        ("torch", "torch", False),
        ("direct", "torch", True),
        ("node", "torch", True),
        ("authenticated", "authenticated", False),
    ],
)
def test_each_value_of_comm_store_names_a_store(
    value: str, kind: str, is_said: bool, clean: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The values direct and node of earlier versions are read as auto, with a notice."""
    config = load_run("bench", [f"comm.store={value}", f"train.run_dir={tmp_path}"])
    with join._known(config, PLACE) as job:
        assert job is not None
        join._start_store(config, job)
        assert join._meeting(config, job).store == kind
    assert (f"comm.store={value} is an old value that now means auto" in capfd.readouterr().err) == is_said
