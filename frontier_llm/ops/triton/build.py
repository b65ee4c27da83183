"""Ahead-of-time build: every variant of `kernel_table` into a code object, with a manifest; needs Triton, but no GPU and no driver.

    python setup.py build_ops --arch gfx90a,sm_90

writes frontier_llm/_native/gpu/<arch>/*.hsaco|cubin and manifest.json. Only this module and the sources beside it import Triton.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from frontier_llm.errors import BackendError, suggest
from frontier_llm.ops.kernel_table import ALIGNED, ARCHITECTURES, KERNELS, UNALIGNED_KERNELS, variants
from frontier_llm.ops.prebuilt import MANIFEST_VERSION, source_digest


@dataclass(frozen=True)
class CodeObject:
    """One line of the manifest: all that the launcher needs, and what the compiler used."""

    kernel: str
    dtype: str
    variant: str
    symbol: str
    file: str
    sha256: str
    arguments: list[list[str]]  # (name, type) in launch order
    constants: dict[str, int]
    warps: int
    threads: int  # of a block
    shared_bytes: int
    vgprs: int  # registers of a thread; AMD: vector registers with the accumulation registers
    spills: int  # registers spilled to memory
    matrix_instructions: int  # MFMA, HMMA or WGMMA in the code


def work(architectures: list[str]) -> list[tuple[str, str, str, str]]:
    """(architecture, kernel, dtype, variant) of everything to build; raises BackendError for an unknown architecture."""
    for architecture in architectures:
        if architecture not in ARCHITECTURES:
            raise BackendError(f"unknown architecture {architecture!r}", suggest(architecture, ARCHITECTURES), "build_ops --arch")
    return [
        (architecture, kernel.name, dtype, variant)
        for architecture in architectures
        for kernel in KERNELS.values()
        for dtype in kernel.dtypes
        for variant in variants(kernel.name, architecture)
    ]


def compile_one(architecture: str, kernel_name: str, dtype: str, variant_name: str, folder: Path) -> CodeObject:
    """Compile one variant into `folder`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, target_arch, wave, _ = ARCHITECTURES[architecture]
    kernel, variant = KERNELS[kernel_name], variants(kernel_name, architecture)[variant_name]
    function = getattr(importlib.import_module(f"frontier_llm.ops.triton.{kernel.module}"), kernel_name)
    signature = kernel.signature(dtype)
    aligned = {
        (function.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if name in ALIGNED or (kind.startswith("*") and kernel_name not in UNALIGNED_KERNELS)
    }
    ordered = {name: signature.get(name, "constexpr") for name in function.arg_names}
    source = ASTSource(function, ordered, constexprs=dict(variant.constants), attrs=aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget(backend, target_arch, wave), options=options)
    suffix = "hsaco" if backend == "hip" else "cubin"
    binary: bytes = compiled.asm[suffix]
    file = f"{kernel_name}-{dtype}-{variant_name}.{suffix}"
    (folder / file).write_bytes(binary)
    assert not compiled.metadata.global_scratch_size, f"{kernel_name} wants scratch memory, which the launcher does not give"
    if backend == "hip":
        check_arguments(compiled.asm["amdgcn"], list(signature.values()))
    return CodeObject(
        kernel=kernel_name,
        dtype=dtype,
        variant=variant_name,
        symbol=compiled.metadata.name,
        file=file,
        sha256=hashlib.sha256(binary).hexdigest(),
        arguments=[[name, kind] for name, kind in signature.items()],
        constants=dict(variant.constants),
        warps=variant.warps,
        threads=compiled.metadata.num_warps * wave,
        shared_bytes=compiled.metadata.shared,
        **(_amd_facts(compiled.asm["amdgcn"]) if backend == "hip" else _nvidia_facts(folder / file)),
    )


def check_arguments(assembly: str, kinds: list[str]) -> None:
    """The sizes of the kernel's explicit arguments, as the code object states them, are those that the launcher will pass."""
    wanted = [{"i32": 4, "fp32": 4}.get(kind, 8) for kind in kinds] + [8, 8]  # and two scratch pointers
    found = [int(size) for size in re.findall(r"\.size: +(\d+)\n +\.value_kind: +(?:global_buffer|by_value)", assembly)]
    if found != wanted:
        raise BackendError(
            f"the compiler gave arguments of {found} bytes where the launcher passes {wanted}", "use the Triton that docs/ops.md names"
        )


def _amd_facts(assembly: str) -> dict[str, int]:
    """Registers, spills and MFMA count from the assembler text's metadata."""
    numbers = {
        name: int(value) for name, value in re.findall(r"\.(vgpr_count|agpr_count|vgpr_spill_count|sgpr_spill_count): +(\d+)", assembly)
    }
    return {
        "vgprs": numbers["vgpr_count"],
        "spills": numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"],
        "matrix_instructions": assembly.count("v_mfma_"),
    }


def _nvidia_facts(cubin: Path) -> dict[str, int]:
    """The same from cuobjdump and nvdisasm, which come with Triton."""
    from triton.backends import nvidia

    tools = Path(nvidia.__file__).parent / "bin"
    usage = subprocess.run([tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True).stdout  # noqa: S603 - fixed tool, our file
    code = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout  # noqa: S603
    registers, stack = (re.search(rf"{name}:(\d+)", usage) for name in ("REG", "STACK"))
    assert registers and stack
    matrix = len(re.findall(r"\b(?:HMMA|HGMMA|QGMMA)\b", code))
    return {"vgprs": int(registers.group(1)), "spills": int(stack.group(1)) // 4, "matrix_instructions": matrix}


def tool_versions() -> dict[str, str]:
    """What a code object depends on besides its source."""
    import triton

    return {"triton": triton.__version__}


def build(architectures: list[str], destination: Path, jobs: int | None = None) -> dict[str, list[CodeObject]]:
    """Compile everything for the architectures and write their manifests; returns the code objects by architecture.

    Raises BackendError when Triton is missing, naming how to get it.
    """
    items = work(architectures)
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise BackendError(
            f"the GPU ops are compiled by Triton, which is not installed: {error}", "pip install --no-deps triton"
        ) from error
    for architecture in architectures:
        (destination / architecture).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(jobs or os.cpu_count()) as pool:
            folders = [destination / item[0] for item in items]
            objects = list(pool.map(compile_one, *zip(*items, strict=True), folders, chunksize=4))
    built: dict[str, list[CodeObject]] = {architecture: [] for architecture in architectures}
    for item, code in zip(items, objects, strict=True):
        built[item[0]].append(code)
    for architecture, codes in built.items():
        write_manifest(destination / architecture, architecture, codes)
    return built


def write_manifest(folder: Path, architecture: str, codes: list[CodeObject]) -> None:
    """manifest.json, complete or not there: written beside and renamed."""
    manifest: dict[str, Any] = {
        "version": MANIFEST_VERSION,
        "architecture": architecture,
        "tools": tool_versions(),
        "sources_sha256": source_digest(),
        "kernels": [asdict(code) for code in codes],
    }
    partial = folder / "manifest.json.tmp"
    partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    partial.rename(folder / "manifest.json")
    keep = {code.file for code in codes} | {"manifest.json"}
    for path in folder.iterdir():
        if path.name not in keep:
            path.unlink()


def main() -> None:
    """`python -m frontier_llm.ops.triton.build DESTINATION ARCH…`: what setup.py build_ops runs."""
    import sys

    destination, *architectures = sys.argv[1:]
    for architecture, codes in build(architectures, Path(destination)).items():
        size = sum((Path(destination) / architecture / code.file).stat().st_size for code in codes)
        print(f"{architecture}: {len(codes)} kernels, {size / 1e6:.1f} MB, {sum(code.spills > 0 for code in codes)} with spilled registers")


if __name__ == "__main__":
    main()
