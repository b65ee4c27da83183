"""Reads the environment variables that a launcher sets for its processes into one `RankEnv`.

There is one function per launcher: torchrun, Slurm's srun, Open MPI's mpirun, a PMI launcher (Cray PALS, MPICH), or MPI
itself through mpi4py. The functions receive the environment as an argument.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from zlib import crc32

from frontier_llm.errors import FrontierError, Problem
from frontier_llm.run import hostlist

# Ports 20000-31999 are above the registered services that clusters use and below Linux's ephemeral range (32768-60999).
# So no outgoing connection of another process can occupy the port that all ranks have derived.
FIRST_PORT = 20_000
PORT_COUNT = 12_000
# Largest number of connections of one rank to the job's store: for process groups, failure records, heartbeats, and
# RCCL's watchdog.
STORE_CONNECTIONS = 4


@dataclass(frozen=True)
class RankEnv:
    """Rank, world size and node of this process, and the address of the rendezvous."""

    rank: int  # 0 … world_size - 1.
    world_size: int
    local_rank: int  # number of this rank among the ranks of its node.
    local_world_size: int
    hostname: str
    master_addr: str  # name or address where rank 0 listens.
    master_port: int | None  # None: the launcher gave no job identity from which a port is derived (one rank only).
    launcher: str  # name of the launcher: a key of LAUNCHERS.

    def describe(self) -> str:
        """Return text such as 'rank 12 of 32 (local 4 of 8 on n1), rendezvous n0:23456, started by slurm'."""
        return (
            f"rank {self.rank} of {self.world_size} (local {self.local_rank} of {self.local_world_size} on "
            f"{self.hostname}), "
            f"rendezvous {self.master_addr}:{self.master_port}, started by {self.launcher}"
        )


class _Reader:
    """Reads integers from variables and collects all problems with them."""

    def __init__(self, env: Mapping[str, str], launcher: str) -> None:
        self.env = env
        self.launcher = launcher
        self.problems = list[Problem]()

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the first of `names` that is set, as a non-negative integer. Collect a problem otherwise."""
        name = next((candidate for candidate in names if candidate in self.env), None)
        if name is None:
            if default is None:
                fix = f"unset the other variables of {self.launcher}, or start with srun"
                self.problems.append(
                    Problem(names[0], f"is not set although {self.launcher} started this process", fix)
                )
            return default or 0
        if not re.fullmatch(r"\d+", self.env[name]):
            self.problems.append(Problem(name, f"{self.env[name]!r} is not a number"))
            return 0
        return int(self.env[name])

    def finish(self) -> None:
        """Raise FrontierError with all collected problems."""
        if self.problems:
            raise FrontierError(self.problems)


def _from_torchrun(env: Mapping[str, str]) -> RankEnv:
    read = _Reader(env, "torchrun")
    rank = read.integer("RANK")
    world = read.integer("WORLD_SIZE")
    local = read.integer("LOCAL_RANK")
    local_world = read.integer("LOCAL_WORLD_SIZE", default=world)
    port = read.integer("MASTER_PORT")
    # torchrun's own store listens on MASTER_PORT. So the ranks need another port, and a new port after each restart.
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port = FIRST_PORT + (port + read.integer("TORCHELASTIC_RESTART_COUNT", default=0)) % PORT_COUNT
    if "MASTER_ADDR" not in env:
        read.problems.append(
            Problem("MASTER_ADDR", "is not set although RANK and WORLD_SIZE are", "start with torchrun, or set it")
        )
    read.finish()
    launcher = "local" if env.get("FRONTIER_LLM_LAUNCHER") == "local" else "torchrun"
    return RankEnv(rank, world, local, local_world, socket.gethostname(), env["MASTER_ADDR"], port, launcher)


def _from_slurm(env: Mapping[str, str]) -> RankEnv:
    read = _Reader(env, "slurm")
    rank = read.integer("SLURM_PROCID")
    world = read.integer("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local = read.integer("SLURM_LOCALID")
    node = read.integer("SLURM_NODEID")
    read.finish()
    counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", str(world))))
    if node >= len(counts):
        raise FrontierError(
            f"is {node}, but SLURM_STEP_TASKS_PER_NODE lists only {len(counts)} nodes, counted from 0",
            where="SLURM_NODEID",
        )
    return _with_rendezvous(env, "slurm", rank, world, local, counts[node])


# launcher -> variables with the rank, world size, local rank and local world size; of several names, the first that is
# set is used
_MPI_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "openmpi": (
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    "pmi": (
        ("PALS_RANKID", "PMI_RANK"),
        ("PMI_SIZE",),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
        ("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"),
    ),
}


def _from_mpi(launcher: str, env: Mapping[str, str]) -> RankEnv:
    read = _Reader(env, launcher)
    rank, world, local, local_world = (read.integer(*names) for names in _MPI_NAMES[launcher])
    read.finish()
    return _with_rendezvous(env, launcher, rank, world, local, local_world)


def _from_mpi4py(env: Mapping[str, str]) -> RankEnv:
    """Read the ranks from MPI. Rank 0 broadcasts its address and a free port."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is installed and finds no MPI library
        raise FrontierError(
            f"mpi4py cannot be used: {error}",
            "build mpi4py with the site's MPI and load that MPI, or unset the variable",
            "FRONTIER_LLM_LAUNCHER=mpi4py",
        ) from error
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    address = env.get("MASTER_ADDR") or (
        "127.0.0.1" if node.size == world.size else socket.gethostbyname(socket.gethostname())
    )
    port = int(env["MASTER_PORT"]) if env.get("MASTER_PORT", "").isdigit() else free_port()
    address, port = world.bcast((address, port), root=0)
    return RankEnv(world.rank, world.size, node.rank, node.size, socket.gethostname(), address, port, "mpi4py")


def _with_rendezvous(
    env: Mapping[str, str],
    launcher: str,
    rank: int,
    world: int,
    local: int,
    local_world: int,
) -> RankEnv:
    """Return the RankEnv with the rendezvous: MASTER_ADDR and MASTER_PORT if they are set.

    Otherwise the address is the first node of the step, and the port is derived from the job's identity.
    """
    hostname = env.get("SLURMD_NODENAME") if launcher == "slurm" else None
    address = _address(env, launcher, one_node=world == local_world)
    port = _port(env, launcher)
    if port is None and world > 1:
        raise FrontierError(
            f"is not set, and {launcher} gives no job id from which a port can be derived",
            "export the same MASTER_PORT for all ranks",
            "MASTER_PORT",
        )
    return RankEnv(rank, world, local, local_world, hostname or socket.gethostname(), address, port, launcher)


def _address(env: Mapping[str, str], launcher: str, one_node: bool) -> str:
    """Return the address at which rank 0 listens."""
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if one_node:
        return "127.0.0.1"
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise FrontierError(
            f"is not set, and {launcher} does not report the node of rank 0 of this job on several nodes",
            "export MASTER_ADDR for all ranks: the address that hostname -i prints on the node of rank 0",
            "MASTER_ADDR",
        )
    return hostlist.first(nodes)


# variables that identify a job, a step or a restart; the rendezvous port is derived from their values
_IDENTITY = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PALS_APID",
    "PMI_JOBID",
)


def _port(env: Mapping[str, str], launcher: str) -> int | None:
    """Return MASTER_PORT, or a port that all ranks of the job derive. None if no variable identifies the job."""
    if "MASTER_PORT" in env:
        read = _Reader(env, launcher)
        port = read.integer("MASTER_PORT")
        read.finish()
        return port
    identity = [f"{name}={env[name]}" for name in _IDENTITY if name in env]
    return job_port(*identity) if identity else None


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Expand Slurm's run-length list: '8(x2),4' -> (8, 8, 4). Raises FrontierError for any other text."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise FrontierError(f"{text!r} is not of the form 8(x2),4", where="SLURM_STEP_TASKS_PER_NODE")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def job_port(*identity: str | int) -> int:
    """Return a rendezvous port. All ranks of a job derive the same port; it varies with job, step and restart."""
    return FIRST_PORT + crc32("/".join(map(str, identity)).encode()) % PORT_COUNT


def free_port() -> int:
    """Return a port of the rendezvous range on which no process listens now, for ranks of one machine."""
    start = job_port(os.getpid(), os.urandom(4).hex()) - FIRST_PORT
    for offset in range(PORT_COUNT):
        port = FIRST_PORT + (start + offset) % PORT_COUNT
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise FrontierError(
        f"no free port in {FIRST_PORT}-{FIRST_PORT + PORT_COUNT - 1}",
        "end processes that listen there",
    )


LAUNCHERS: dict[str, Callable[[Mapping[str, str]], RankEnv]] = {
    "torchrun": _from_torchrun,
    "slurm": _from_slurm,
    "openmpi": partial(_from_mpi, "openmpi"),
    "pmi": partial(_from_mpi, "pmi"),
    "mpi4py": _from_mpi4py,
    "local": _from_torchrun,  # `cluster.local` sets torchrun's variables
}
