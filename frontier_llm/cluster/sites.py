"""Reads site files (`slurm/sites/*.yaml`) as `Site`, and checks a job against its site's limits before it is queued.

A site file holds the settings of an administrator: partitions with their limits by node count, account, modules,
network flags, paths. `configs/machines` describes the hardware, and `machine.env` the variables of RCCL and libfabric.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from frontier_llm import log
from frontier_llm.config import build
from frontier_llm.config.fields import PositiveFloat, PositiveInt, Section
from frontier_llm.config.load import read_yaml, with_machine_path
from frontier_llm.errors import ConfigError, Problem, nearest, suggest
from frontier_llm.machine.load import load_machine
from frontier_llm.run.rank_env import environ

FORMER_WARNING_TIME = "signal_lead_s"  # name of the key `warning_time_s` until 0.3


class Limit(Section):
    """Longest walltime: jobs of up to `max_nodes` nodes can run for `max_hours`."""

    max_nodes: PositiveInt
    max_hours: PositiveFloat


class Wait(Section):
    """Measured time in the queue of jobs of up to `max_nodes` nodes."""

    max_nodes: PositiveInt
    hours: Annotated[float, Field(ge=0)]


class Site(Section):
    """One cluster: its limits, its Slurm options and the environment of its jobs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    machine: str  # name of a file in configs/machines.
    cluster: str | None = None  # Slurm's ClusterName; None: any cluster is taken for this site.
    gpus_per_node: PositiveInt
    tasks_per_node: PositiveInt
    cpus_per_task: PositiveInt
    account: Literal["required", "optional"] = "optional"
    default_partition: str | None = None
    # If left out, the bins of the machine file (operations.queue) are the partitions.
    partitions: dict[str, tuple[Limit, ...]] = Field(default_factory=dict)
    queue_waits: tuple[Wait, ...] = ()  # empty: the time in the queue is unknown.
    max_queued_jobs: PositiveInt | None = None
    unchained_qos: tuple[str, ...] = ()  # qualities of service that forbid a job to continue itself.
    warning_time_s: PositiveInt = 600  # warning time before the walltime, until a save has been measured.
    # Time after which Slurm has noticed a dead node: its SlurmdTimeout (300 s by default) plus a margin.
    node_timeout_s: PositiveInt = 330
    exclude_slow_after: PositiveInt | None = None  # straggler reports that exclude a host; None: only report them.
    sbatch: dict[str, str] = Field(default_factory=dict)  # further options; '' = a flag without a value.
    srun: dict[str, str] = Field(default_factory=dict)
    interfaces: tuple[str, ...] = ()  # network interfaces that must be up on every node.
    interface: str | None = None  # network interface of the rendezvous; None = the host's own address.
    scratch: str | None = None  # directory for run directories; $PROJECT is the account, $USER the user.
    run_roots: tuple[str, ...] = ()  # file systems that run directories must lie on; empty: any.
    scratch_quota_tb: PositiveFloat | None = None  # default quota of a project on scratch.
    node_local: str = "/tmp"  # noqa: S108 the default of a site file, not a file we open
    container: str | None = None  # image whose Python the ranks use, unless FRONTIER_LLM_CONTAINER names another.
    environment_is_local: bool = False  # the Python environment lies on each node's own disk.
    open_files: PositiveInt | None = None  # hard limit of open files on compute nodes; None: as on the login node.
    bind: Literal["gcd", "none"] = "none"
    module_paths: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    network_plugin: str | None = None  # library that RCCL must be able to load.
    libfabric_provider: str | None = None
    unset: tuple[str, ...] = ()  # variables of modules that ranks must not have; a user's own exports stay.
    proxy: Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.-]+:[0-9]+$")] | None = None  # proxy to the internet.
    environment: dict[str, str] = Field(default_factory=dict)  # exported before Python starts; $NAME is expanded.
    # Keys for which no reliable source was found, with their meaning; `submit` refuses a job until the file sets them.
    unknown: dict[str, str] = Field(default_factory=dict)

    def scratch_dir(self, account: str, user: str) -> Path | None:
        """Return the project's scratch directory.

        None if the site file names none or it does not exist for this account.
        """
        if self.scratch is None:
            return None
        path = Path(self.scratch.replace("$PROJECT", account.lower()).replace("$USER", user))
        return path.resolve() if path.is_dir() else None

    def limits(self, partition: str | None) -> tuple[Limit, ...]:
        """Return the limits of a partition, smallest node count first. Empty if the site file has none."""
        return tuple(
            sorted(
                self.partitions.get(partition or self.default_partition or "", ()),
                key=lambda limit: limit.max_nodes,
            )
        )

    def max_minutes(self, nodes: int, partition: str | None = None) -> int | None:
        """Return the longest walltime of a job of `nodes` nodes. None if the site has no limit for it."""
        limit = next((limit for limit in self.limits(partition) if nodes <= limit.max_nodes), None)
        return round(limit.max_hours * 60) if limit else None

    def queue_wait_hours(self, nodes: int) -> float | None:
        """Return the measured time in the queue of a job of `nodes` nodes. None if it is unknown."""
        waits = sorted(self.queue_waits, key=lambda wait: wait.max_nodes)
        return next((wait.hours for wait in waits if nodes <= wait.max_nodes), None)


def root_dir() -> Path:
    """Return the checkout, which contains slurm/, launch/ and configs/.

    For a package that is installed from a wheel, return the prefix's share directory.
    """
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "slurm").is_dir():
        return checkout
    return Path(sys.prefix) / "share" / "frontier_llm"


def site_names() -> list[str]:
    """Return the names of the shipped sites."""
    return sorted(path.stem for path in (root_dir() / "slurm" / "sites").glob("*.yaml"))


def site_file(name: str) -> Path:
    """Return the path of a shipped site's file."""
    return root_dir() / "slurm" / "sites" / f"{name}.yaml"


def load_site(name_or_path: str | None = None) -> Site:
    """Load a shipped site by name, or a site file by path. Default: FRONTIER_LLM_SITE, or else `generic`.

    Raises ConfigError for an unknown name or an invalid key.
    """
    name_or_path = name_or_path or environ("FRONTIER_LLM_SITE") or "generic"
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if name_or_path not in site_names():
            raise ConfigError(
                f"no site {name_or_path!r}",
                suggest(name_or_path, site_names()) + "; or give the path of a site file",
                "--site",
            )
        path = site_file(name_or_path)
    content = with_machine_path(read_yaml(path), path.parent)
    if FORMER_WARNING_TIME in content and "warning_time_s" not in content:
        log.info(f"{path}: {FORMER_WARNING_TIME} is now called warning_time_s: write the new name")
        content["warning_time_s"] = content.pop(FORMER_WARNING_TIME)
    if isinstance(unknown := content.get("unknown"), dict):
        content["unknown"] = {key: meaning for key, meaning in unknown.items() if key not in content}
    if "partitions" not in content and isinstance(content.get("machine"), str):
        content["partitions"] = machine_partitions(content["machine"])
    return build(Site, content, where=str(path))


def machine_partitions(machine: str) -> dict[str, list[dict[str, float]]]:
    """Return the partitions of a machine file. Neighbouring bins with the same time limit are joined into one bin."""
    operations = load_machine(machine).operations
    bins = () if operations is None else sorted(operations.queue, key=lambda each: each.nodes_to)
    partitions: dict[str, list[dict[str, float]]] = {}
    for each in bins:
        limits = partitions.setdefault(each.partition or each.name, [])
        if limits and limits[-1]["max_hours"] == each.max_hours:
            limits.pop()
        limits.append({"max_nodes": each.nodes_to, "max_hours": each.max_hours})
    return partitions


def walltime_s(text: str) -> int | None:
    """Return Slurm's time formats in seconds: '90' (minutes), '1:30:00', '2-12'. None for any other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text)
    if match is None:
        return None
    clock = [int(part) for part in match[2].split(":")]
    starts_with_hours = match[1] is not None or len(clock) == 3
    hours, minutes, seconds, *_ = [*clock, 0, 0] if starts_with_hours else [0, *clock, 0]
    return ((int(match[1] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def parse_walltime(text: str) -> int:
    """Return the time in whole minutes, rounded up. Raises ConfigError for any other text."""
    seconds = walltime_s(text)
    if seconds is None:
        raise ConfigError(
            f"{text!r} is not a time",
            "write minutes, hours:minutes:seconds or days-hours:minutes:seconds",
            "--time",
        )
    return -(-seconds // 60)


def format_walltime(minutes: int) -> str:
    """720 -> '12:00:00'; 2880 -> '2-00:00:00'."""
    days, minutes = divmod(minutes, 24 * 60)
    clock = f"{minutes // 60:02}:{minutes % 60:02}:00"
    return f"{days}-{clock}" if days else clock


def longer_jobs(site: Site, nodes: int, minutes: int, partition: str | None) -> list[str]:
    """Return advice on how a job can run for `minutes`: more nodes, or another partition."""
    limits = site.limits(partition)
    bins = []
    if wider := next((limit for limit in limits if limit.max_hours * 60 >= minutes), None):
        below = max((limit.max_nodes for limit in limits if limit.max_nodes < wider.max_nodes), default=0)
        bins.append(f"{format_walltime(minutes)} is allowed from {below + 1} nodes")
    if roomier := [other for other in site.partitions if (site.max_minutes(nodes, other) or 0) >= minutes]:
        bins.append(f"--partition {roomier[0]} allows it")
    return bins


def whole_replicas(nodes: int, tasks_per_node: int, replica: int) -> list[int]:
    """Return the node counts closest to `nodes` whose ranks divide into complete replicas of `replica` ranks.

    The result contains `nodes` if its ranks do.
    """
    step = math.lcm(replica, tasks_per_node) // tasks_per_node
    return nearest(nodes, range(step, 2 * nodes + step + 1, step))


def request_problems(
    site: Site,
    nodes: int,
    minutes: int | None,
    account: str | None,
    partition: str | None,
) -> Iterator[Problem]:
    """Yield a problem for each property of the request that the site would refuse, with the limit and the nearest
    allowed value.
    """
    for key, meaning in site.unknown.items():
        what = f"the file of {site.name} has no `{key}`, for which no reliable source was found: {meaning}"
        yield Problem("--site", what, f"copy slurm/sites/{site.name}.yaml, add `{key}:`, and pass --site FILE")
    if site.account == "required" and not account:
        yield Problem("--account", f"{site.name} charges every job to a project", "pass -A PROJECT (e.g. -A ABC123)")
    if nodes < 1:
        yield Problem("--nodes", f"is {nodes}", "pass 1 or more")
    if minutes is not None and minutes < 1:
        yield Problem("--time", "is less than a minute", "leave it out to get the longest walltime of the site")
    if partition is not None and site.partitions and partition not in site.partitions:
        yield Problem("--partition", f"{site.name} has no partition {partition!r}", suggest(partition, site.partitions))
        return
    limits = site.limits(partition)
    name = partition or site.default_partition
    longest = site.max_minutes(nodes, partition)
    if limits and longest is None:
        most = limits[-1].max_nodes
        yield Problem("--nodes", f"is {nodes}, but {name} allows at most {most} nodes", f"--nodes {most}")
    elif longest is not None and minutes is not None and minutes > longest:
        what = f"{format_walltime(minutes)}, but {name} allows at most {format_walltime(longest)} for {nodes} nodes"
        shorter = f"--time {format_walltime(longest)}, and let the job continue itself"
        yield Problem("--time", what, "; ".join([shorter, *longer_jobs(site, nodes, minutes, partition)]))
