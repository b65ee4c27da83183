"""Starts a real Slurm on this machine: one slurmctld and several slurmds that pretend to be nodes of Frontier or LUMI.

Each node claims the cores, threads and reserved cores of its `NodeShape` and 8 GPUs. The GPUs are character devices
made with mknod, because Slurm requires files. Authentication is off (`auth/none`), so the ports listen on loopback.
Tasks are not bound to the claimed cores, because this machine has fewer. Partitions of powered-down cloud nodes, as
large as Frontier and LUMI, never run a job. They are used by `sbatch --test-only`. Tested with Slurm 22.05.8. Debian
12: `apt-get install slurm-wlm`. The daemons need root.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from frontier_llm.machine.affinity import NODE

ROOT = Path(__file__).resolve().parents[2]
FRONTIER_NODES = 9408
LUMI_NODES = 2978
GPUS = 8
TESTED_VERSION = "22.05"
SLURMD_TIMEOUT_S = 20  # with a shorter timeout, a daemon that is delayed by load counts as dead
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


@dataclass(frozen=True)
class NodeShape:
    """Description of a node in slurm.conf. With `SlurmdParameters=config_overrides` slurmd accepts it without a
    check.
    """

    memory_mib: int
    features: str | None = None
    cores: int = 64  # number of cores, all on one socket
    threads_per_core: int = 2
    # Low-noise mode: the first core of each L3 region.
    reserved_cores: tuple[int, ...] = tuple(place.cores[0] for place in NODE)

    @property
    def job_cpus(self) -> int:
        """Hardware threads that are available to jobs."""
        return (self.cores - len(self.reserved_cores)) * self.threads_per_core

    @property
    def words(self) -> str:
        """The words of a NodeName line in slurm.conf that describe the node's shape."""
        # abstract CPU ids of Slurm: the threads of a core are consecutive
        reserved = ",".join(str(core * self.threads_per_core) for core in sorted(self.reserved_cores))
        specialised = f"CpuSpecList={reserved} " if reserved else ""
        return (
            f"CPUs={self.cores * self.threads_per_core} Sockets=1 CoresPerSocket={self.cores} "
            f"ThreadsPerCore={self.threads_per_core} "
            f"{specialised}RealMemory={self.memory_mib} Gres=gpu:{GPUS}"
            + (f" Features={self.features}" if self.features else "")
        )


FRONTIER_NODE = NodeShape(memory_mib=512_000, features="nvme")
LUMI_NODE = NodeShape(memory_mib=480 * 1024)
# Shape of the nodes for site `local`, whose jobs share nodes.
FLAT_NODE = NodeShape(memory_mib=500_000, features="nvme", threads_per_core=1, reserved_cores=())


def why_unavailable() -> str | None:
    """Return the reason why no local Slurm can be started here, or None."""
    needed = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
    missing = [name for name in needed if find_program(name) is None]
    if missing:
        return f"Slurm is not installed (no {', '.join(missing)}): apt-get install slurm-wlm"
    if os.geteuid() != 0:
        return "slurmd needs root to start tasks and mknod its devices"
    return None


def find_program(name: str) -> str | None:
    """Return the path of a program, also of a daemon. None if it is not installed."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


# each port is tried once; clusters of parallel test processes begin at different ports
_candidates = itertools.count(12_001 + os.getpid() * 7 % 6000)


def free_ports(count: int) -> list[int]:
    """Return ports below the ephemeral range that are free now."""
    ports: list[int] = []
    while len(ports) < count:
        candidate = next(_candidates)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", candidate))
            ports.append(candidate)
    return ports


_LIBC = ctypes.CDLL(None)


def _die_with_the_tests() -> None:
    """Let the kernel kill this daemon when the test run dies (PR_SET_PDEATHSIG)."""
    _LIBC.prctl(1, signal.SIGKILL)


class LocalSlurm:
    """The running cluster. With the variables in `env`, Slurm commands and this project's programs use it."""

    def __init__(
        self, nodes: int = 4, shape: NodeShape = FLAT_NODE, name: str = "local", settings: Sequence[str] = ()
    ) -> None:
        """`settings` are additional lines of slurm.conf."""
        self.settings = settings
        self.nodes = [f"n{index}" for index in range(nodes)]
        self.shape = shape
        self.name = name  # name of the cluster; if it is "frontier", the running nodes are in the partition batch
        self.root = Path(tempfile.mkdtemp(prefix="fl-slurm-"))
        self.conf = self.root / "slurm.conf"
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "SLURM_CONF": str(self.conf),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin",
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._write_conf()

    def _write_conf(self) -> None:
        host = socket.gethostname().split(".")[0]
        ports = free_ports(1 + len(self.nodes))
        for name in ("state", "dev", "logs", *(f"spool-{node}" for node in self.nodes)):
            (self.root / name).mkdir()
        lines = [
            f"ClusterName={self.name}",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            # Ranks derive their port from the job id. Clusters that run at the same time must not have equal ids.
            f"FirstJobId={ports[0]}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/none",
            "CredType=cred/none",
            "AuthInfo=cred_expire=5",  # a requeued job is held this long; the default is 120 s
            "MpiDefault=none",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SwitchType=switch/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2,nohold_on_prolog_fail",
            "GresTypes=gpu",
            "SlurmdParameters=config_overrides",
            "ReturnToService=2",
            f"SlurmdTimeout={SLURMD_TIMEOUT_S}",
            "SlurmctldTimeout=30",
            "KillWait=3",
            "MinJobAge=600",
            "CompleteWait=0",
            "MaxNodeCount=16000",
            "SuspendProgram=/bin/true",
            "ResumeProgram=/bin/true",
            "SuspendTime=INFINITE",
            f"StateSaveLocation={self.root}/state",
            f"SlurmdSpoolDir={self.root}/spool-%n",
            f"SlurmctldPidFile={self.root}/slurmctld.pid",
            f"SlurmdPidFile={self.root}/slurmd-%n.pid",
            f"SlurmctldLogFile={self.root}/logs/slurmctld.log",
            f"SlurmdLogFile={self.root}/logs/slurmd-%n.log",
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {self.shape.words} State=UNKNOWN"
                for node, port in zip(self.nodes, ports[1:], strict=True)
            ),
            *(
                f"NodeName={prefix}[{1:0{width}}-{count:0{width}}] NodeAddr=127.0.0.1 {shape.words} Weight=1000 State=CLOUD"  # noqa: E501
                for prefix, width, count, shape in (
                    ("frontier", 5, FRONTIER_NODES, FRONTIER_NODE),
                    ("nid", 6, LUMI_NODES, LUMI_NODE),
                )
            ),
            f"PartitionName=local Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP",
            f"PartitionName=batch "
            f"Nodes={','.join([*self.nodes, '']) if self.name == 'frontier' else ''}frontier[00001-{FRONTIER_NODES:05}] "  # noqa: E501
            f"MaxTime=12:00:00 State=UP",
            "PartitionName=extended Nodes=frontier[00001-00064] MaxTime=24:00:00 State=UP",
            f"PartitionName=standard-g Nodes=nid[000001-{LUMI_NODES:06}] MaxTime=2-00:00:00 State=UP",
            "PartitionName=dev-g Nodes=nid[000001-000032] MaxTime=03:00:00 State=UP",
            *self.settings,
        ]
        self.conf.write_text("\n".join(lines) + "\n", encoding="utf-8")
        gres = []
        for node in self.nodes:
            for index in range(GPUS):
                os.mknod(self.root / "dev" / f"{node}-gpu{index}", 0o666 | 0o020000, os.makedev(1, 3))
            gres.append(f"NodeName={node} Name=gpu File={self.root}/dev/{node}-gpu[0-{GPUS - 1}]")
        gres += [f"NodeName=frontier[00001-{FRONTIER_NODES:05}],nid[000001-{LUMI_NODES:06}] Name=gpu Count={GPUS}"]
        (self.root / "gres.conf").write_text("\n".join(gres) + "\n", encoding="utf-8")

    def start(self, timeout_s: float = 240.0) -> None:
        """Start the daemons and wait until every node is idle."""
        self._spawn("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
        for node in self.nodes:
            self.start_node(node)
        self.wait_for(lambda: self.node_states() == dict.fromkeys(self.nodes, "IDLE"), timeout_s, "idle nodes")

    def start_node(self, node: str) -> None:
        """Start one slurmd, possibly again."""
        self._spawn(node, ["slurmd", "-D", "-N", node, "-f", str(self.conf)])

    def kill_node(self, node: str) -> None:
        """Kill one slurmd with signal 9, as if the node had lost its network. The processes that it started
        continue.
        """
        self.daemons[node].kill()
        self.daemons[node].wait(10)

    def _spawn(self, name: str, command: list[str]) -> None:
        command[0] = find_program(command[0]) or command[0]
        log = (self.root / "logs" / f"{name}.out").open("ab")
        self.daemons[name] = subprocess.Popen(
            command,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_the_tests,
        )
        log.close()

    def run(
        self,
        *command: str,
        cwd: Path | None = None,
        check: bool = True,
        env: dict[str, str] | None = None,
        timeout_s: float = 60,
    ) -> str:
        """Return stdout of a command on this cluster. Raises AssertionError with stderr if the command fails and
        `check` is set.
        """
        done = subprocess.run(
            command, env={**self.env, **(env or {})}, cwd=cwd, capture_output=True, text=True, timeout=timeout_s
        )
        assert not check or done.returncode == 0, f"{command} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + ("" if check else done.stderr)

    def node_states(self) -> dict[str, str]:
        """Return {'n0': 'IDLE', …}. Flags such as * (not responding) are removed from the state."""
        text = self.run("sinfo", "--noheader", "--Node", "--partition=local", "--format=%N %T", check=False)
        rows = [line.split() for line in text.splitlines()]
        return {row[0]: row[1].upper().rstrip("*~#$@+-") for row in rows if len(row) == 2}

    def job(self, job_id: str) -> dict[str, str]:
        """Return `scontrol show job` as a mapping, or an empty one for an unknown job."""
        text = self.run("scontrol", "show", "job", "--oneliner", job_id, check=False)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def submit(self, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> str:
        """Submit a job with `sbatch --parsable …` and return its id."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, env=env).strip().split(";")[0]

    def wait_job(self, job_id: str, timeout_s: float = 120.0) -> dict[str, str]:
        """Wait for the end of a job and return it."""
        self.wait_for(
            lambda: self.job(job_id).get("JobState") in ENDED, timeout_s, f"end of job {job_id}: {self.job(job_id)}"
        )
        return self.job(job_id)

    def queued(self) -> list[str]:
        """Return the ids of jobs that are pending or running."""
        return self.run("squeue", "--noheader", "--format=%A", "--states=PENDING,RUNNING,COMPLETING,SUSPENDED").split()

    @staticmethod
    def wait_for(condition: object, timeout_s: float, what: str, poll_s: float = 0.5) -> None:
        """Poll until the condition is true. Raises AssertionError naming `what` at the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline_s, f"no {what} within {timeout_s:.0f} s"
            time.sleep(poll_s)

    def processes(self) -> list[psutil.Process]:
        """Return every process of this cluster, orphans included.

        A process belongs to it if its environment names this cluster's slurm.conf, or if it has one of its files open.
        /proc is read directly. psutil cannot parse the environment of a slurmstepd, which has written its title over
        the beginning.
        """
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and self._is_ours(Path(f"/proc/{process.pid}")):
                    found.append(process)
        return found

    def _is_ours(self, process: Path) -> bool:
        if str(self.root).encode() in (process / "environ").read_bytes():
            return True
        return any(os.readlink(file).startswith(f"{self.root}/") for file in (process / "fd").iterdir())

    def stop(self) -> None:
        """Cancel the jobs, end the daemons, kill remaining processes, remove the files."""
        with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
            self.run("scancel", "--user=root", check=False, timeout_s=10)
            self.wait_for(lambda: not self.queued(), 10, "empty queue")
        for daemon in self.daemons.values():
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
        deadline_s = time.monotonic() + 30
        # Repeat this, because a killed process may have started further processes before its end.
        while (left := self.processes()) and time.monotonic() < deadline_s:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        for daemon in self.daemons.values():
            daemon.wait(5)
        shutil.rmtree(self.root, ignore_errors=True)


@contextlib.contextmanager
def local_slurm(
    nodes: int = 4, shape: NodeShape = FLAT_NODE, name: str = "local", settings: Sequence[str] = ()
) -> Iterator[LocalSlurm]:
    """Start a cluster and remove it afterwards."""
    cluster = LocalSlurm(nodes, shape, name, settings)
    try:
        cluster.start()
        yield cluster
    except AssertionError as error:
        logs = "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-600:]}"
            for path in sorted((cluster.root / "logs").glob("*"))
        )
        raise AssertionError(f"{error}\n{logs}") from error
    finally:
        cluster.stop()
