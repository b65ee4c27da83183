"""Collects the facts of one node for `doctor`, without judging them. srun runs it once per node. Needs no torch.

python -m frontier_llm.cluster.probe SETTINGS.json      prints a time stamp at once, then the facts as JSON
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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from frontier_llm.cluster.network_libraries import conflicts, find_rccl
from frontier_llm.cluster.sites import Site
from frontier_llm.config.fields import Section
from frontier_llm.files import package_digest
from frontier_llm.machine.env import CK_ATTENTION
from frontier_llm.machine.env import environment as machine_environment
from frontier_llm.machine.load import load_machine
from frontier_llm.run.installation import storage
from frontier_llm.run.rank_env import environ, environment, node_name
from frontier_llm.units import GIB

TIME_MARK = "probe-time "
FACTS_MARK = "probe-facts "
# srun splits a line of more than 1,024 bytes, and mixes its parts with lines of other nodes.
PIECE_BYTES = 800
# Number of further time stamps. On a busy node one stamp can be seconds late, but all stamps are hardly ever late.
MORE_STAMPS = 3
PAUSE_S = 0.2
NO_FI_INFO = "fi_info is not on PATH"


class Settings(Section):
    """Settings of the probe on every node."""

    site: Site
    run_dir: str
    system_root: str = "/"  # directory that contains sys/; {host} is replaced by the host's name (for tests)


@dataclass(frozen=True)
class Facts:
    """Facts of one node."""

    host: str
    gcd_memory_gib: tuple[float, ...]  # one entry per GCD
    gcds_refused: int  # GPUs that the driver hides: in a step without GPUs, or in a container
    cores: int  # cores that this process may use
    interfaces_down: tuple[str, ...]
    provider_error: str  # '' = usable, or the site names no provider
    plugin_error: str
    environment: dict[str, str]  # name -> value or digest, which must be equal on all nodes
    run_dir_error: str
    run_dir_write_s: float
    run_dir_free_bytes: int
    node_local_error: str
    node_local_free_bytes: int
    gcd_used_gib: tuple[float, ...] = ()  # memory in use, one entry per GCD; empty: the driver does not report it
    library_conflicts: tuple[str, ...] = ()  # descriptions of incompatible network libraries
    errors: tuple[int, int] | None = None  # (corrected, uncorrected) since the node's start; None: not counted


def probe(settings: Settings) -> Facts:
    """Collect the facts of this node."""
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
        gcd_used_gib=gcd_used_gib(root),
        library_conflicts=library_conflicts(settings.site.network_plugin),
        errors=memory_errors(root),
    )


def gcd_used_gib(root: Path) -> tuple[float, ...]:
    """Return the memory in use on each GPU in GiB, from the amdgpu driver."""
    files = sorted((root / "sys/class/drm").glob("card*/device/mem_info_vram_used"))
    texts = [_text(path) for path in files]
    return tuple(round(int(text) / GIB, 2) for text in texts if text.isdecimal())


def memory_errors(root: Path) -> tuple[int, int] | None:
    """Return (corrected, uncorrected) errors of all GPUs since the node's start. None if the driver counts none.

    Each file of the amdgpu driver (RAS) has a line `ue: N` and a line `ce: N`.
    """
    totals = {"ce": 0, "ue": 0}
    files = list((root / "sys/class/drm").glob("card*/device/ras/*_err_count"))
    for path in files:
        for line in _text(path).splitlines():
            kind, _, number = line.partition(":")
            if kind in totals and number.strip().isdecimal():
                totals[kind] += int(number)
    return (totals["ce"], totals["ue"]) if files else None


def _text(path: Path) -> str:
    """Return the content of a file of the driver. '' if the driver does not allow reading."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def gcd_memory_gib(root: Path) -> tuple[tuple[float, ...], int]:
    """Return (memory of each GPU in GiB, number of unreadable entries) from the kernel driver's (KFD) topology.

    Entries of CPU nodes, which have no SIMDs, are left out.
    """
    sizes = []
    refused = 0
    for node in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*")):
        try:
            properties = _properties(node / "properties")
            banks = [_properties(bank).get("size_in_bytes", 0) for bank in node.glob("mem_banks/*/properties")]
        except OSError:  # EPERM for a GPU that is not in the process's cgroup
            refused += 1
            continue
        if properties.get("simd_count", 0) > 0:
            sizes.append(round(sum(banks) / GIB, 1))
    return tuple(sizes), refused


def _properties(path: Path) -> dict[str, int]:
    """Return name → number. Raises OSError if the driver does not allow reading."""
    pairs = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].lstrip("-").isdigit()}


def interface_is_up(root: Path, name: str) -> bool:
    """Return True if the network interface exists and has a carrier."""
    try:
        return (root / "sys/class/net" / name / "operstate").read_text(encoding="utf-8").strip() == "up"
    except OSError:
        return False


def provider_error(provider: str | None) -> str:
    """Return the reason why libfabric's fi_info does not list `provider`. '' if it does."""
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
    """Return the dynamic loader's error for RCCL's network plugin. '' if the plugin can be loaded.

    The error names a missing dependency. A library in the variable NCCL_NET_PLUGIN takes precedence over `plugin`, as
    in RCCL. Frontier's module sets this variable.
    """
    if plugin is None:
        return ""
    try:
        ctypes.CDLL(_plugin_in_use(plugin))
    except OSError as error:
        return str(error)
    return ""


def _plugin_in_use(plugin: str) -> str:
    """Return the library in NCCL_NET_PLUGIN, or else the site's `plugin`."""
    named = environ("NCCL_NET_PLUGIN") or ""
    return named if ".so" in named else plugin


def library_conflicts(plugin: str | None) -> tuple[str, ...]:
    """Return the conflicts of RCCL, its plugin, libfabric and hwloc. () for a site without a plugin."""
    if plugin is None:
        return ()
    return tuple(conflicts(_plugin_in_use(plugin), find_rccl(), shutil.which("fi_info")))


def comparable_environment(site: Site) -> dict[str, str]:
    """Return values that must be equal on all nodes: interpreter, kernel, ROCm, package, the site's variables."""
    version = Path("/opt/rocm/.info/version")
    env = environment()
    of_machine = [variable.name for variable in machine_environment(load_machine(site.machine).environment, 2)]
    variables = (*site.environment, *of_machine, CK_ATTENTION)
    return {
        "python": f"{sys.version.split()[0]} at {sys.executable}",
        "kernel": platform.release(),
        "rocm": version.read_text(encoding="utf-8").strip() if version.is_file() else "none",
        "frontier_llm": package_digest(),
        "PYTHONPATH": env.get("PYTHONPATH", ""),
        **{name: env.get(name, "(not set)") for name in variables},
    }


def main(words: list[str]) -> int:
    """Print time stamps and the facts. The reader uses the time stamp with the smallest delay."""
    _say_time()
    settings = Settings.model_validate_json(Path(words[0]).read_text(encoding="utf-8"))
    for line in fact_lines(probe(settings)):
        _say(line)
    for _ in range(MORE_STAMPS):
        time.sleep(PAUSE_S)
        _say_time()
    return 0


def fact_lines(facts: Facts) -> list[str]:
    """Return the JSON text of the facts in numbered pieces, one a line: 'probe-facts HOST NUMBER/COUNT PIECE'."""
    text = json.dumps(asdict(facts))  # ASCII, so a character is a byte
    pieces = [text[start : start + PIECE_BYTES] for start in range(0, len(text), PIECE_BYTES)]
    return [f"{FACTS_MARK}{facts.host} {number}/{len(pieces)} {piece}" for number, piece in enumerate(pieces, 1)]


def joined_facts(pieces: Mapping[str, str]) -> Facts:
    """Return the facts of one host. `pieces` maps NUMBER/COUNT to the text of this piece.

    Raises ValueError, KeyError or TypeError if a piece is missing or damaged.
    """
    count = int(next(iter(pieces)).partition("/")[2])
    row = json.loads("".join(pieces[f"{number}/{count}"] for number in range(1, count + 1)))
    tuples = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return Facts(**{**row, **tuples})


def _say_time() -> None:
    _say(TIME_MARK + json.dumps({"host": node_name(), "unix_s": time.time()}))


def _say(line: str) -> None:
    """Print one line in a single write, so that srun cannot mix it with another node's line."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
