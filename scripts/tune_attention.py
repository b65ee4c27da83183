"""Finds the block sizes of the attention kernels: compiles candidates on any machine, times them on one with the GPU.

    python scripts/tune_attention.py build --arch sm_90 [--dims 64,128] [--out build/tune]   needs Triton, no GPU
    python scripts/tune_attention.py run --arch sm_90 [--out build/tune]                     needs the GPU, no Triton; takes a minute

`run` times each candidate inside the whole op, the other kernels as they are shipped, and prints the best in the words of
frontier_llm/ops/kernel_table.py, where they are then written down: nothing is tuned while training runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from frontier_llm.ops import Scores, kernel_table
from frontier_llm.ops.bench import seconds_of
from frontier_llm.ops.gpu import GpuOps
from frontier_llm.ops.prebuilt import Argument, Kernels, PrebuiltKernels

Blocks = tuple[int, int, int, int]  # BLOCK_M, BLOCK_N, warps, stages
KERNELS = ("attention_forward", "attention_grad_kv", "attention_grad_q")


def candidates(kernel: str, architecture: str) -> list[Blocks]:
    """Blocks worth trying; a loop walks the diagonal of the outer block by whole inner blocks."""
    amd = kernel_table.ARCHITECTURES[architecture].backend == "hip"
    sizes = [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128)]
    if kernel == "attention_grad_kv":
        sizes = [(inner, outer) for outer, inner in sizes]
    return [(*size, warps, stages) for size, warps, stages in itertools.product(sizes, (4, 8), (1,) if amd else (1, 2, 3))]


def compile_candidate(architecture: str, kernel: str, dim: int, blocks: Blocks, out: Path) -> str:
    """One candidate into a folder of its own with a manifest; returns what became of it."""
    from frontier_llm.ops.triton.build import Work, compile_one, write_manifest

    kernel_table.ATTENTION_BLOCKS[architecture][kernel][dim] = blocks
    name = f"{kernel}-{dim}-{'-'.join(map(str, blocks))}"
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        code = compile_one(Work(architecture, kernel, "bf16", f"d{dim}", True), folder)
    except Exception as error:  # too much shared memory, most often
        return f"{name}: {type(error).__name__}"
    machine = kernel_table.ARCHITECTURES[architecture]
    if code.spills > 64 or code.shared_bytes > machine.block_shared_bytes:
        return f"{name}: {code.spills} registers spilled, {code.shared_bytes} bytes of shared memory"
    write_manifest(folder, architecture, [code])
    (folder / "candidate.json").write_text(json.dumps({"kernel": kernel, "dim": dim, "blocks": blocks, **asdict(code)}), encoding="utf-8")
    return f"{name}: {code.registers} registers"


def build(architecture: str, dims: list[int], out: Path) -> None:
    """Compile all candidates."""
    items = [(kernel, dim, blocks) for kernel in KERNELS for dim in dims for blocks in candidates(kernel, architecture)]
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(os.cpu_count()) as pool:
        os.environ["TRITON_CACHE_DIR"] = cache
        for said in pool.map(compile_candidate, itertools.repeat(architecture), *zip(*items, strict=True), itertools.repeat(out)):
            print(said, flush=True)


class WithCandidate:
    """The shipped kernels, one of them replaced."""

    def __init__(self, shipped: Kernels, candidate: Kernels, kernel: str) -> None:
        self.shipped, self.candidate, self.kernel = shipped, candidate, kernel

    def block(self, kernel: str, variant: str, name: str) -> int:
        """A compile-time constant."""
        return (self.candidate if kernel == self.kernel else self.shipped).block(kernel, variant, name)

    def launch(self, kernel: str, dtype: torch.dtype, variant: str, grid: tuple[int, int, int], *arguments: Argument) -> None:
        """Launch the shipped kernel or the candidate."""
        (self.candidate if kernel == self.kernel else self.shipped).launch(kernel, dtype, variant, grid, *arguments)


def run(shipped: PrebuiltKernels, out: Path, device: str, sequence: int = 2048, tokens: int = 16384, width: int = 2048) -> dict[str, Any]:
    """Times every candidate in `out`; returns {"kernel, dim": [(seconds, blocks or "shipped"), …], best first}."""
    found: dict[str, list[tuple[float, Any]]] = {}
    for path in sorted(out.glob("*/candidate.json")):
        line = json.loads(path.read_text(encoding="utf-8"))
        kernel, dim = line["kernel"], line["dim"]
        if f"{kernel}, {dim}" not in found:
            found[f"{kernel}, {dim}"] = [(time_of(GpuOps(shipped), kernel, dim, device, sequence, tokens, width), "shipped")]
        mixed = WithCandidate(shipped, PrebuiltKernels(shipped.architecture, path.parent), kernel)
        try:
            seconds = time_of(GpuOps(mixed), kernel, dim, device, sequence, tokens, width)
        except Exception as error:
            print(f"{path.parent.name}: {error}", flush=True)
            continue
        found[f"{kernel}, {dim}"].append((seconds, line["blocks"]))
    return {key: sorted(times, key=lambda item: item[0]) for key, times in found.items()}


def time_of(ops: GpuOps, kernel: str, dim: int, device: str, sequence: int, tokens: int, width: int) -> float:
    """Seconds of the forward, or of the whole backward, of causal attention in bf16."""
    shape = (sequence, tokens // sequence, width // dim, dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_() for _ in range(3))
    grad = torch.randn(shape, dtype=torch.bfloat16, device=device)
    out = ops.attention(q, k, v, Scores(dim**-0.5))
    if kernel == "attention_forward":
        with torch.no_grad():
            return min(seconds_of(lambda: ops.attention(q, k, v, Scores(dim**-0.5)), device) for _ in range(4))
    return min(seconds_of(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), device) for _ in range(4))


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("build", "run"))
    parser.add_argument("--arch", default="sm_90", choices=tuple(kernel_table.ARCHITECTURES))
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--out", type=Path, default=Path("build/tune"))
    args = parser.parse_args()
    if args.action == "build":
        build(args.arch, [int(dim) for dim in args.dims.split(",")], args.out)
        return
    result = run(PrebuiltKernels(args.arch), args.out, "cuda")
    (args.out / "times.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    for key, times in result.items():
        print(f"{key}: " + ", ".join(f"{blocks} {seconds * 1e6:.0f} us" for seconds, blocks in times[:5]))


if __name__ == "__main__":
    main()
