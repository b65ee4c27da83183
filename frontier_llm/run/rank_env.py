"""Finds the rank of this process and reads environment variables. No other module of the package reads `os.environ`.

The ranks are started by torchrun, by srun, by Open MPI's mpirun, by a PMI launcher (Cray PALS, MPICH), or by
`cluster.local`. Each launcher sets its own variables. `discover` reads them into one `RankEnv`. It returns None if no
launcher started this process, and raises an error that names contradictory variables.

A user can set these variables: MASTER_ADDR and MASTER_PORT override the rendezvous. FRONTIER_LLM_LAUNCHER selects the
launcher whose variables are read. With the value 'mpi4py' the ranks come from MPI itself; some sites require that MPI
is imported before torch.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from frontier_llm.errors import FrontierError, Problem, suggest
from frontier_llm.run.launchers import LAUNCHERS, RankEnv

# arguments of a Python interpreter that run frontier-llm; -P: no module is imported from the working directory
COMMAND = ("-P", "-m", "frontier_llm.cli.main")
# Step ids that Slurm gives to shells, not to parallel steps (slurm.h: interactive, batch, extern, pending)
_SHELL_STEPS = {str(0xFFFFFFFF - offset) for offset in (2, 3, 4, 5)}


def environ(name: str, default: str | None = None) -> str | None:
    """Return one environment variable. Other modules call this function instead of `os.environ`."""
    return os.environ.get(name, default)


def node_name() -> str:
    """Return the scheduler's name of this node, by which the node can be excluded."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def start_number() -> int:
    """Return the number of the run's start (incarnation), which the supervisor sets. 0 without a supervisor."""
    return int(environ("FRONTIER_LLM_INCARNATION") or 0)


def environment() -> dict[str, str]:
    """Return a copy of the complete environment, for child processes."""
    return dict(os.environ)


def with_this_package(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` with a PYTHONPATH from which a process that runs COMMAND can import this package."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), variables.get("PYTHONPATH"))))
    return {**variables, "PYTHONPATH": path}


def rank_python() -> str:
    """Return the interpreter for ranks: the container's, else the job's, else this process's interpreter."""
    return environ("FRONTIER_LLM_RANK_PYTHON") or environ("FRONTIER_LLM_PYTHON") or sys.executable


def adopt(wanted: Mapping[str, str]) -> None:
    """Set each variable of `wanted` that is not yet set in this process."""
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def put(name: str, value: str) -> None:
    """Set a variable of this process and of the processes that it starts."""
    os.environ[name] = value


def discover(variables: Mapping[str, str] | None = None) -> RankEnv | None:
    """Return the RankEnv of this process. None if no launcher started it (login shell, laptop, batch script's shell).

    `variables` replaces the process environment in tests. Raises FrontierError, which names every variable that is
    missing, is not a number, or contradicts another.
    """
    env = os.environ if variables is None else variables
    launcher = env.get("FRONTIER_LLM_LAUNCHER") or _detect(env)
    if launcher is None:
        return None
    if launcher not in LAUNCHERS:
        raise FrontierError(f"{launcher!r} is not a launcher", suggest(launcher, LAUNCHERS), "FRONTIER_LLM_LAUNCHER")
    place = LAUNCHERS[launcher](env)
    if problems := list(_contradictions(place, env)):
        raise FrontierError(problems)
    return place


def _detect(env: Mapping[str, str]) -> str | None:
    """Return the innermost launcher. Inside an srun step, mpirun or torchrun can start ranks and number them anew."""
    signs = (
        ("torchrun", "TORCHELASTIC_RUN_ID" in env),
        ("openmpi", "OMPI_COMM_WORLD_RANK" in env),
        ("slurm", _in_slurm_step(env)),
        ("pmi", "PALS_RANKID" in env or "PMI_RANK" in env),
        # the variables of torch's env:// method; WORLD_SIZE alone is often left over in a shell
        ("torchrun", "RANK" in env and "WORLD_SIZE" in env),
    )
    return next((launcher for launcher, seen in signs if seen), None)


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Return whether this process is a task of srun.

    The batch shell also has SLURM_PROCID=0, but no step id. An interactive shell inside of srun has one task and a
    terminal, and does not count.
    """
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    if step is None or step in _SHELL_STEPS or "SLURM_PROCID" not in env:
        return False
    interactive = "SLURM_PTY_PORT" in env and env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS")) == "1"
    return not interactive


def _contradictions(place: RankEnv, env: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each contradiction between values. Each problem names the variables."""
    rank = place.rank
    world = place.world_size
    local = place.local_rank
    local_world = place.local_world_size
    rules = (
        (rank < world, "rank", f"is {rank}, but the world size is {world}"),
        (local < local_world, "local rank", f"is {local}, but the local world size is {local_world}"),
        (local_world <= world, "local world size", f"is {local_world}, but the world size is {world}"),
    )
    sources = _sources(place, env)
    yield from (
        Problem(where, f"{what} ({sources})", "unset stale variables") for holds, where, what in rules if not holds
    )
    if place.master_port is not None and not 0 < place.master_port < 65536:
        yield Problem("MASTER_PORT", f"{place.master_port} is not a port", "choose 1024-65535")
    if place.launcher in ("slurm", "openmpi", "pmi"):
        # every task has the same RANK if a script exports RANK before srun
        for name, true in (("RANK", place.rank), ("WORLD_SIZE", place.world_size), ("LOCAL_RANK", place.local_rank)):
            if env.get(name, str(true)) != str(true):
                what = f"is {env[name]}, but {place.launcher} started this process with {true}"
                yield Problem(name, what, f"unset {name}, or export it inside the step")


_SLURM_NAMES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _sources(place: RankEnv, env: Mapping[str, str]) -> str:
    """Return the launcher's variables and their values as text for a message."""
    prefixes = ("OMPI_COMM_WORLD", "PMI_", "PALS_", "MPI_LOCAL")
    others = sorted(name for name in env if name.startswith(prefixes) or name in _TORCH_NAMES)
    return ", ".join(
        f"{name}={env[name]}" for name in (_SLURM_NAMES if place.launcher == "slurm" else others) if name in env
    )
