"""Finds network libraries of a node that are incompatible with each other. Needs no torch.

* RCCL's network plugin (aws-ofi-nccl) and libfabric: the plugin loads another libfabric than the site's tools do.
* hwloc and RCCL: hwloc, which the plugin loads, uses another library for GPU management (rocm_smi up to ROCm 7.2.4,
  amd_smi from 7.14) than RCCL. Processes that load both libraries crash at their exit.

    python -m frontier_llm.cluster.network_libraries PLUGIN [RCCL]      loads them as a rank does, and prints JSON

The libraries are loaded in a child process, because a conflict can end the process.
"""

from __future__ import annotations

import ctypes
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from frontier_llm.units import strict_json

# `doctor` waits 45 s for a node. The check of the libfabric provider may take 30 s of this time.
LOAD_TIMEOUT_S = 7.0
VERSION_TIMEOUT_S = 3.0
_MANAGEMENT = re.compile(r"/lib(rocm_smi64|amd_smi)\.so[^/]*$")
_HWLOC = re.compile(r"/libhwloc\.so[^/]*$")
_FABRIC_VERSION = re.compile(r"^libfabric: (\d+\.\d+)", re.MULTILINE)  # line of fi_info --version


@dataclass(frozen=True)
class Loaded:
    """Libraries that RCCL and its plugin load."""

    libfabric: str  # version such as 2.3; '' if the plugin loads no libfabric
    rccl_management: tuple[str, ...]  # paths of GPU management libraries that RCCL loads
    plugin_management: tuple[str, ...]  # paths of other GPU management libraries that the plugin and hwloc load


def load(plugin: str, rccl: str) -> Loaded:
    """Load RCCL, then its plugin and hwloc's component for AMD GPUs. Raises OSError if the plugin cannot be loaded."""
    before = _mapped()
    if rccl:
        ctypes.CDLL(rccl)
    of_rccl = _mapped() - before
    ctypes.CDLL(plugin)
    for path in filter(_HWLOC.search, sorted(_mapped())):
        for component in (Path(path).parent / "hwloc").glob("hwloc_rsmi.so"):
            ctypes.CDLL(str(component))
    of_plugin = _mapped() - before - of_rccl
    return Loaded(
        libfabric=_loaded_libfabric(),
        rccl_management=tuple(filter(_MANAGEMENT.search, sorted(of_rccl))),
        plugin_management=tuple(filter(_MANAGEMENT.search, sorted(of_plugin))),
    )


def _mapped() -> set[str]:
    """Return the paths of the files that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return {parts[5] for line in lines if len(parts := line.split(maxsplit=5)) == 6 and parts[5].startswith("/")}


def _loaded_libfabric() -> str:
    """Return major.minor of the libfabric in this process. '' if there is none."""
    if not any("/libfabric.so" in path for path in _mapped()):
        return ""
    version = int(ctypes.CDLL("libfabric.so.1").fi_version())  # the soname selects the library that is already loaded
    return f"{version >> 16}.{version & 0xFFFF}"


def find_rccl() -> str:
    """Return the path of the RCCL in torch's wheel. '' if torch has none, for example on a CPU."""
    spec = find_spec("torch")
    folders = [] if spec is None else [Path(folder) / "lib" for folder in spec.submodule_search_locations or ()]
    found = [path for folder in folders for path in sorted(folder.glob("librccl.so*"))]
    return str(found[0]) if found else ""


def conflicts(plugin: str, rccl: str, fi_info: str | None) -> Iterator[str]:
    """Yield the conflicts of the libraries.

    `fi_info` is the path of libfabric's tool of this name. None if the tool is not installed.

    Yields nothing if the plugin cannot be loaded, because the caller reports this fault.
    """
    command = [sys.executable, "-m", "frontier_llm.cluster.network_libraries", plugin, rccl]
    try:
        done = _run(command, LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        yield f"{plugin} and RCCL do not load within {LOAD_TIMEOUT_S:.0f} s"
        return
    if done.returncode < 0:
        yield f"a process that loads RCCL and {plugin} ends by {signal.Signals(-done.returncode).name}"
    if not done.stdout.startswith("{"):
        return
    loaded = Loaded(**json.loads(done.stdout.splitlines()[0]))
    site = "" if fi_info is None else _site_libfabric(fi_info)
    if site and loaded.libfabric and site != loaded.libfabric:
        yield f"{plugin} loads libfabric {loaded.libfabric}, but {fi_info} uses {site}"
    if loaded.rccl_management and loaded.plugin_management:
        yield (
            f"RCCL loads {', '.join(loaded.rccl_management)}, and hwloc under {plugin} loads "
            f"{', '.join(loaded.plugin_management)}: processes with both crash at their exit"
        )


def _site_libfabric(fi_info: str) -> str:
    """Return major.minor of the libfabric of the tool `fi_info`. '' if it does not print the version."""
    try:
        version = _FABRIC_VERSION.search(_run([fi_info, "--version"], timeout_s=VERSION_TIMEOUT_S).stdout)
    except (OSError, subprocess.TimeoutExpired):  # the caller checks the tool itself (`probe.provider_error`)
        return ""
    return version[1] if version else ""


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 a list
        command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
    )


if __name__ == "__main__":
    print(strict_json(asdict(load(sys.argv[1], sys.argv[2])), indent=None), flush=True)
