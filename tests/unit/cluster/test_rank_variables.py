"""Variables of the ranks are set before torch is imported, with their origin. A user's value has precedence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_llm.cluster.attempt import job_step, run_step
from frontier_llm.cluster.batch import BatchRun
from frontier_llm.cluster.site_variables import expected_settings
from frontier_llm.cluster.sites import load_site
from frontier_llm.cluster.slurm import Allocation
from frontier_llm.config import load_run
from frontier_llm.machine.env import EXPORTED, THIS_FILE, Variable, environment, resolve
from frontier_llm.run.job import Job
from frontier_llm.run.job_secret import VARIABLE, folder_of
from frontier_llm.run.rank_env import with_this_package
from frontier_llm.topology.rank_variables import MODULE_NAMES, ORIGINS, USER_NAMES

# Python imports this module first. When torch is imported, this module prints the environment as the C library sees it,
# and ends the process.
WATCH = """
import ctypes, json, os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            getenv = ctypes.CDLL(None).getenv
            getenv.restype = ctypes.c_char_p
            seen = {name: (getenv(name.encode()) or b"").decode() for name in os.environ}
            os.write(1, json.dumps(seen).encode())
            os._exit(0)
sys.meta_path.insert(0, Watch())
"""
SRUN = """#!{python}
import json, os, pathlib
pathlib.Path("{folder}/environment.json").write_text(json.dumps(dict(os.environ)))
"""
PLACE = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_NODEID": "1",
    "MASTER_ADDR": "127.0.0.1",
}
COMMANDS = {
    "train": ["train", "quickstart", "machine=frontier"],
    "bench step": ["bench", "step", "quickstart", "machine=frontier"],
    "bench comm": ["bench", "comm", "quickstart", "machine=frontier"],
    "hang test": ["bench", "comm", "quickstart", "machine=frontier", "--hang-test", "--mode", "many"],
    "calibrate": ["calibrate", "quickstart", "machine=frontier", "--output", "x.yaml"],
}


def at_import_of_torch(tmp_path: Path, words: list[str], **variables: str) -> dict[str, str]:
    """Return a rank's environment at the import of torch."""
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    env = with_this_package({"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), **PLACE, **variables})
    command = [sys.executable, "-m", "frontier_llm.cli.main", *words, f"train.run_dir={tmp_path}/run"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("{"), done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_rank_has_its_variables_when_torch_is_imported(name: str, tmp_path: Path) -> None:
    secret = os.urandom(32).hex()
    exported = {"NCCL_CROSS_NIC": "0", VARIABLE: secret}
    seen = at_import_of_torch(tmp_path, COMMANDS[name], SLURM_PROCID="9", SLURM_LOCALID="1", **exported)
    folder = str(folder_of(secret.encode()))
    wanted = {variable.name: variable.on_rank(folder, 1).value for variable in environment("frontier", 2)}
    assert len(wanted) > 20 and wanted["MIOPEN_USER_DB_PATH"].endswith("/miopen-1")
    assert {name: seen.get(name) for name in wanted} == {**wanted, "NCCL_CROSS_NIC": "0"}
    assert seen["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/run/logs/flight_torch_rank_"
    assert "NCCL_DEBUG" not in seen


def test_one_rank_of_a_node_logs_its_network_from_the_start(tmp_path: Path) -> None:
    secret = os.urandom(32).hex()
    seen = at_import_of_torch(tmp_path, COMMANDS["train"], SLURM_PROCID="8", SLURM_LOCALID="0", **{VARIABLE: secret})
    assert (seen["NCCL_DEBUG"], seen["NCCL_DEBUG_FILE"]) == ("INFO", f"{folder_of(secret.encode())}/rccl-8.log")


def test_without_a_secret_only_what_needs_the_private_folder_waits(tmp_path: Path) -> None:
    """Under torchrun and mpirun, rank 0 has not written the secret yet."""
    seen = at_import_of_torch(tmp_path, COMMANDS["train"], SLURM_PROCID="8", SLURM_LOCALID="0")
    names = {variable.name for variable in environment("frontier", 2)}
    assert names - seen.keys() == {"MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"}


def step_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus_per_task: int = 7) -> dict[str, str]:
    """Return the environment that the supervisor gives to srun for two nodes of Frontier."""
    srun = tmp_path / "srun"
    srun.write_text(SRUN.format(python=sys.executable, folder=tmp_path))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("frontier_llm.cluster.attempt.master_address", lambda step: "127.0.0.1")
    config = load_run("train_small", ["machine=frontier", f"train.run_dir={tmp_path}/run"])
    allocation = Allocation("7", ("n0", "n1"), "n0", 8, cpus_per_task)
    job = Job(run_dir=str(tmp_path / "run"), words=("x",), site="frontier", nodes=2, warning_s=60.0)
    run = BatchRun(job=job, config=config, site=load_site("frontier"), allocation=allocation)
    assert run_step(job_step(run, allocation.nodes, tmp_path / "logs", {}, 60.0)).exit_code == 0
    return json.loads((tmp_path / "environment.json").read_text())


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    names = [variable.name for variable in environment("frontier", 2)]
    for name in [*names, "TORCH_FR_DUMP_TEMP_FILE", ORIGINS, USER_NAMES, MODULE_NAMES]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_supervisor_exports_the_variables_to_the_step_with_their_origins(
    tmp_path: Path, clean: pytest.MonkeyPatch
) -> None:
    clean.setenv("NCCL_CROSS_NIC", "0")
    clean.setenv("FI_CXI_DEFAULT_TX_SIZE", "1024")
    clean.setenv("LD_LIBRARY_PATH", "/site/lib")
    clean.setenv(USER_NAMES, "NCCL_CROSS_NIC")
    clean.setenv(MODULE_NAMES, "FI_CXI_DEFAULT_TX_SIZE NCCL_CROSS_NIC")
    seen = step_environment(tmp_path, clean, cpus_per_task=5)
    for variable in environment("frontier", 2):
        if not variable.differs_by_rank:
            changed = {"NCCL_CROSS_NIC": "0", "FI_CXI_DEFAULT_TX_SIZE": "1024", "OMP_NUM_THREADS": "5"}
            assert seen[variable.name] == changed.get(variable.name, variable.value)
    assert "MIOPEN_USER_DB_PATH" not in seen
    origins = json.loads(seen[ORIGINS])
    expected = {
        "NCCL_CROSS_NIC": "you",
        "FI_CXI_DEFAULT_TX_SIZE": "a module",
        "LD_LIBRARY_PATH": "slurm/sites/frontier.yaml",
        "OMP_NUM_THREADS": "sbatch --cpus-per-task",
        "NCCL_NET": THIS_FILE,
    }
    assert {name: origins[name] for name in expected} == expected


def test_an_exported_value_wins_and_is_named_with_what_it_replaces() -> None:
    wanted = [
        Variable("NCCL_NET", "Socket", "why", "source"),
        Variable("PYTORCH_HIP_ALLOC_CONF", "1", "why", "source", also=("OTHER",)),
    ]
    exported = {"NCCL_NET": "mine", "OTHER": "2", "NCCL_DEBUG": "WARN", "HOME": "/"}
    settings = {setting.name: setting for setting in resolve(wanted, exported, {"NCCL_NET": "you"})}
    assert settings["NCCL_NET"].describe() == f"NCCL_NET=mine (you, instead of Socket of {THIS_FILE}: why)"
    assert settings["OTHER"].describe() == f"OTHER=2 ({EXPORTED})"
    assert settings.keys() == {"NCCL_NET", "OTHER", "NCCL_DEBUG"}


def test_doctor_expects_what_the_sites_file_will_set(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("LD_LIBRARY_PATH", "/mine")
    settings = {
        setting.name: setting for setting in expected_settings(environment("frontier", 2), load_site("frontier"))
    }
    assert settings["LD_LIBRARY_PATH"].origin == "slurm/sites/frontier.yaml"
    assert settings["LD_LIBRARY_PATH"].value == "$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH"
    assert settings["NCCL_NET"].describe().startswith(f"NCCL_NET=AWS Libfabric ({THIS_FILE}: fail at start")
