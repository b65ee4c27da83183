"""Reads and checks the manifest of the prebuilt GPU kernels of an architecture.

The manifest must match the kernels' sources, and each code object must match its digest in the manifest. If a manifest
is missing, stale or damaged, the BackendError has the command that rebuilds it. Nothing is compiled at run time.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from frontier_llm.errors import BackendError, Problem, suggest
from frontier_llm.libraries import DIRECTORY
from frontier_llm.ops.kernel_table import ARCHITECTURES, all_kernels

MANIFEST_VERSION = 3
TABLE = "kernel_table.py"  # block sizes and variants of every kernel
GPU_DIR = DIRECTORY / "gpu"
TRITON_DIR = Path(__file__).parent / "triton"  # sources of the kernels
TRITON_PACKAGE = "frontier_llm.ops.triton."

# First version of Triton whose kernels take two scratch pointers after their arguments. The launcher passes two, but
# code objects of Triton 3.4 take one.
TRITON_FROM = (3, 5)
TRITON_BEFORE = (4, 0)


# Environment variables for the path of the assembler that Triton uses for NVIDIA GPUs: the first up to Triton 3.8, and
# the second since 3.9 for sm_90. Error messages propose a command that sets both variables.
PTXAS_VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")


def build_command(architecture: str) -> str:
    """Return the command that builds the kernels of an architecture."""
    return f"pip install --no-deps msgpack pyelftools && python setup.py build_ops --arch {architecture}"


def install_triton() -> str:
    """Return the instruction for installing Triton.

    The instruction uses an environment with a CPU build of torch. A torch for ROCm or CUDA includes its own Triton,
    whose files the installation would overwrite.
    """
    versions = f">={'.'.join(map(str, TRITON_FROM))},<{TRITON_BEFORE[0]}"
    return f"in an environment whose torch is built for CPUs: pip install --no-deps 'triton{versions}'"


def check_triton(version: str, architecture: str, where: str) -> None:
    """Raise BackendError for a version of Triton whose code objects the launcher cannot start."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not TRITON_FROM <= numbers < TRITON_BEFORE:
        wanted = f">={'.'.join(map(str, TRITON_FROM))},<{TRITON_BEFORE[0]}"
        fix = f"{install_triton()} && {build_command(architecture)}"
        raise BackendError(
            f"compiled by Triton {version}, but the launcher needs code objects of Triton {wanted}",
            fix,
            where,
        )


@cache
def source_digests() -> dict[str, str]:
    """Return the sha256 of each source file of the code objects, by file name.

    Comments are left out, because they change no instruction.
    """
    paths = [*sorted(TRITON_DIR.glob("*.py")), Path(__file__).with_name(TABLE)]
    return {
        path.name: hashlib.sha256(without_comments(path.read_text(encoding="utf-8")).encode()).hexdigest()
        for path in paths
    }


def without_comments(source: str) -> str:
    """Return Python source without comments and blank lines, and otherwise unchanged."""
    lines = source.splitlines()
    inside_text: set[int] = set()  # numbers of the lines that belong to a string of several lines
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        elif token.type != tokenize.NEWLINE and token.end[0] > row:
            inside_text.update(range(row, token.end[0] + 1))
    return "\n".join(line for row, line in enumerate(lines, 1) if line.strip() or row in inside_text)


def stale_kernels(built_from: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return (source files of kernels that have changed since the build, kernels that use them).

    Every kernel uses kernel_table.py. A file that no kernel uses is left out.
    """
    now = source_digests()
    used = {name: _files_of(f"{kernel.module}.py") | {TABLE} for name, kernel in all_kernels().items()}
    changed = {file for file in set().union(*used.values()) if now.get(file) != built_from.get(file)}
    return sorted(changed), [name for name, files in used.items() if files & changed]


@cache
def _files_of(module_file: str) -> frozenset[str]:
    """Return the names of this file of ops/triton and of the files there that it imports, directly or indirectly."""
    tree = ast.parse((TRITON_DIR / module_file).read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = [name.removeprefix(TRITON_PACKAGE) for name in modules if name.startswith(TRITON_PACKAGE)]
    return frozenset({module_file}).union(*(_files_of(f"{name}.py") for name in imported))


def read_manifest(architecture: str, folder: Path | None = None) -> dict[str, Any]:
    """Read the manifest of an architecture, and compare it with the sources and each code object's digest.

    Raises BackendError for an architecture without prebuilt ops, for an unreadable or stale manifest, and for damaged
    code objects. The error lists all damaged files.
    """
    folder = folder or GPU_DIR / architecture
    path = folder / "manifest.json"
    build = build_command(architecture)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise BackendError(
            f"there are no GPU ops for {architecture}, only for {known}",
            "set ops.* to sdpa or reference",
            "GPU ops",
        )
    if not path.is_file():
        raise BackendError(
            f"the ops for {architecture} have not been built: no {path.name} in {folder}",
            build,
            "GPU ops",
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        built = (manifest["version"], manifest["architecture"])
        codes = [(code["file"], code["sha256"]) for code in manifest["kernels"]]
        triton = str(manifest["tools"]["triton"])
        sources = dict(manifest["sources"]) if manifest["version"] == MANIFEST_VERSION else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackendError(f"the manifest cannot be read: {type(error).__name__}: {error}", build, str(path)) from error
    if built != (MANIFEST_VERSION, architecture):
        what = f"is for {built[1]} and has version {built[0]}; expected {architecture} and version {MANIFEST_VERSION}"
        raise BackendError(what, build, str(path))
    changed, stale = stale_kernels(sources)
    if stale:
        what = f"the code objects were built from other versions of the kernel sources {', '.join(changed)}"
        raise BackendError(f"{what}; out of date: {', '.join(stale)}", build, str(path))
    check_triton(triton, architecture, str(path))
    damaged = [file for file, digest in codes if not _has_digest(folder / file, digest)]
    if damaged:
        raise BackendError(
            [
                Problem(str(folder / file), "is missing, or differs from the file that was built (sha256)", build)
                for file in damaged
            ]
        )
    return manifest


def manifest_digest(architecture: str) -> str:
    """Return the sha256 of an architecture's manifest; '' without a manifest.

    The manifest contains the digest of every code object, so the manifest's digest identifies all of them.
    """
    path = GPU_DIR / architecture / "manifest.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _has_digest(path: Path, digest: str) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == digest
    except OSError:
        return False


def prebuilt_architectures() -> dict[str, str]:
    """Return the state of each architecture's code objects as text: their number, or the error and its fix."""
    states = {}
    for architecture in ARCHITECTURES:
        try:
            manifest = read_manifest(architecture)
            states[architecture] = f"{len(manifest['kernels'])} kernels, Triton {manifest['tools']['triton']}"
        except BackendError as error:
            states[architecture] = f"no: {error.problems[0].what}; build: {error.problems[0].fix}"
    return states


def kernel_report(architecture: str) -> list[dict[str, Any]]:
    """Return the manifest's entries of an architecture's code objects, with `waves_per_simd` added to each.

    waves_per_simd is the occupancy that registers and shared memory allow (at most 8 on CDNA, 16 on NVIDIA). Raises
    BackendError if there are no code objects.
    """
    machine = ARCHITECTURES.get(architecture)
    if machine is None:
        raise BackendError(
            f"there are no GPU ops for {architecture!r}",
            suggest(architecture, ARCHITECTURES),
            "ARCHITECTURE",
        )
    lines = read_manifest(architecture)["kernels"]
    return [
        {**line, "waves_per_simd": machine.waves_per_simd(line["warps"], line["registers"], line["shared_bytes"])}
        for line in lines
    ]
