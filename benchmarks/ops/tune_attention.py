"""Finds the best block sizes of the attention kernels: compiles candidates on any machine, and times them on a machine
with the GPU.

    python -m benchmarks.ops.tune_attention build --arch sm_90 [--variants d64,d128] [--out build/tune]
    python -m benchmarks.ops.tune_attention run --arch sm_90 [--out build/tune]
    python -m benchmarks.ops.tune_attention simulate [--out build/tune]

`build` needs Triton and no GPU. `run` needs the GPU and no Triton, and takes a minute. `simulate` is for gfx90a, needs
no GPU, and takes seconds for each candidate. Its shares of the matrix rate are upper bounds.

`run` times each candidate inside the complete op, together with the shipped kernels. `simulate` executes one block of
each candidate in tests/cdna2 and times it there. Both print the best blocks in the format of
frontier_llm/ops/kernel_table.py. The results are copied there by hand: nothing is tuned during training.
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

from benchmarks.harness import FOLDER, parse_arguments
from frontier_llm.errors import FrontierError
from frontier_llm.experiments.measure.timing import kernel_s
from frontier_llm.ops import Scores, kernel_table
from frontier_llm.ops.driver import Argument, Grid
from frontier_llm.ops.gpu import GpuOps
from frontier_llm.ops.kernel_table import ARCHITECTURES
from frontier_llm.ops.manifest import GPU_DIR, read_manifest
from frontier_llm.ops.prebuilt import Kernels, PrebuiltKernels
from tests.cdna2.driver import TracingGpu
from tests.cdna2.timing import SIMDS, Rates, Timing
from tests.cdna2.timing import time_of as time_of_trace

Blocks = kernel_table.Blocks
KERNELS = ("attention_forward", "attention_grad_kv", "attention_grad_q")
# Values of `waves` and `ahead`, and the strategy of LLVM's scheduler.
_CDNA2_WAYS = ((0, 0, ""), (2, 1, ""), (2, 1, "max-ilp"), (3, 1, "max-ilp"))


def candidates(kernel: str, architecture: str) -> list[Blocks]:
    """Return the block sizes to try.

    An inner block is at most as large as the outer block, so that complete inner blocks cover the diagonal. The outer
    block has enough rows to give each warp rows of its own.
    """
    amd = ARCHITECTURES[architecture].backend == "hip"
    found = []
    for outer, inner, warps, stages, matrix in itertools.product(
        (64, 128), (16, 32, 64, 128), (2, 4, 8), (1, 2, 3), (0, 16)
    ):
        rows_per_warp = (matrix or 32) if amd else 16
        if (
            inner <= outer
            and rows_per_warp * warps <= outer
            and stages <= (2 if amd else 3)
            and warps >= (2 if amd else 4)
            and (amd or not matrix)
        ):
            m, n = (inner, outer) if kernel == "attention_grad_kv" else (outer, inner)
            ways = (
                _CDNA2_WAYS
                if architecture == "gfx90a" and stages == 1 and kernel != "attention_grad_q"
                else _CDNA2_WAYS[:1]
            )
            found += [
                Blocks(
                    m,
                    n,
                    warps,
                    stages,
                    matrix,
                    *way,
                )
                for way in ways
            ]
    return found


def compile_candidate(architecture: str, kernel: str, variant: str, blocks: Blocks, out: Path) -> str:
    """Compile one candidate into its own folder with a manifest. Returns a line of text with the result."""
    from frontier_llm.ops.aot.build import Build, compile_one, write_manifest

    kernel_table.ATTENTION_BLOCKS[architecture][kernel][variant] = blocks
    name = f"{kernel}-{variant}-{'-'.join(map(str, blocks))}"
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        code = compile_one(
            Build(
                architecture,
                kernel,
                "bf16",
                variant,
                True,
            ),
            folder,
        )
    except Exception as error:  # in most cases the candidate needs too much shared memory
        return f"{name}: {type(error).__name__}"
    machine = ARCHITECTURES[architecture]
    if code.spills > (0 if machine.backend == "hip" else 64) or code.shared_bytes > machine.block_shared_bytes:
        return f"{name}: {code.spills} registers spilled, {code.shared_bytes} bytes of shared memory"
    write_manifest(folder, architecture, [code])
    (folder / "candidate.json").write_text(
        json.dumps(
            {
                **asdict(code),
                "variant": variant,
                "blocks": blocks,
            }
        ),
        encoding="utf-8",
    )
    return f"{name}: {code.registers} registers"


def build(architecture: str, wanted: list[str], out: Path, most: int | None) -> None:
    """Compile the candidates for these variants. `most` limits the number for each kernel and variant."""
    items = [
        (kernel, variant, blocks)
        for kernel in KERNELS
        for variant in wanted
        for blocks in candidates(kernel, architecture)[:most]
    ]
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(os.cpu_count()) as pool:
        os.environ["TRITON_CACHE_DIR"] = cache
        for said in pool.map(
            compile_candidate, itertools.repeat(architecture), *zip(*items, strict=True), itertools.repeat(out)
        ):
            print(said, flush=True)


class WithCandidate:
    """The shipped attention kernels, one of which is replaced by a candidate."""

    def __init__(self, shipped: Kernels, candidate: Kernels, kernel: str) -> None:
        self.shipped = shipped
        self.candidate = candidate
        self.kernel = kernel

    def block(self, kernel: str, variant: str, name: str) -> int:
        """Return a compile-time constant of the kernel."""
        return (self.candidate if kernel == self.kernel else self.shipped).block(kernel, variant, name)

    def launch(self, kernel: str, dtype: torch.dtype, variant: str, grid: Grid, /, **arguments: Argument) -> None:
        (self.candidate if kernel == self.kernel else self.shipped).launch(
            kernel,
            dtype,
            variant,
            grid,
            **arguments,
        )


def run(
    shipped: PrebuiltKernels, out: Path, device: str, sequence: int = 2048, tokens: int = 16384, width: int = 2048
) -> dict[str, Any]:
    """Time every candidate in `out`. Returns {"kernel, variant": [(seconds, blocks or "shipped"), …]}, best first."""
    found: dict[str, list[tuple[float, Any]]] = {}
    for path, line in built(out):
        kernel = line["kernel"]
        variant = line["variant"]
        if f"{kernel}, {variant}" not in found:
            found[f"{kernel}, {variant}"] = [
                (
                    time_of(
                        GpuOps(shipped),
                        kernel,
                        variant,
                        device,
                        sequence,
                        tokens,
                        width,
                    ),
                    "shipped",
                )
            ]
        mixed = WithCandidate(shipped, PrebuiltKernels(shipped.architecture, path), kernel)
        try:
            seconds = time_of(
                GpuOps(mixed),
                kernel,
                variant,
                device,
                sequence,
                tokens,
                width,
            )
        except Exception as error:
            print(f"{path.name}: {error}", flush=True)
            continue
        found[f"{kernel}, {variant}"].append((seconds, line["blocks"]))
    return {key: sorted(times, key=lambda item: item[0]) for key, times in found.items()}


def built(out: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return folder and description of each candidate."""
    return [
        (path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(out.glob("*/candidate.json"))
    ]


def simulate(shipped: Path, out: Path, sequence: int = 1024) -> dict[str, Any]:
    """Time every candidate on a simulated compute unit of the MI250X.

    Returns {"kernel, variant": [(share of the matrix rate, blocks or "shipped", Timing), …]}.
    """
    found: dict[str, list[tuple[float, Any, Timing]]] = {}
    lines = [(shipped, line, "shipped") for line in read_manifest("gfx90a", shipped)["kernels"]]
    lines = [entry for entry in lines if entry[1]["dtype"] == "bf16" and entry[1]["kernel"] in KERNELS]
    for folder, line, blocks in lines + [(path, line, line["blocks"]) for path, line in built(out)]:
        gpu = TracingGpu()
        kernels: Kernels = PrebuiltKernels("gfx90a", shipped, gpu)
        if folder != shipped:
            kernels = WithCandidate(kernels, PrebuiltKernels("gfx90a", folder, gpu), line["kernel"])
        try:
            share, timing = simulated_share(GpuOps(kernels), gpu, line, sequence)
        except FrontierError as error:
            print(f"{folder.name}: {error}", flush=True)
            continue
        found.setdefault(f"{line['kernel']}, {line['variant']}", []).append((share, blocks, timing))
    return {key: sorted(shares, reverse=True, key=lambda item: item[0]) for key, shares in found.items()}


def simulated_share(ops: GpuOps, gpu: TracingGpu, line: dict[str, Any], sequence: int) -> tuple[float, Timing]:
    """Return the rate of a kernel's first block, which takes longest: its useful FLOPs divided by the matrix units'
    peak FLOPs in the same time.

    The share is an upper bound (tests/cdna2/timing.py). Also returns its timing.
    """
    kernel = line["kernel"]
    constants = line["constants"]
    dim = constants["BLOCK_D"]
    outer = constants["BLOCK_N" if kernel == "attention_grad_kv" else "BLOCK_M"]
    extras = (torch.ones(1), torch.zeros(1, sequence, dtype=torch.int32)) if constants["EXTRAS"] else ()
    q, k, v = (
        torch.randn(
            sequence,
            1,
            1,
            dim,
            dtype=torch.bfloat16,
        ).requires_grad_()
        for _ in range(3)
    )
    out = ops.attention(q, k, v, Scores(dim**-0.5, *extras))
    if kernel != "attention_forward":
        out.backward(torch.randn_like(out))
    waves = ARCHITECTURES["gfx90a"].waves_per_simd(line["warps"], line["registers"], line["shared_bytes"])
    timing = time_of_trace(*gpu.traces[kernel], int(waves))
    products = {
        "attention_forward": 2,
        "attention_grad_kv": 4,
        "attention_grad_q": 3,
    }[kernel]
    flops = 2 * products * dim * outer * (sequence - outer / 2)  # below the diagonal
    return flops / (timing.cycles * line["warps"] / SIMDS * Rates().matrix_flops), timing


def time_of(ops: GpuOps, kernel: str, variant: str, device: str, sequence: int, tokens: int, width: int) -> float:
    """Return the seconds of the forward pass, or of the complete backward pass, of causal attention in bf16."""
    name, _, extras = variant.partition("-")
    dim = int(name.removeprefix("d"))
    shape = (sequence, tokens // sequence, width // dim, dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_() for _ in range(3))
    grad = torch.randn(shape, dtype=torch.bfloat16, device=device)
    scores = Scores(
        dim**-0.5,
        *((q.new_ones(q.shape[2]), torch.zeros(shape[1::-1], dtype=torch.int32, device=device)) if extras else ()),
    )
    out = ops.attention(q, k, v, scores)
    if kernel == "attention_forward":
        with torch.no_grad():
            return min(kernel_s(lambda: ops.attention(q, k, v, scores), device) for _ in range(4))
    return min(kernel_s(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), device) for _ in range(4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("build", "run", "simulate"))
    parser.add_argument("--arch", default="gfx90a", choices=tuple(ARCHITECTURES))
    parser.add_argument("--variants", default="d64,d64-extras,d128,d128-extras")
    parser.add_argument(
        "--candidates", type=int, metavar="N", help="build only N candidates of each kernel and variant (default: all)"
    )
    parser.add_argument("--out", type=Path, default=Path("build/tune"))
    parser.add_argument("--sequence", type=int, default=1024, help="sequence length of `simulate`, in tokens")
    parser.add_argument(
        "--shipped", type=Path, help="folder of the code objects to compare with (default: the installed ones)"
    )
    small = ["build", "--variants", "d64", "--candidates", "1", "--out", FOLDER]
    args = parse_arguments(parser, smoke=small)
    if args.action == "build":
        build(args.arch, args.variants.split(","), args.out, args.candidates)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if args.action == "simulate":
        shares = simulate(args.shipped or GPU_DIR / "gfx90a", args.out, args.sequence)
        (args.out / "shares.json").write_text(json.dumps(shares, indent=1, default=asdict), encoding="utf-8")
        print("Shares are upper bounds: the model has no clocks under load and no contention for L2 and HBM.\n")
        print("| kernel | blocks | useful share, at most | matrix busy | vector busy | LDS busy |")
        print("|---|---|---|---|---|---|")
        for key, best in shares.items():
            for share, blocks, timing in best[:5]:
                busy = (timing.matrix_share, timing.vector_share, timing.lds_share)
                print(f"| {key} | {blocks} | {share:.2f} | " + " | ".join(f"{part:.2f}" for part in busy) + " |")
        return
    result = run(PrebuiltKernels(args.arch, args.shipped), args.out, "cuda")
    (args.out / "times.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    for key, times in result.items():
        print(f"{key}: " + ", ".join(f"{blocks} {seconds * 1e6:.0f} us" for seconds, blocks in times[:5]))


if __name__ == "__main__":
    main()
