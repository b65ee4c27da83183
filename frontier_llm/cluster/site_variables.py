"""Collects the environment variables of the ranks from the machine, the run and the site's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from frontier_llm.cluster.sites import Site
from frontier_llm.config import RunConfig
from frontier_llm.machine.env import THIS_FILE, Setting, Variable, resolve
from frontier_llm.run.rank_env import environment
from frontier_llm.topology.rank_variables import MODULE_NAMES, ORIGINS, known_origins, run_variables
from frontier_llm.units import strict_json


def _site_origins(site: Site) -> dict[str, str]:
    """Return the origin of each variable that the site's file sets."""
    return dict.fromkeys(site.environment, f"slurm/sites/{site.name}.yaml")


def expected_settings(wanted: Sequence[Variable], site: Site) -> list[Setting]:
    """Return the variables that the ranks of a job would get if it were submitted from this shell.

    If launch/job.sh has not loaded the site's file yet, its variables are added.
    """
    exported = environment()
    origins = _site_origins(site)
    if MODULE_NAMES not in exported:
        extends_others = {name for name, value in site.environment.items() if "$" in value}
        from_site = {
            name: value for name, value in site.environment.items() if name in extends_others or name not in exported
        }
        exported = {
            **exported,
            **from_site,
            ORIGINS: strict_json({name: origins[name] for name in from_site}, indent=None),
        }
    return job_settings(wanted, site, site.cpus_per_task, exported)


def job_settings(
    wanted: Sequence[Variable], site: Site, cpus_per_task: int, exported: Mapping[str, str]
) -> list[Setting]:
    """Return the settings of network and GPUs that the ranks of a job get from a parent with the environment
    `exported`.

    `wanted` are the variables that the machine and the run need.
    """
    exported = dict(exported)
    origins = known_origins(exported, _site_origins(site))
    if "OMP_NUM_THREADS" not in exported:
        exported["OMP_NUM_THREADS"] = str(cpus_per_task)
        origins["OMP_NUM_THREADS"] = "sbatch --cpus-per-task"
    return resolve(wanted, exported, origins)


def step_variables(config: RunConfig, nodes: int, site: Site, cpus_per_task: int) -> dict[str, str]:
    """Return the variables to add to the environment of srun: all that are equal for every rank, and ORIGINS."""
    wanted = run_variables(config, nodes)
    by_rank = {variable.name for variable in wanted if variable.differs_by_rank}
    settings = job_settings(wanted, site, cpus_per_task, environment())
    same_everywhere = [setting for setting in settings if setting.origin != THIS_FILE or setting.name not in by_rank]
    origins = {setting.name: setting.origin for setting in same_everywhere}
    return {**{setting.name: setting.value for setting in same_everywhere}, ORIGINS: strict_json(origins, indent=None)}
