from __future__ import annotations

import pytest

from frontier_llm.errors import FrontierError
from frontier_llm.run import launchers, rank_env

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "13",
    "SLURM_STEP_NUM_TASKS": "32",
    "SLURM_LOCALID": "5",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x4)",
    "SLURM_STEP_NODELIST": "frontier[00007-00010]",
    "SLURMD_NODENAME": "frontier00008",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "123",
}
PMI = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "PMI_JOBID": "j",
    "MASTER_ADDR": "x1000",
}


def found(variables: dict[str, str]) -> launchers.RankEnv:
    place = rank_env.discover(variables)
    assert place is not None
    return place


def test_slurm_step() -> None:
    place = found(SLURM)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (13, 32, 5, 8)
    assert (place.hostname, place.master_addr, place.launcher) == ("frontier00008", "frontier00007", "slurm")
    assert place.master_port is not None and 20_000 <= place.master_port < 32_000


def test_torchrun() -> None:
    place = found(TORCHRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    assert (place.master_addr, place.master_port, place.launcher) == ("host0", 29500, "torchrun")


@pytest.mark.parametrize("port", [1, 20_000, 23_999, 24_000, 29_500, 31_999, 65_535])
def test_the_ranks_do_not_meet_where_torchruns_own_store_listens(port: int) -> None:
    env = {**TORCHRUN, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ports = [found({**env, "TORCHELASTIC_RESTART_COUNT": str(restart)}).master_port for restart in range(4)]
    assert len({port, *ports}) == 5 and all(20_000 <= each < 32_000 for each in ports if each)


def test_torchrun_inside_a_slurm_step_is_the_innermost() -> None:
    assert found({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_open_mpi_on_one_node_meets_on_loopback() -> None:
    place = found(OPENMPI)
    assert (place.rank, place.world_size, place.local_rank, place.launcher, place.master_addr) == (
        1,
        4,
        1,
        "openmpi",
        "127.0.0.1",
    )


def test_mpirun_over_slurm_nodes_believes_mpi_and_meets_on_the_first_node() -> None:
    # mpirun starts its daemons with srun, so that SLURM_PROCID is the daemon's.
    daemon = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_JOB_NODELIST": "n[3-4]"}
    place = found({**OPENMPI, **daemon, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert (place.rank, place.launcher, place.master_addr) == (1, "openmpi", "n3")


def test_pmi_and_pals() -> None:
    place = found(PMI)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size, place.launcher) == (
        5,
        8,
        1,
        4,
        "pmi",
    )
    pals = {**PMI, "PALS_RANKID": "6", "PALS_LOCAL_RANKID": "2"}
    assert (found(pals).rank, found(pals).local_rank) == (6, 2)


def test_hydra_of_mpich_names_local_ranks_its_own_way() -> None:
    hydra = {
        "PMI_RANK": "5",
        "PMI_SIZE": "8",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "4",
        "MASTER_ADDR": "n0",
        "MASTER_PORT": "20001",
    }
    place = found(hydra)
    assert (place.rank, place.local_rank, place.local_world_size, place.master_port) == (5, 1, 4, 20001)


def test_several_nodes_without_an_address_are_refused() -> None:
    with pytest.raises(FrontierError, match="MASTER_ADDR"):
        rank_env.discover({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "32", "SLURM_JOB_NODELIST": "n[0-3]"},
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "32", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        {**SLURM, "SLURM_STEP_ID": "4294967291"},  # batch step
        {**SLURM, "SLURM_STEP_ID": "4294967290"},  # interactive step of salloc
        {**SLURM, "SLURM_PTY_PORT": "40000", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"WORLD_SIZE": "8"},
    ],
    ids=["alone", "sbatch", "sbatch-procid", "batch-step", "salloc-shell", "srun-pty", "left-over"],
)
def test_shells_are_not_ranks(variables: dict[str, str]) -> None:
    assert rank_env.discover(variables) is None


def test_master_variables_override() -> None:
    place = found({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "3442"})
    assert (place.master_addr, place.master_port) == ("10.0.0.1", 3442)


def test_port_differs_between_jobs_steps_and_restarts_and_agrees_between_ranks() -> None:
    variants = [
        SLURM,
        {**SLURM, "SLURM_JOB_ID": "4712"},
        {**SLURM, "SLURM_STEP_ID": "3"},
        {**SLURM, "SLURM_RESTART_COUNT": "1"},
    ]
    assert len({found(variant).master_port for variant in variants}) == 4
    assert (
        found({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).master_port
        == found(SLURM).master_port
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"SLURM_PROCID": "32"}, "SLURM_PROCID=32"),
        ({"SLURM_LOCALID": "8"}, "SLURM_LOCALID=8"),
        ({"SLURM_NODEID": "4"}, "SLURM_NODEID"),
        ({"RANK": "0"}, "RANK"),
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8*4"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"FRONTIER_LLM_LAUNCHER": "slrm"}, "slurm"),
    ],
)
def test_contradictions_name_the_variable(changes: dict[str, str], named: str) -> None:
    with pytest.raises(FrontierError, match=named):
        rank_env.discover({**SLURM, **changes})


def test_all_missing_variables_at_once() -> None:
    with pytest.raises(FrontierError) as caught:
        rank_env.discover({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"})
    assert {problem.where for problem in caught.value.problems} == {
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_PORT",
        "MASTER_ADDR",
    }


def test_tasks_per_node() -> None:
    assert launchers.tasks_per_node("8(x2),4") == (8, 8, 4)


def test_adopt_sets_only_what_is_missing(monkeypatch):
    monkeypatch.setenv("FL_NEW", "x")  # so that monkeypatch removes it afterwards
    monkeypatch.delenv("FL_NEW")
    monkeypatch.setenv("FL_MINE", "mine")
    rank_env.adopt({"FL_NEW": "1", "FL_MINE": "2"})
    assert [rank_env.environ(name) for name in ("FL_NEW", "FL_MINE")] == ["1", "mine"]
