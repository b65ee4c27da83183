"""frontier-llm ops list|kernels|check: which op runs with which back-end and why not; what the prebuilt GPU kernels are made of, and do."""

from __future__ import annotations

import argparse

from frontier_llm.cli.arguments import JSON, Command, command, option


@command(
    option("architecture", metavar="ARCHITECTURE", help="gfx90a, gfx942, sm_80 or sm_90"),
    option("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the kernels' operands (default: bf16)"),
    JSON,
    line="registers, LDS, matrix instructions and occupancy of an architecture's code objects",
    about="Print registers, LDS, matrix instructions and occupancy of an architecture's code objects.",
)
def _kernels(args: argparse.Namespace) -> int:
    import json

    from frontier_llm.ops.manifest import kernel_report

    lines = [line for line in kernel_report(args.architecture) if line["dtype"] == args.dtype]
    if args.json:
        print(json.dumps(lines, indent=1))
        return 0
    print("| kernel | variant | blocks | warps | registers | shared bytes | matrix instructions | spills | waves/SIMD |")
    print("|---|---|---|---|---|---|---|---|---|")
    for line in lines:
        blocks = " x ".join(str(value) for name, value in line["constants"].items() if name.startswith("BLOCK"))
        facts = [line[name] for name in ("warps", "registers", "shared_bytes", "matrix_instructions", "spills")]
        variant = line["variant"] + ("" if line["aligned"] else ", unaligned")
        print(f"| {line['kernel']} | {variant} | {blocks} | {' | '.join(map(str, facts))} | {line['waves_per_simd']:g} |")
    return 0


@command(
    option("--all", action="store_true", help="fp16 and fp32 too, not only bf16"),
    JSON,
    line="run the prebuilt GPU ops on this machine's GPU, against the reference in float64",
    about="Run the prebuilt GPU ops on this machine's GPU, against the reference in float64; exit code 1 when one is wrong.",
)
def _check(args: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    import torch

    from frontier_llm.cli.progress import Progress
    from frontier_llm.errors import BackendError
    from frontier_llm.ops.check import DTYPES, check
    from frontier_llm.ops.gpu import GpuOps
    from frontier_llm.ops.prebuilt import kernels_of_this_gpu

    if not torch.cuda.is_available():
        raise BackendError("torch sees no GPU to check", "run it where there is one; scripts/check_gfx90a.py simulates gfx90a", "ops check")
    results, progress = [], Progress(shown=not args.json)
    for result in check(GpuOps(kernels_of_this_gpu()), "cuda", list(DTYPES) if args.all else ["bf16"]):
        results.append(result)
        progress.on(f"{result.dtype} {result.op}", "cases")(len(results))
    progress.close()
    if args.json:
        print(json.dumps([{**asdict(result), "ok": result.ok} for result in results], indent=1))
    else:
        print("| op | type | shape | error | of at most | |")
        print("|---|---|---|---|---|---|")
        for result in results:
            verdict = "ok" if result.ok else f"wrong: {result.fault or 'the error is above the limit'}"
            print(f"| {result.op} | {result.dtype} | {result.shape} | {result.error:.2f} | {result.limit:g} | {verdict} |")
        print("forward and backward; errors in units in the last place of the largest element")
    return int(not all(result.ok for result in results))


@command(
    option("--dtype", choices=("bf16", "fp16", "fp32", "fp64"), default="bf16", help="working precision (default: bf16)"),
    JSON,
    line="op x back-end x architecture: available, or why not",
    about="Print op x back-end x architecture: available, or why not.",
)
def _list(args: argparse.Namespace) -> int:
    import json

    from frontier_llm.ops.manifest import prebuilt_architectures
    from frontier_llm.ops.select import backends

    rows, architectures = backends(args.dtype), prebuilt_architectures()
    if args.json:
        print(json.dumps({"backends": rows, "prebuilt": architectures}, indent=1))
        return 0
    for device in ("cpu", "cuda"):
        print(f"{device} ({args.dtype}); * is what auto takes")
        for row in (row for row in rows if row["device"] == device):
            mark = "*" if row["chosen"] else " "
            print(f"  {mark} {row['op']:<14} {row['backend']:<11} {row['status']}")
    print("prebuilt GPU kernels")
    for name, state in architectures.items():
        print(f"    {name:<8} {state}")
    return 0


ops = Command(
    about="Which fused op runs with which back-end, and why not with another; what the prebuilt GPU kernels are made of, and do.",
    examples=("frontier-llm ops list --dtype bf16", "frontier-llm ops kernels gfx90a", "frontier-llm ops check --all"),
    actions={"list": _list, "kernels": _kernels, "check": _check},
)
