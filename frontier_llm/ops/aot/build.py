"""Ahead-of-time build: compile every variant of `kernel_table` into a code object, and write a manifest.

    python setup.py build_ops --arch gfx90a,sm_90

writes frontier_llm/_native/gpu/<arch>/*.hsaco|cubin and manifest.json. The build needs Triton, but no GPU and no
driver. Only this module and the sources in ops/triton import Triton.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from frontier_llm.errors import BackendError, suggest
from frontier_llm.ops.aot.assembler import Assembled, assembler_version, read_log, recorded_log, use_own_assembler
from frontier_llm.ops.kernel_table import ARCHITECTURES, Architecture, Kernel, Variant, all_kernels, variants
from frontier_llm.ops.manifest import (
    MANIFEST_VERSION,
    build_command,
    check_triton,
    install_triton,
    source_digests,
)
from frontier_llm.units import strict_json


@dataclass(frozen=True)
class CodeObject:
    """Entry of a code object in the manifest: how to launch the kernel, and the resources that the kernel uses."""

    kernel: str
    dtype: str
    variant: str
    aligned: bool  # True if the code assumes that the `by16` arguments are multiples of 16
    symbol: str
    file: str
    sha256: str
    arguments: list[list[Any]]  # (name, type, by16) in launch order
    constants: dict[str, int]
    warps: int
    threads: int  # number of threads of a block
    shared_bytes: int
    registers: int  # as in code_object.Declared
    spills: int  # as in code_object.Declared
    abi: int  # as in code_object.Declared
    matrix_instructions: int  # number of MFMA, MMA or WGMMA instructions in the code
    matrix_flops: int  # FLOPs of these instructions, per warp
    assembled: Assembled | None  # notes of ptxas; None on AMD


@dataclass(frozen=True)
class Build:
    """One compilation: a variant of a kernel for one architecture."""

    architecture: str
    kernel: str
    dtype: str
    variant: str
    aligned: bool

    @property
    def name(self) -> str:
        """Name of the code object's file, without the suffix."""
        return f"{self.kernel}-{self.dtype}-{self.variant}{'' if self.aligned else '-unaligned'}"


def all_builds(architectures: list[str]) -> list[Build]:
    """Return all compilations for the architectures. Raises BackendError for an unknown architecture."""
    for architecture in architectures:
        if architecture not in ARCHITECTURES:
            raise BackendError(
                f"unknown architecture {architecture!r}",
                suggest(architecture, ARCHITECTURES),
                "build_ops --arch",
            )
    return [
        Build(architecture, kernel.name, dtype, variant, aligned)
        for architecture in architectures
        for kernel in all_kernels().values()
        for dtype in kernel.dtypes
        for variant in variants(kernel.name, architecture)
        for aligned in kernel.builds
    ]


def compile_one(item: Build, folder: Path) -> CodeObject:
    """Compile one variant, and write its code object to `folder`.

    Raises BackendError if the launcher could not start the kernel.
    """
    from frontier_llm.ops.aot.code_object import check_launch, read

    architecture = ARCHITECTURES[item.architecture]
    amd = architecture.backend == "hip"
    kernel = all_kernels()[item.kernel]
    variant = variants(item.kernel, item.architecture)[item.variant]
    signature = kernel.signature(item.dtype)
    compiled, assembled = _compile(item, kernel, variant, architecture)
    suffix = "hsaco" if amd else "cubin"
    binary: bytes = compiled.asm[suffix]
    declared = read(binary)
    symbol = compiled.metadata.name
    threads = compiled.metadata.num_warps * architecture.wave
    check_launch(declared, item.architecture, symbol, list(signature.values()), threads, compiled.metadata.shared)
    check_extras(compiled.metadata)
    file = f"{item.name}.{suffix}"
    (folder / file).write_bytes(binary)
    assembly: str = compiled.asm["amdgcn" if amd else "ptx"]
    return CodeObject(
        kernel=kernel.name,
        dtype=item.dtype,
        variant=item.variant,
        aligned=item.aligned,
        symbol=symbol,
        file=file,
        sha256=hashlib.sha256(binary).hexdigest(),
        arguments=[[argument.name, signature[argument.name], argument.by16] for argument in kernel.arguments],
        constants=dict(variant.constants),
        warps=variant.warps,
        threads=threads,
        shared_bytes=compiled.metadata.shared,
        registers=declared.registers,
        spills=declared.spills,
        abi=declared.abi,
        matrix_instructions=len(_MATRIX.findall(assembly)),
        matrix_flops=sum(_flops(*match.groups()) for match in _MATRIX.finditer(assembly)),
        assembled=assembled,
    )


def _compile(
    item: Build,
    kernel: Kernel,
    variant: Variant,
    architecture: Architecture,
) -> tuple[Any, Assembled | None]:
    """Compile a variant with Triton. Return Triton's result, and the notes of ptxas (None on AMD)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    amd = architecture.backend == "hip"
    function = getattr(importlib.import_module(f"frontier_llm.ops.triton.{kernel.module}"), kernel.name)
    signature = kernel.signature(item.dtype)
    by16 = {
        (function.arg_names.index(argument.name),): [["tt.divisibility", 16]]
        for argument in kernel.arguments
        if item.aligned and argument.by16
    }
    ordered = {name: signature.get(name, "constexpr") for name in function.arg_names}
    source = ASTSource(function, ordered, constexprs=dict(variant.constants), attrs=by16)
    # Line information contains the path of the sources, so the built file would differ between machines.
    triton.knobs.compilation.disable_line_info = True
    # By default Triton transposes in threads on gfx942, but not on gfx90a (docs/benchmarks/ops.md: LDS).
    triton.knobs.amd.use_in_thread_transpose = amd
    if not amd:
        use_own_assembler()
    with nullcontext(StringIO()) if amd else recorded_log() as log:
        compiled = triton.compile(
            source,
            target=GPUTarget(architecture.backend, architecture.target, architecture.wave),
            options=_options(variant, architecture),
        )
    return compiled, None if amd else read_log(log.getvalue())


def _options(variant: Variant, architecture: Architecture) -> dict[str, Any]:
    """Return Triton's compile options."""
    options: dict[str, Any] = {
        "num_warps": variant.warps,
        "num_stages": variant.stages,
        "enable_fp_fusion": True,
        **dict(architecture.options),
    }
    if variant.matrix:
        options["matrix_instr_nonkdim"] = variant.matrix
    if variant.waves:
        options["waves_per_eu"] = variant.waves
    if variant.strategy:
        options["llvm_fn_attrs"] = f"amdgpu-sched-strategy={variant.strategy}"  # older versions of Triton ignore it
    return options


_MATRIX = re.compile(
    r"\bv_mfma_f32_(?P<amd>\d+x\d+x\d+)|\b(?P<group>wgmma\.mma_async|mma)\.sync\.aligned\.m(\d+)n(\d+)k(\d+)"
)


def _flops(amd: str | None, group: str, *nvidia: str) -> int:
    sides = amd.split("x") if amd else nvidia
    # Return the FLOPs per warp. Four warps execute one WGMMA instruction together.
    return 2 * math.prod(map(int, sides)) // (4 if group == "wgmma.mma_async" else 1)


def check_extras(metadata: Any) -> None:
    """Raise BackendError if a kernel needs a feature that csrc/gpu_launcher.cpp does not support.

    These features are cluster and cooperative launches, tensor-memory descriptors and scratch memory.
    """
    extras = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "tensordesc_meta")
    asked = [name for name in extras if getattr(metadata, name, None)]
    if asked or getattr(metadata, "num_ctas", 1) != 1:
        what = f"the kernel needs {', '.join(asked) or 'clusters of blocks'}, which the launcher does not support"
        raise BackendError(what, "install the version of Triton that docs/ops.md names")


def build(architectures: list[str], destination: Path, jobs: int | None = None) -> dict[str, list[CodeObject]]:
    """Compile all kernels for the architectures, and write their manifests. Return the code objects by architecture.

    Raises BackendError for an unknown architecture, or if Triton, msgpack or pyelftools is missing. The error gives
    the command that installs them.
    """
    all_builds(architectures)  # raises for unknown names before anything is compiled
    named = ",".join(architectures)
    try:
        triton, *_ = (importlib.import_module(name) for name in ("triton", "msgpack", "elftools"))
    except ImportError as error:
        fix = f"{install_triton()} && {build_command(named)}" if error.name == "triton" else build_command(named)
        raise BackendError(
            f"the GPU ops are compiled by Triton, and a package for that is missing: {error}", fix
        ) from error
    check_triton(triton.__version__, named, str(triton.__file__))
    built: dict[str, list[CodeObject]] = {}
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(jobs or os.cpu_count()) as pool:
        os.environ["TRITON_CACHE_DIR"] = cache
        for architecture in architectures:
            folder = destination / architecture
            items = all_builds([architecture])
            folder.mkdir(parents=True, exist_ok=True)
            built[architecture] = list(pool.map(compile_one, items, [folder] * len(items), chunksize=4))
            write_manifest(folder, architecture, built[architecture])
    return built


def _tools(architecture: str) -> dict[str, str]:
    tools = {"triton": str(importlib.import_module("triton").__version__)}
    if ARCHITECTURES[architecture].backend == "cuda":
        tools["ptxas"] = assembler_version(architecture)
    return tools


def write_manifest(folder: Path, architecture: str, codes: list[CodeObject]) -> None:
    """Write manifest.json, and delete all other files except the code objects of `codes`.

    The manifest is written to a temporary file and renamed, so that it is never incomplete.
    """
    manifest: dict[str, Any] = {
        "version": MANIFEST_VERSION,
        "architecture": architecture,
        # Triton's distribution has other names in ROCm's wheels, so importlib.metadata does not find its version.
        "tools": _tools(architecture),
        "sources": source_digests(),
        "kernels": [asdict(code) for code in codes],
    }
    partial = folder / "manifest.json.tmp"
    partial.write_text(strict_json(manifest) + "\n", encoding="utf-8")
    partial.rename(folder / "manifest.json")
    keep = {code.file for code in codes} | {"manifest.json"}
    for path in folder.iterdir():
        if path.name not in keep:
            path.unlink()


def main() -> None:
    """Run `python -m frontier_llm.ops.aot.build DESTINATION [ARCH…]`. setup.py build_ops calls this command."""
    import sys

    destination, *architectures = sys.argv[1:]
    for architecture, codes in build(architectures or list(ARCHITECTURES), Path(destination)).items():
        size = sum((Path(destination) / architecture / code.file).stat().st_size for code in codes)
        print(
            f"{architecture}: {len(codes)} kernels, {size / 1e6:.1f} MB, {sum(code.spills > 0 for code in codes)} "
            f"with spilled registers"
        )


if __name__ == "__main__":
    main()
