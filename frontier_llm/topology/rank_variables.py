"""Sets the environment variables of a run's ranks, which `machine.env` lists for each machine.

The variables are set before torch is imported, because HIP reads some of them when its library is loaded.

The supervisor exports them to the environment of srun (`cluster.site_variables`). A rank sets the variables that differ
between ranks. If another launcher started the rank (torchrun, mpirun, a bare srun), the rank sets all of them. ORIGINS
records whether the supervisor, the user, a module or the site file has set a variable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from frontier_llm.config import RunConfig
from frontier_llm.machine import env as machine_env
from frontier_llm.machine.env import MACHINES, THIS_FILE, Setting, Variable, resolve
from frontier_llm.machine.load import load_machine
from frontier_llm.run import job_secret
from frontier_llm.run.launchers import RankEnv
from frontier_llm.run.rank_env import adopt, environ, environment, put
from frontier_llm.topology.engine_rules import in_flight
from frontier_llm.topology.plan import plan_as_given
from frontier_llm.topology.streams import most_streams
from frontier_llm.units import strict_json

ORIGINS = "FRONTIER_LLM_VARIABLE_ORIGINS"  # JSON: name of a variable -> what set it.
# In these two variables launch/job.sh passes the names of the variables that the user has set, and of the variables
# that modules have set.
USER_NAMES = "FRONTIER_LLM_USER_VARIABLES"
MODULE_NAMES = "FRONTIER_LLM_MODULE_VARIABLES"


def environment_name(machine: str) -> str:
    """Return the name under which `machine.env` lists the variables of a machine, given by its name or file."""
    name = Path(machine).stem
    return name if name in MACHINES else load_machine(machine).environment


def shards_weights(config: RunConfig) -> bool:
    """Return True if the run gathers sharded weights during compute (FSDP).

    If compute and these gathers shared one hardware queue, the gathers would be late.
    """
    return config.parallel.data_mode == "fsdp"


def run_variables(config: RunConfig, nodes: int, ranks_per_node: int | None = None) -> list[Variable]:
    """Return the variables that the ranks of a run on `nodes` nodes need.

    `ranks_per_node` is by default the number of the machine's devices per node. Raises ConfigError for a machine whose
    environment is unknown.
    """
    run_dir = str(Path(config.train.run_dir).resolve())
    machine = machine_env.environment(environment_name(config.machine), nodes, shards_weights(config))
    variables = {variable.name: variable for variable in machine}
    if machine_env.QUEUES in variables and in_flight(config) == "many":
        ranks_per_node = ranks_per_node or load_machine(config.machine).devices_per_node
        world_size = nodes * ranks_per_node
        if world_size % config.parallel.model_ranks == 0:  # otherwise `doctor` examines fewer nodes than the run needs
            plan = plan_as_given(config, world_size)
            streams = most_streams(config, plan.grid, plan.placement, ranks_per_node)
            variables[machine_env.QUEUES] = machine_env.queues_variable(streams)
    return [*variables.values(), machine_env.flight_record_variable(run_dir)]


def known_origins(variables: Mapping[str, str], site_file: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the origin of each variable of a process.

    The parent process has recorded the origins in ORIGINS. Without this record, the lists of launch/job.sh are used.
    `site_file` maps each variable that the site's file sets to its origin.
    """
    if ORIGINS in variables:
        return dict(json.loads(variables[ORIGINS]))
    modules = dict.fromkeys(variables.get(MODULE_NAMES, "").split(), "a module")
    user = dict.fromkeys(variables.get(USER_NAMES, "").split(), "you")
    return {**modules, **site_file, **user}


def set_rank_variables(config: RunConfig, place: RankEnv, folder: Path | None = None) -> list[Setting]:
    """Set the missing variables in this rank's environment, and return every setting with its origin.

    Commands call this function before they import torch. It may be called again. `folder` is the job's private folder
    on this node. If `folder` is None, it is derived from the job's secret. Without a secret, variables that depend on
    the folder or the local rank are not set yet. A second call sets them when the rank joins (`training.join`).
    """
    secret = environ(job_secret.VARIABLE)
    if folder is None and secret:
        folder = job_secret.folder_of(secret.encode())
    nodes = node_count(place)
    wanted = run_variables(config, nodes, place.local_world_size)
    if folder is None:
        wanted = [variable for variable in wanted if not variable.differs_by_rank]
    elif place.local_rank == 0 and needs_network_plugin(config, nodes):
        wanted += machine_env.rccl_log_variables(place.rank)
    exported = environment()
    origins = known_origins(exported)
    settings = resolve([variable.on_rank(str(folder), place.local_rank) for variable in wanted], exported, origins)
    missing = {setting.name: setting.value for setting in settings if setting.name not in exported}
    adopt(missing)
    put(ORIGINS, strict_json({**origins, **dict.fromkeys(missing, THIS_FILE)}, indent=None))
    return settings


def node_count(place: RankEnv) -> int:
    """Return the number of nodes of the job."""
    return -(-place.world_size // place.local_world_size)


def needs_network_plugin(config: RunConfig, nodes: int) -> bool:
    """Return True if collectives must not use sockets.

    These are jobs on more than one node of a machine whose network has an RCCL plugin.
    """
    return nodes > 1 and any(variable.name == "NCCL_NET" for variable in run_variables(config, nodes))
