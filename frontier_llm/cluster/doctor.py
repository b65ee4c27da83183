"""Checks the nodes of an allocation before a run: collects facts from each node, and reports faults with a remedy."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from frontier_llm import log
from frontier_llm.cluster import slurm
from frontier_llm.cluster.node_errors import ErrorCounts, new_errors, read_history, record_counts
from frontier_llm.cluster.probe import FACTS_MARK, NO_FI_INFO, TIME_MARK, Facts, Settings, joined_facts, probe
from frontier_llm.cluster.readiness import Readiness
from frontier_llm.cluster.sites import Site
from frontier_llm.errors import FrontierError
from frontier_llm.machine.env import CK_ATTENTION, Setting
from frontier_llm.machine.load import load_machine
from frontier_llm.run import hostlist
from frontier_llm.run.rank_env import environment, rank_python
from frontier_llm.units import GIB, format_bytes, plural

MAX_SKEW_S = 2.0  # largest allowed clock difference; srun's own delay is below 0.3 s, and locks compare seconds.
MIN_GCD_GIB = 60.0  # a GCD has 64 GiB; a GCD with less has lost memory or is in use.
MAX_USED_GIB = 1.0  # memory in use before a start; the driver itself takes less.
SLOW_WRITE_S = 5.0  # a longer time to write 1 MiB gives a warning.
TIMEOUT_S = 45.0  # limit for the nodes' replies; with srun's start and end an examination takes less than a minute.
SRUN_GRACE_S = 5.0
REPEAT_S = 60.0  # time before an examination without any reply is repeated
OTHER_LIBFABRIC = "version `FABRIC_"  # part of the loader's error if libfabric is older than the plugin needs
NO_GCD = (
    "a login node has no GCDs: run this inside an allocation (salloc); if a compute node has none, exclude it and "
    "report it to the site (rocm-smi shows its GCDs)"
)
BROKEN = "exclude the node, and report it to the site (rocm-smi on the node shows its GCDs)"
MIN_LOCAL_BYTES = 4 * GIB  # space for the Python environment and the MIOpen cache


class NoResponse(FrontierError):
    """No node of the allocation has responded, for example because srun could not start the step."""


@dataclass(frozen=True)
class NodeFinding:
    """One fault, the hosts that have it, and its remedy."""

    check: str
    hosts: tuple[str, ...]
    what: str
    remedy: str
    fatal: bool = True  # False: the finding is a warning, and the run can start


@dataclass(frozen=True)
class Report:
    """All findings of one examination."""

    hosts: tuple[str, ...]
    findings: tuple[NodeFinding, ...]
    seconds: float
    installation: Readiness = field(default_factory=Readiness)  # the ranks' interpreter, data and run directory
    variables: tuple[Setting, ...] = ()  # environment variables that the ranks would get
    counts: Mapping[str, ErrorCounts] = field(default_factory=dict)  # memory errors by host

    @property
    def bad_hosts(self) -> tuple[str, ...]:
        """Hosts to exclude: they have a fatal finding that not all hosts share.

        A finding on all hosts is a fault of the site, not of a node.
        """
        named = {
            host
            for finding in self.findings
            if finding.fatal and len(finding.hosts) < len(self.hosts)
            for host in finding.hosts
        }
        return tuple(host for host in self.hosts if host in named)

    @property
    def shared_fault(self) -> bool:
        """True if all hosts have the same fatal finding. This is then a fault of the site, and no node is usable."""
        return any(finding.fatal and len(finding.hosts) == len(self.hosts) for finding in self.findings)

    @property
    def healthy(self) -> bool:
        """True if there is no fatal finding and no problem of the installation."""
        return not self.installation.problems and not any(finding.fatal for finding in self.findings)

    def as_dict(self) -> dict[str, object]:
        """Return the report for --json."""
        return {
            "healthy": self.healthy,
            "hosts": list(self.hosts),
            "exclude": hostlist.compress(self.bad_hosts),
            "seconds": round(self.seconds, 2),
            "findings": [asdict(finding) for finding in self.findings],
            "installation": [asdict(problem) for problem in self.installation.problems],
            "weight_gradients": self.installation.weight_gradients,
            "variables": [asdict(variable) for variable in self.variables],
        }

    def render(self) -> str:
        """Return the report for a terminal."""
        health = "healthy" if self.healthy else "NOT healthy"
        lines = []
        if self.variables:
            lines.append(f"environment of the ranks on {plural(len(self.hosts), 'node')}:")
            lines += [f"  {variable.describe()}" for variable in self.variables]
        lines.append(f"{plural(len(self.hosts), 'node')} examined in {self.seconds:.1f} s: {health}")
        for finding in self.findings:
            mark = "error" if finding.fatal else "warning"
            lines += [
                f"{mark}: {finding.check} on {hostlist.compress(finding.hosts)}: {finding.what}",
                f"    fix: {finding.remedy}",
            ]
        lines += [f"error: {problem}" for problem in self.installation.problems]
        lines += self.installation.notes()
        if self.bad_hosts:
            lines.append(f"exclude the bad nodes: --exclude={hostlist.compress(self.bad_hosts)}")
        return "\n".join(lines)


def examine(settings: Settings, nodes: Sequence[str], needed_bytes: int = 0, timeout_s: float = TIMEOUT_S) -> Report:
    """Probe `nodes` of this allocation, or this machine if `nodes` is empty, and judge the facts.

    `needed_bytes` is the size of the first checkpoints of a start (`cluster.disk`).
    """
    started_s = time.monotonic()
    if nodes:
        log.info(f"examining {len(nodes)} nodes, for at most {timeout_s:.0f} s")
        facts, skew_s = ask_nodes(settings, nodes, timeout_s)
    else:
        own = probe(settings)
        facts = {own.host: own}
        skew_s = {own.host: 0.0}
        nodes = [own.host]
    history = read_history(Path(settings.run_dir))
    findings = judge(settings.site, facts, skew_s, nodes, needed_bytes, history)
    counts = {host: ErrorCounts(*fact.errors) for host, fact in facts.items() if fact.errors is not None}
    return Report(tuple(nodes), tuple(findings), time.monotonic() - started_s, counts=counts)


def preflight(site: Site, directory: Path, nodes: Sequence[str]) -> tuple[str, ...]:
    """Examine an allocation and return its bad nodes. Records the nodes' error counts in the run directory.

    If no node responds, the examination is repeated once, because srun can fail for a short time. Raises FrontierError
    if all nodes share a fatal fault, because other nodes of the site would have it, too.
    """
    settings = Settings(site=site, run_dir=str(directory))
    try:
        report = examine(settings, _usable(nodes))
    except NoResponse as error:
        log.warn(f"{error}; the nodes are examined once more in {REPEAT_S:.0f} s")
        time.sleep(REPEAT_S)
        report = examine(settings, _usable(nodes))
    record_counts(directory, report.counts)
    log.info(report.render())
    if report.shared_fault:
        what = f"none of {plural(len(nodes), 'node')} can be used, because all have the same fault"
        raise FrontierError(what, "see the findings above", "preflight")
    return report.bad_hosts


def _usable(nodes: Sequence[str]) -> list[str]:
    """Return the nodes that srun can reach. It refuses a step that includes any other node."""
    gone = slurm.unhealthy(nodes)
    return [node for node in nodes if node not in gone]


def _job_has_gpus() -> bool:
    """Return True if a step can request GPUs. Slurm refuses a step that requests more than its job has."""
    asked = environment()
    return any(name in asked for name in ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_GPUS_PER_NODE"))


def ask_nodes(settings: Settings, nodes: Sequence[str], timeout_s: float) -> tuple[dict[str, Facts], dict[str, float]]:
    """Return facts and clock offset in seconds by host. A host without a reply within `timeout_s` is missing.

    Raises NoResponse if no host replies.
    """
    # The interpreter of the ranks may be in a container, where the probe finds the same libfabric and plugin as the
    # ranks.
    python = rank_python()
    Path(settings.run_dir).mkdir(parents=True, exist_ok=True)
    count = len(nodes)
    with (
        tempfile.NamedTemporaryFile("w", dir=settings.run_dir, prefix=".doctor-", suffix=".json") as file,
        tempfile.TemporaryFile("w+") as complaints,  # not a pipe, which error messages of hundreds of nodes would fill
    ):
        file.write(settings.model_dump_json())
        file.flush()
        gpus = [f"--gpus-per-node={settings.site.gpus_per_node}"] if _job_has_gpus() else []
        command = [
            "srun",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            f"--nodelist={hostlist.compress(nodes)}",
            *gpus,
            "--cpu-bind=none",
            "--overlap",
            "--kill-on-bad-exit=0",
            f"--time={math.ceil(timeout_s / 60)}",
            python,
            "-P",
            "-m",
            "frontier_llm.cluster.probe",
            file.name,
        ]
        process = subprocess.Popen(  # noqa: S603 a list
            command, stdout=subprocess.PIPE, stderr=complaints, errors="replace", env=environment()
        )
        # srun's --time has a resolution of one minute, and one hung node must not delay the others' replies
        ends = [threading.Timer(timeout_s, process.terminate), threading.Timer(timeout_s + SRUN_GRACE_S, process.kill)]
        for end in ends:
            end.start()
        assert process.stdout is not None
        facts, offsets = _read_answers(process.stdout)
        process.wait()
        for end in ends:
            end.cancel()
        complaints.seek(0)
        message = complaints.read().strip()[-500:]
    if not facts:
        raise NoResponse(f"no node responded: {message}", f"try srun {python} -V on the nodes", "doctor")
    # error that all offsets have in common: the delay of the output, and the clock error of this host
    middle = statistics.median(offsets.values()) if offsets else 0.0
    return facts, {host: offset - middle for host, offset in offsets.items()}


def _read_answers(lines: Iterable[str]) -> tuple[dict[str, Facts], dict[str, float]]:
    """Return facts by host, and clock offsets by host: a node's time stamp minus this host's time when it arrives.

    A delay makes the offset smaller. Therefore the largest offset of each host is kept, because it has the smallest
    delay. Damaged lines are left out, so that a host with damaged facts counts as one that did not respond.
    """
    pieces: dict[str, dict[str, str]] = defaultdict(dict)
    facts: dict[str, Facts] = {}
    offsets: dict[str, float] = {}
    damaged = (ValueError, KeyError, TypeError)
    for line in lines:
        with suppress(*damaged):
            if line.startswith(TIME_MARK):
                stamp = json.loads(line.removeprefix(TIME_MARK))
                offset_s = stamp["unix_s"] - time.time()
                offsets[stamp["host"]] = max(offset_s, offsets.get(stamp["host"], offset_s))
            elif line.startswith(FACTS_MARK):
                host, number, piece = line.removeprefix(FACTS_MARK).rstrip("\n").split(" ", 2)
                pieces[host][number] = piece
    for host, numbered in pieces.items():
        with suppress(*damaged):
            facts[host] = joined_facts(numbered)
    return facts, offsets


def judge(
    site: Site,
    facts: Mapping[str, Facts],
    skew_s: Mapping[str, float],
    nodes: Sequence[str],
    needed_bytes: int,
    history: Mapping[str, Sequence[ErrorCounts]] | None = None,
) -> list[NodeFinding]:
    """Return every finding. Hosts with the same finding are grouped.

    `history` has the error counts of earlier examinations by host.
    """
    earlier_counts = history or {}
    hosts: dict[NodeFinding, list[str]] = defaultdict(list)
    architecture = load_machine(site.machine).device.architecture
    for host in nodes:
        if host not in facts:
            hosts[NodeFinding("node", (), "did not respond", "exclude it, and report it to the site")].append(host)
            continue
        for finding in _findings(site, facts[host], skew_s.get(host, 0.0), needed_bytes, len(nodes) > 1):
            hosts[finding].append(host)
        for finding in _variable_findings(architecture, facts[host]):
            hosts[finding].append(host)
        for finding in _error_findings(facts[host], earlier_counts.get(host, ())):
            hosts[finding].append(host)
    for name, expected, value, others in different_values(facts):
        remedy = "load the modules in the job script, and remove settings from ~/.bashrc"
        hosts[NodeFinding("environment", (), f"{name} is {value!r}, but {expected!r} on other nodes", remedy)] += others
    return [replace(finding, hosts=tuple(names)) for finding, names in hosts.items()]


def _findings(site: Site, fact: Facts, skew_s: float, needed_bytes: int, networked: bool) -> Iterator[NodeFinding]:
    """Yield the findings of one node. The caller adds the node's name."""
    yield from _gcd_findings(site, fact)
    yield from _network_findings(site, fact, networked)
    yield from _storage_findings(fact, needed_bytes)
    if abs(skew_s) > MAX_SKEW_S:
        remedy = "exclude it, and report it to the site: its time service is at fault (chronyc tracking)"
        yield NodeFinding("clock", (), f"differs by {skew_s:+.1f} s from the other nodes", remedy)


def _variable_findings(architecture: str | None, fact: Facts) -> Iterator[NodeFinding]:
    """Yield a warning for a variable with which torch is known to fail on devices of this architecture."""
    if architecture == "gfx90a" and fact.environment.get(CK_ATTENTION) == "1":
        what = f"{CK_ATTENTION}=1: torch 2.12's attention ends with a segmentation fault on gfx90a (AOTriton 0.12b)"
        yield NodeFinding("environment", (), what, f"unset {CK_ATTENTION}", fatal=False)


def _error_findings(fact: Facts, history: Sequence[ErrorCounts]) -> Iterator[NodeFinding]:
    """Yield findings of memory errors, and of memory that another program still uses."""
    if fact.errors is not None and (reason := new_errors(history, ErrorCounts(*fact.errors))):
        yield NodeFinding("memory errors", (), reason, BROKEN)
    used = [gib for gib in fact.gcd_used_gib if gib > MAX_USED_GIB]
    if used:
        what = f"{plural(len(used), 'GCD')} with memory in use, up to {max(used):g} GiB"
        yield NodeFinding("GCD memory", (), what, "exclude the node: another program still runs on it (rocm-smi)")


def _gcd_findings(site: Site, fact: Facts) -> Iterator[NodeFinding]:
    memory = fact.gcd_memory_gib
    wanted = site.tasks_per_node * site.cpus_per_task
    weak = [gib for gib in memory if gib < MIN_GCD_GIB]
    is_bound = site.bind == "gcd"
    if is_bound and len(memory) != site.gpus_per_node:
        if fact.gcds_refused:
            what = (
                f"unknown: the driver shows {len(memory)} of {site.gpus_per_node} and denies access to "
                f"{fact.gcds_refused}"
            )
            remedy = f"run this in a step that has the node's GPUs (srun --gpus-per-node={site.gpus_per_node})"
            yield NodeFinding("GCDs", (), what, remedy, fatal=False)
        else:
            what = f"{len(memory)} of {site.gpus_per_node} are visible"
            yield NodeFinding("GCDs", (), what, BROKEN if memory else NO_GCD)
    if weak:
        what = (
            f"{min(weak)} GiB on the GCD with the least memory, but {MIN_GCD_GIB:.0f} GiB needed ({len(weak)} GCDs "
            "have less)"
        )
        yield NodeFinding("GCD memory", (), what, "exclude the node: a GCD has lost memory or is in use")
    if is_bound and fact.cores < wanted:
        remedy = f"request --cpus-per-task={site.cpus_per_task} and --exclusive"
        yield NodeFinding("cores", (), f"{fact.cores} usable, {wanted} needed", remedy)


def _network_findings(site: Site, fact: Facts, networked: bool) -> Iterator[NodeFinding]:
    """Yield findings of the network. They are not fatal for a job of one node.

    Such a job uses no network, and Slurm gives it access to Slingshot only on request.
    """
    if fact.interfaces_down:
        what = f"{', '.join(fact.interfaces_down)} down or missing"
        yield NodeFinding("network", (), what, "exclude the node, and report it to the site")
    if fact.provider_error:
        remedy = "a job of one node does not need it; to test it: --network=single_node_vni"
        if networked:
            remedy = "load the site's libfabric module"
        what = f"no {site.libfabric_provider} provider: {fact.provider_error}"
        is_fatal = networked and fact.provider_error != NO_FI_INFO
        yield NodeFinding("libfabric", (), what, remedy, fatal=is_fatal)
    for conflict in fact.library_conflicts:
        remedy = "load modules, or use an image, in which RCCL, its plugin, libfabric and hwloc were built together"
        yield NodeFinding("network libraries", (), conflict, remedy, fatal=False)
    if fact.plugin_error:
        what = f"{fact.plugin_error}; RCCL would silently use TCP (308 ms instead of 19 ms for 1 GiB)"
        remedy = "module load rccl-net-plugin, or bind the plugin into the container"
        if OTHER_LIBFABRIC in fact.plugin_error:
            remedy = "the plugin was built with a newer libfabric: load that libfabric, or a plugin for this one"
        yield NodeFinding("RCCL plugin", (), what, remedy, fatal=networked)


def _storage_findings(fact: Facts, needed_bytes: int) -> Iterator[NodeFinding]:
    if fact.run_dir_error:
        remedy = "choose a train.run_dir that every node can write"
        yield NodeFinding("run directory", (), fact.run_dir_error, remedy)
    elif fact.run_dir_free_bytes < needed_bytes:
        free = format_bytes(fact.run_dir_free_bytes)
        what = f"{free} free, {format_bytes(needed_bytes)} needed for logs and the first checkpoints"
        remedy = "free space, request a larger quota, or choose another train.run_dir"
        yield NodeFinding("run directory", (), what, remedy)
    elif fact.run_dir_write_s > SLOW_WRITE_S:
        what = f"writing 1 MiB takes {fact.run_dir_write_s:.1f} s, more than {SLOW_WRITE_S:.0f} s"
        yield NodeFinding(
            "run directory", (), what, "choose another file system, and report it to the site", fatal=False
        )
    if fact.node_local_error:
        remedy = "request nodes with a local disk (--constraint=nvme)"
        yield NodeFinding("local disk", (), fact.node_local_error, remedy)
    elif fact.node_local_free_bytes < MIN_LOCAL_BYTES:
        free = format_bytes(fact.node_local_free_bytes)
        what = f"{free} free, {format_bytes(MIN_LOCAL_BYTES)} needed for environment and caches"
        yield NodeFinding("local disk", (), what, "delete files there, or exclude the node")


def different_values(facts: Mapping[str, Facts]) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield (name, the majority's value, another value, hosts with that value) for values that differ."""
    for name in sorted({name for fact in facts.values() for name in fact.environment}):
        values = {host: fact.environment.get(name, "(not set)") for host, fact in facts.items()}
        expected, _ = Counter(values.values()).most_common(1)[0]
        for other in sorted(set(values.values()) - {expected}):
            yield name, expected, other, [host for host, value in values.items() if value == other]
