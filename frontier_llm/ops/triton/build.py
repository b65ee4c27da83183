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
from frontier_llm.ops.kernel_table import ARCHITECTURES, KERNELS, variants
from frontier_llm.ops.prebuilt import MANIFEST_VERSION, check_triton, source_digest


@dataclass(frozen=True)
class CodeObject:
    """One line of the manifest: all that the launcher needs, and what the compiler used."""

    kernel: str
    dtype: str
    variant: str
    aligned: bool  # built for `by16` arguments that are multiples of 16
    symbol: str
    file: str
    sha256: str
    arguments: list[list[Any]]  # (name, type, by16) in launch order
    constants: dict[str, int]
    warps: int
    threads: int  # of a block
    shared_bytes: int
    registers: int  # of a thread; AMD: vector registers with the accumulation registers
    spills: int  # registers spilled to memory
    matrix_instructions: int  # MFMA, MMA or WGMMA in the code


@dataclass(frozen=True)
class Work:
    """One thing to compile."""

    architecture: str
    kernel: str
    dtype: str
    variant: str
    aligned: bool

    @property
    def name(self) -> str:
        """What its file is called, without the suffix."""
        return f"{self.kernel}-{self.dtype}-{self.variant}{'' if self.aligned else '-unaligned'}"


def work(architectures: list[str]) -> list[Work]:
    """Everything to build; raises BackendError for an unknown architecture."""
    for architecture in architectures:
        if architecture not in ARCHITECTURES:
            raise BackendError(f"unknown architecture {architecture!r}", suggest(architecture, ARCHITECTURES), "build_ops --arch")
    return [
        Work(architecture, kernel.name, dtype, variant, aligned)
        for architecture in architectures
        for kernel in KERNELS.values()
        for dtype in kernel.dtypes
        for variant in variants(kernel.name, architecture)
        for aligned in kernel.builds
    ]


def compile_one(item: Work, folder: Path) -> CodeObject:
    """Compile one variant into `folder`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    architecture = ARCHITECTURES[item.architecture]
    amd = architecture.backend == "hip"
    kernel, variant = KERNELS[item.kernel], variants(item.kernel, item.architecture)[item.variant]
    function = getattr(importlib.import_module(f"frontier_llm.ops.triton.{kernel.module}"), kernel.name)
    signature = kernel.signature(item.dtype)
    by16 = {
        (function.arg_names.index(argument.name),): [["tt.divisibility", 16]]
        for argument in kernel.arguments
        if item.aligned and argument.by16
    }
    ordered = {name: signature.get(name, "constexpr") for name in function.arg_names}
    source = ASTSource(function, ordered, constexprs=dict(variant.constants), attrs=by16)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    if amd:
        # Operands that lie across the product's inner dim are turned in registers on their way to LDS, which Triton does unasked on gfx942 only,
        # and read 16 bytes at a time: attention's forward then reads V in 16 instructions per block where it were 128 of 2 bytes.
        triton.knobs.amd.use_in_thread_transpose = True
        options["kpack"] = 2
    compiled = triton.compile(source, target=GPUTarget(architecture.backend, architecture.target, architecture.wave), options=options)
    suffix = "hsaco" if amd else "cubin"
    binary: bytes = compiled.asm[suffix]
    file = f"{item.name}.{suffix}"
    (folder / file).write_bytes(binary)
    assembly: str = compiled.asm["amdgcn" if amd else "ptx"]
    check_launch(assembly, list(signature.values()), compiled.metadata)
    return CodeObject(
        kernel=kernel.name,
        dtype=item.dtype,
        variant=item.variant,
        aligned=item.aligned,
        symbol=compiled.metadata.name,
        file=file,
        sha256=hashlib.sha256(binary).hexdigest(),
        arguments=[[argument.name, signature[argument.name], argument.by16] for argument in kernel.arguments],
        constants=dict(variant.constants),
        warps=variant.warps,
        threads=compiled.metadata.num_warps * architecture.wave,
        shared_bytes=compiled.metadata.shared,
        **(_amd_facts(assembly) if amd else _nvidia_facts(assembly, folder / file)),
    )


def check_launch(assembly: str, kinds: list[str], metadata: Any) -> None:
    """The kernel wants what csrc/gpu_launcher.cpp gives: these arguments and two scratch pointers that it does not use, one block at a time.

    The sizes are read from the assembly: AMD's metadata or NVIDIA's PTX. Raises BackendError for anything else.
    """
    wanted = [{"i32": 4, "fp32": 4}.get(kind, 8) for kind in kinds] + [8, 8]
    amd = [int(size) for size in re.findall(r"\.size: +(\d+)\n +\.value_kind: +(?:global_buffer|by_value)", assembly)]
    nvidia = [int(bits) // 8 for bits in re.findall(r"^\s*\.param \.[bufs](\d+)", assembly, re.MULTILINE)]
    fix = "use the Triton that docs/ops.md names"
    if (found := amd or nvidia) != wanted:
        raise BackendError(f"the compiler gave arguments of {found} bytes where the launcher passes {wanted}", fix)
    # cluster or cooperative launches, tensor-memory descriptors, scratch memory
    extras = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "tensordesc_meta")
    asked = [name for name in extras if getattr(metadata, name, None)]
    if asked or getattr(metadata, "num_ctas", 1) != 1:
        raise BackendError(f"the kernel wants {', '.join(asked) or 'clusters of blocks'}, which the launcher does not give", fix)


def _amd_facts(assembly: str) -> dict[str, int]:
    """Registers, spills and MFMA count from the assembler text's metadata."""
    numbers = {
        name: int(value) for name, value in re.findall(r"\.(vgpr_count|agpr_count|vgpr_spill_count|sgpr_spill_count): +(\d+)", assembly)
    }
    return {
        "registers": numbers["vgpr_count"],
        "spills": numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"],
        "matrix_instructions": assembly.count("v_mfma_"),
    }


def _nvidia_facts(ptx: str, cubin: Path) -> dict[str, int]:
    """The same from the PTX, and from cuobjdump, which comes with Triton; its STACK is bytes of a thread."""
    from triton.backends import nvidia

    cuobjdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    usage = subprocess.run([cuobjdump, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout  # noqa: S603 - fixed tool, our file
    registers, stack = (re.search(rf"{name}:(\d+)", usage) for name in ("REG", "STACK"))
    assert registers and stack
    matrix = len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)\b", ptx))
    return {"registers": int(registers.group(1)), "spills": int(stack.group(1)) // 4, "matrix_instructions": matrix}


def tool_versions() -> dict[str, str]:
    """What a code object depends on besides its source."""
    import triton

    return {"triton": triton.__version__}


def build(architectures: list[str], destination: Path, jobs: int | None = None) -> dict[str, list[CodeObject]]:
    """Compile everything for the architectures and write their manifests; returns the code objects by architecture.

    Raises BackendError when Triton is missing, naming how to get it.
    """
    work(architectures)  # refuses unknown names before anything is compiled
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        raise BackendError(
            f"the GPU ops are compiled by Triton, which is not installed: {error}", "pip install --no-deps triton"
        ) from error
    check_triton(triton.__version__, ",".join(architectures), triton.__file__)
    built: dict[str, list[CodeObject]] = {}
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(jobs or os.cpu_count()) as pool:
        os.environ["TRITON_CACHE_DIR"] = cache
        for architecture in architectures:
            folder, items = destination / architecture, work([architecture])
            folder.mkdir(parents=True, exist_ok=True)
            built[architecture] = list(pool.map(compile_one, items, [folder] * len(items), chunksize=4))
            write_manifest(folder, architecture, built[architecture])
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
