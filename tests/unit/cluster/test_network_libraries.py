"""Conflicts of RCCL, its plugin, libfabric and hwloc, with small libraries that depend on each other as these do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from frontier_llm.cluster.network_libraries import conflicts

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the small libraries")
FABRIC_2_3 = "unsigned fi_version(void) { return 2 << 16 | 3; }"
CRASH_AT_EXIT = "#include <stdlib.h>\n__attribute__((destructor)) static void end(void) { abort(); }"


def build(folder: Path, name: str, *needed: str, code: str = "") -> str:
    """Build a shared library with this soname that needs other libraries of the folder. Returns its path."""
    path = folder / name
    search = [f"-L{folder}", f"-Wl,-rpath,{folder}", f"-Wl,-soname,{name}", "-Wl,--no-as-needed"]
    libraries = [f"-l:{other}" for other in needed]
    command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(path), *search, *libraries]
    subprocess.run(command, input=f"{code}\nextern int unused;\n", text=True, check=True)
    return str(path)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Libraries and fi_info of a node: hwloc was built with rocm_smi."""
    folder = tmp_path_factory.mktemp("libraries")
    build(folder, "libfabric.so.1", code=FABRIC_2_3)
    build(folder, "librocm_smi64.so.7")
    build(folder, "libamd_smi.so.26")
    build(folder, "libhwloc.so.15", "librocm_smi64.so.7")
    build(folder, "librccl-net.so", "libfabric.so.1", "libhwloc.so.15")
    for version in ("2.3", "1.22"):
        tool = folder / f"fi_info_{version}"
        tool.write_text(f"#!/bin/sh\necho 'fi_info: {version}.1'\necho 'libfabric: {version}.1'\n")
        tool.chmod(0o755)
    return folder


def test_libraries_of_one_installation_fit(node: Path) -> None:
    rccl = build(node, "librccl.so.1", "librocm_smi64.so.7")
    assert list(conflicts(str(node / "librccl-net.so"), rccl, str(node / "fi_info_2.3"))) == []
    assert list(conflicts(str(node / "librccl-net.so"), "", None)) == []
    assert list(conflicts("/nonexistent/librccl-net.so", rccl, None)) == []  # doctor reports it as a missing plugin


def test_another_libfabric_and_another_management_library_are_named(node: Path) -> None:
    rccl = build(node, "librccl_amd.so.1", "libamd_smi.so.26")
    plugin = str(node / "librccl-net.so")
    fabric, management = conflicts(plugin, rccl, str(node / "fi_info_1.22"))
    assert fabric == f"{plugin} loads libfabric 2.3, but {node}/fi_info_1.22 uses 1.22"
    assert management == (
        f"RCCL loads {node}/libamd_smi.so.26, and hwloc under {plugin} loads {node}/librocm_smi64.so.7: processes with "
        "both crash at their exit"
    )


def test_a_component_of_hwloc_counts(tmp_path: Path) -> None:
    build(tmp_path, "librocm_smi64.so.7")
    build(tmp_path, "libamd_smi.so.26")
    build(tmp_path, "libhwloc.so.15")
    (tmp_path / "hwloc").mkdir()
    shutil.move(build(tmp_path, "hwloc_rsmi.so", "librocm_smi64.so.7"), tmp_path / "hwloc" / "hwloc_rsmi.so")
    plugin = build(tmp_path, "librccl-net.so", "libhwloc.so.15")
    rccl = build(tmp_path, "librccl.so.1", "libamd_smi.so.26")
    (conflict,) = conflicts(plugin, rccl, None)
    assert "librocm_smi64.so.7: processes with both crash" in conflict


def test_a_crash_at_exit_is_reported(tmp_path: Path) -> None:
    plugin = build(tmp_path, "librccl-net.so", code=CRASH_AT_EXIT)
    assert list(conflicts(plugin, "", None)) == [f"a process that loads RCCL and {plugin} ends by SIGABRT"]
