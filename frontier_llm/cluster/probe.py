"""What one node says about itself for `doctor`: facts, not verdicts. Run once per node by srun; needs no torch.

python -m frontier_llm.cluster.probe SETTINGS.json      prints a time stamp at once, then one JSON line of facts
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from frontier_llm.cluster.sites import Site
from frontier_llm.config.fields import Section
from frontier_llm.files import package_digest
from frontier_llm.machine.env import environment as machine_environment
from frontier_llm.run.installation import storage
from frontier_llm.run.rank_env import environ, environment, node_name
from frontier_llm.units import GIB

TIME_MARK = "probe-time "
FACTS_MARK = "probe-facts "
# on a busy node a stamp may be late by seconds, hardly all of them
MORE_STAMPS = 3
PAUSE_S = 0.2
NO_FI_INFO = "fi_info is not on PATH"


class Settings(Section):
    """What every node is asked to look at."""

    site: Site
    run_dir: str
    system_root: str = "/"  # where /sys is looked for; {host} is replaced (tests point it at planted trees)


@dataclass(frozen=True)
class Facts:
    """One node's answers."""

    host: str
    gcd_memory_gib: tuple[float, ...]  # one entry per GCD
    gcds_refused: int  # that the driver does not let this process read: in a step without GPUs, or in a container
    cores: int  # that this process may use
    interfaces_down: tuple[str, ...]
    provider_error: str  # '' = usable or not asked
    plugin_error: str
    environment: dict[str, str]  # name -> value or digest, to be compared
    run_dir_error: str
    run_dir_write_s: float
    run_dir_free_bytes: int
    node_local_error: str
    node_local_free_bytes: int


def probe(settings: Settings) -> Facts:
    """Look at everything once."""
    host = node_name()
    root = Path(settings.system_root.replace("{host}", host))
    run_error, run_free, run_s = storage(Path(settings.run_dir), host)
    local_error, local_free, _ = storage(Path(os.path.expandvars(settings.site.node_local)), host)
    memory, refused = gcd_memory_gib(root)
    return Facts(
        host=host,
        gcd_memory_gib=memory,
        gcds_refused=refused,
        cores=len(os.sched_getaffinity(0)),
        interfaces_down=tuple(name for name in settings.site.interfaces if not interface_is_up(root, name)),
        provider_error=provider_error(settings.site.libfabric_provider),
        plugin_error=plugin_error(settings.site.network_plugin),
        environment=comparable_environment(settings.site),
        run_dir_error=run_error,
        run_dir_write_s=run_s,
        run_dir_free_bytes=run_free,
        node_local_error=local_error,
        node_local_free_bytes=local_free,
    )


def gcd_memory_gib(root: Path) -> tuple[tuple[float, ...], int]:
    """(memory of each GPU that the kernel driver (KFD) shows, how many entries it refuses to show); a CPU node of
    its topology has no SIMDs.
    """
    sizes = []
    refused = 0
    for node in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*")):
        try:
            properties = _properties(node / "properties")
            banks = [_properties(bank).get("size_in_bytes", 0) for bank in node.glob("mem_banks/*/properties")]
        except OSError:  # EPERM, of a GPU that the process's cgroup does not have
            refused += 1
            continue
        if properties.get("simd_count", 0) > 0:
            sizes.append(round(sum(banks) / GIB, 1))
    return tuple(sizes), refused


def _properties(path: Path) -> dict[str, int]:
    """Name → number. Raises OSError where the driver does not let it be read."""
    pairs = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].lstrip("-").isdigit()}


def interface_is_up(root: Path, name: str) -> bool:
    """True when the network interface exists and has a carrier."""
    try:
        return (root / "sys/class/net" / name / "operstate").read_text(encoding="utf-8").strip() == "up"
    except OSError:
        return False


def provider_error(provider: str | None) -> str:
    """Why libfabric does not offer `provider`, by its own fi_info; '' when it does."""
    if provider is None:
        return ""
    tool = shutil.which("fi_info")
    if tool is None:
        return NO_FI_INFO
    done = subprocess.run([tool, "-p", provider], capture_output=True, errors="replace", timeout=30, check=False)  # noqa: S603 a list
    return (
        ""
        if done.returncode == 0 and "provider" in done.stdout
        else (done.stderr.strip() or f"fi_info -p {provider} finds nothing")
    )


def plugin_error(plugin: str | None) -> str:
    """Why the dynamic loader cannot open RCCL's network plugin; '' when it can. Its message names a missing dependency.

    NCCL_NET_PLUGIN, which Frontier's module sets, comes first, as for RCCL itself.
    """
    if plugin is None:
        return ""
    named = environ("NCCL_NET_PLUGIN") or ""
    try:
        ctypes.CDLL(named if ".so" in named else plugin)
    except OSError as error:
        return str(error)
    return ""


def comparable_environment(site: Site) -> dict[str, str]:
    """What must not differ between nodes: interpreter, kernel, ROCm, our code, the site's variables."""
    version = Path("/opt/rocm/.info/version")
    env = environment()
    variables = (*site.environment, *(variable.name for variable in machine_environment(site.machine, 2)))
    return {
        "python": f"{sys.version.split()[0]} at {sys.executable}",
        "kernel": platform.release(),
        "rocm": version.read_text(encoding="utf-8").strip() if version.is_file() else "none",
        "frontier_llm": package_digest(),
        "PYTHONPATH": env.get("PYTHONPATH", ""),
        **{name: env.get(name, "(not set)") for name in variables},
    }


def main(words: list[str]) -> int:
    """The time stamps go alone: the reader notes when each arrives, and believes the one with the least delay."""
    _say_time()
    settings = Settings.model_validate_json(Path(words[0]).read_text(encoding="utf-8"))
    _say(FACTS_MARK, asdict(probe(settings)))
    for _ in range(MORE_STAMPS):
        time.sleep(PAUSE_S)
        _say_time()
    return 0


def _say_time() -> None:
    _say(TIME_MARK, {"host": node_name(), "unix_s": time.time()})


def _say(mark: str, content: dict[str, object]) -> None:
    """One line in one write, so that srun cannot mix it with another node's."""
    os.write(1, f"{mark}{json.dumps(content)}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
