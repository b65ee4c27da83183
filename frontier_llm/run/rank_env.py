"""Who am I among the processes of this run? The only reader of `os.environ` in the package.

One process per device may be started by torchrun, by srun, by Open MPI's mpirun, by a PMI launcher (Cray PALS, MPICH),
or by `cluster.local`; each leaves its own variables. `discover` turns them into one `RankEnv`, or None when no launcher
started this process, or says which variables contradict each other.

Variables that a user may set: MASTER_ADDR and MASTER_PORT override the rendezvous; FRONTIER_LLM_LAUNCHER names the
launcher to believe ('mpi4py' asks MPI itself, which some sites want imported before torch).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from frontier_llm.errors import FrontierError, Problem, suggest
from frontier_llm.run.launchers import LAUNCHERS, RankEnv

# frontier-llm, of an interpreter; -P: never the code that happens to lie in the working directory
COMMAND = ("-P", "-m", "frontier_llm.cli.main")
# Step ids that Slurm gives to shells, not to parallel steps (slurm.h: interactive, batch, extern, pending)
_SHELL_STEPS = {str(0xFFFFFFFF - offset) for offset in (2, 3, 4, 5)}


def environ(name: str, default: str | None = None) -> str | None:
    """One environment variable; other rooms ask here instead of reading `os.environ`."""
    return os.environ.get(name, default)


def node_name() -> str:
    """This node as the scheduler calls it, so that it can be excluded by that name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def environment() -> dict[str, str]:
    """A copy of the whole environment, to hand to child processes."""
    return dict(os.environ)


def with_this_package(variables: Mapping[str, str]) -> dict[str, str]:
    """For processes that run COMMAND: this package too, wherever it was imported from."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), variables.get("PYTHONPATH"))))
    return {**variables, "PYTHONPATH": path}


def rank_python() -> str:
    """The interpreter that ranks are started with: a container's, the job's, or this one."""
    return environ("FRONTIER_LLM_RANK_PYTHON") or environ("FRONTIER_LLM_PYTHON") or sys.executable


def adopt(wanted: Mapping[str, str]) -> None:
    """Set the variables that are not set yet."""
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def put(name: str, value: str) -> None:
    """Set a variable of this process and of the processes that it starts."""
    os.environ[name] = value


def discover(variables: Mapping[str, str] | None = None) -> RankEnv | None:
    """This process's place, or None when it was started alone (a login shell, a laptop, the shell of an sbatch script).

    `variables` replaces the process environment in tests. Raises FrontierError naming every variable that is missing,
    is not a number, or contradicts another.
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
    """The innermost launcher: mpirun and torchrun may run inside an srun step whose SLURM_PROCID is not the rank."""
    signs = (
        ("torchrun", "TORCHELASTIC_RUN_ID" in env),
        ("openmpi", "OMPI_COMM_WORLD_RANK" in env),
        ("slurm", _in_slurm_step(env)),
        ("pmi", "PALS_RANKID" in env or "PMI_RANK" in env),
        # the plain env:// convention; a lone WORLD_SIZE is often left over in a shell and means nothing
        ("torchrun", "RANK" in env and "WORLD_SIZE" in env),
    )
    return next((launcher for launcher, seen in signs if seen), None)


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """A task of srun. The batch shell has SLURM_PROCID=0 too, but no step id; an interactive shell has one task and
    a terminal.
    """
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    if step is None or step in _SHELL_STEPS or "SLURM_PROCID" not in env:
        return False
    interactive = "SLURM_PTY_PORT" in env and env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS")) == "1"
    return not interactive


def _contradictions(place: RankEnv, env: Mapping[str, str]) -> Iterator[Problem]:
    """Values that cannot be true together; each names its variables."""
    rank = place.rank
    world = place.world_size
    local = place.local_rank
    local_world = place.local_world_size
    rules = (
        (rank < world, "rank", f"{rank} of a world of {world}"),
        (local < local_world, "local rank", f"{local} of {local_world} here"),
        (local_world <= world, "local world size", f"{local_world} of {world}"),
    )
    sources = _sources(place, env)
    yield from (
        Problem(where, f"{what} ({sources})", "unset stale variables") for holds, where, what in rules if not holds
    )
    if place.master_port is not None and not 0 < place.master_port < 65536:
        yield Problem("MASTER_PORT", f"{place.master_port} is not a port", "choose 1024-65535")
    if place.launcher in ("slurm", "openmpi", "pmi"):
        # a script that exports RANK before srun gives every task the same one
        for name, true in (("RANK", place.rank), ("WORLD_SIZE", place.world_size), ("LOCAL_RANK", place.local_rank)):
            if env.get(name, str(true)) != str(true):
                what = f"is {env[name]} but {place.launcher} started this process as {true}"
                yield Problem(name, what, f"unset {name}, or export it inside the step")


_SLURM_NAMES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _sources(place: RankEnv, env: Mapping[str, str]) -> str:
    """The launcher's variables and values, for a message."""
    prefixes = ("OMPI_COMM_WORLD", "PMI_", "PALS_", "MPI_LOCAL")
    others = sorted(name for name in env if name.startswith(prefixes) or name in _TORCH_NAMES)
    return ", ".join(
        f"{name}={env[name]}" for name in (_SLURM_NAMES if place.launcher == "slurm" else others) if name in env
    )
