"""frontier-llm ops list|kernels|check|tune: show the back-ends of each op, and show, check and time the prebuilt GPU
kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from frontier_llm.cli.arguments import JSON, Command, command, option, positive, show
from frontier_llm.tables import aligned, markdown


@command(
    option("architecture", metavar="ARCHITECTURE", help="gfx90a, gfx942, sm_80 or sm_90"),
    option(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        default="bf16",
        help="type of the kernels' operands (default: bf16)",
    ),
    JSON,
    line="registers, LDS, matrix instructions and occupancy of an architecture's code objects",
    about="Print registers, LDS, matrix instructions and occupancy of an architecture's code objects.",
    examples=("frontier-llm ops kernels gfx90a",),
)
def _kernels(args: argparse.Namespace) -> int:
    from frontier_llm.ops.manifest import kernel_report

    kernels = [kernel for kernel in kernel_report(args.architecture) if kernel["dtype"] == args.dtype]
    head = (
        "kernel",
        "variant",
        "blocks",
        ">warps",
        ">registers",
        ">shared bytes",
        ">matrix instructions",
        ">spills",
        ">waves/SIMD",
    )
    show(args, kernels, lambda: markdown(head, map(_kernel_cells, kernels)))
    return 0


def _kernel_cells(kernel: Mapping[str, Any]) -> list[object]:
    blocks = " x ".join(str(value) for name, value in kernel["constants"].items() if name.startswith("BLOCK"))
    facts = [kernel[name] for name in ("warps", "registers", "shared_bytes", "matrix_instructions", "spills")]
    variant = kernel["variant"] + ("" if kernel["aligned"] else ", unaligned")
    return [kernel["kernel"], variant, blocks, *facts, f"{kernel['waves_per_simd']:g}"]


@command(
    option("--all", action="store_true", help="fp16 and fp32 too, not only bf16"),
    JSON,
    line="run the prebuilt GPU ops on this machine's GPU, against the reference in float64",
    about="Run the prebuilt GPU ops on this machine's GPU, against the reference in float64; exit code 1 when one is "
    "wrong.",
    examples=("frontier-llm ops check --all",),
)
def _check(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    import torch

    from frontier_llm.cli.arguments import ProgressBar
    from frontier_llm.errors import BackendError
    from frontier_llm.ops.check import DTYPES, check
    from frontier_llm.ops.gpu import GpuOps
    from frontier_llm.ops.prebuilt import kernels_of_this_gpu

    if not torch.cuda.is_available():
        raise BackendError(
            "torch sees no GPU to check",
            "run it on a machine with a GPU; python -m tests.harness.check_gfx90a simulates gfx90a",
            "ops check",
        )
    results = []
    progress = ProgressBar(shown=not args.json)
    for result in check(GpuOps(kernels_of_this_gpu()), "cuda", list(DTYPES) if args.all else ["bf16"]):
        results.append(result)
        progress.on(f"{result.dtype} {result.op}", "cases")(len(results))
    progress.close()

    def table() -> str:
        verdicts = [
            "ok" if result.ok else f"wrong: {result.fault or 'the error is above the limit'}" for result in results
        ]
        rows = [
            (result.op, result.dtype, result.shape, f"{result.error:.2f}", f"{result.limit:g}", verdict)
            for result, verdict in zip(results, verdicts, strict=True)
        ]
        unit = "forward and backward; errors in units in the last place of the largest element"
        return f"{markdown(('op', 'type', 'shape', '>error', '>of at most', ''), rows)}\n{unit}"

    show(args, [{**asdict(result), "ok": result.ok} for result in results], table)
    return int(not all(result.ok for result in results))


@command(
    option(
        "--dtype",
        choices=("bf16", "fp16", "fp32", "fp64"),
        default="bf16",
        help="working precision (default: bf16)",
    ),
    JSON,
    line="print which back-ends of each op are available on each architecture, or why not",
    about="Print for each op, back-end and architecture whether it is available, or the reason why not.",
    examples=("frontier-llm ops list --dtype bf16",),
)
def _list(args: argparse.Namespace) -> int:
    from frontier_llm.ops.deepspeed_ops import LOADED_BY, op_states
    from frontier_llm.ops.manifest import prebuilt_architectures
    from frontier_llm.ops.native import describe_instruction_sets
    from frontier_llm.ops.select import backends

    rows = backends(args.dtype)
    architectures = prebuilt_architectures()
    deepspeed = op_states()
    processor = describe_instruction_sets()

    def lines() -> Iterator[str]:
        yield processor
        for device in ("cpu", "cuda"):
            yield f"{device} ({args.dtype}); * marks what auto selects"
            here = (row for row in rows if row["device"] == device)
            cells = (
                (f"{'*' if row['chosen'] else ' '} {row['op']}", row["backend"], row["deterministic"], row["status"])
                for row in here
            )
            yield aligned(("  op", "back-end", "deterministic", ""), cells, indent="  ")
        yield "prebuilt GPU kernels"
        yield from (f"    {name:<8} {state}" for name, state in architectures.items())
        yield "DeepSpeed's ops" if deepspeed else "DeepSpeed's ops: DeepSpeed is not installed"
        yield from (f"    {name:<10} {state} (loaded by {LOADED_BY[name]})" for name, state in deepspeed.items())

    show(
        args,
        {"processor": processor, "backends": rows, "prebuilt": architectures, "deepspeed": deepspeed},
        lambda: "\n".join(lines()),
    )
    return 0


@command(
    option(
        "--model",
        default="llama-2-7b",
        help="model whose shapes are measured: name in configs/models, or a path (default: %(default)s)",
    ),
    option(
        "--micro-batch",
        type=positive,
        default=4,
        metavar="N",
        help="samples per microbatch (default: 4)",
    ),
    option(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        default="bf16",
        help="working precision (default: bf16)",
    ),
    option(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda",
        help="cuda is also ROCm's name in torch (default: cuda)",
    ),
    option(
        "--output",
        type=Path,
        default=Path("attention.yaml"),
        metavar="FILE",
        help="table to write (default: %(default)s)",
    ),
    JSON,
    line="time every attention back-end that is available, and write their order for ops.attention_table",
    about="Time every attention back-end that is available, and write their order for ops.attention_table.",
    examples=("frontier-llm ops tune --model llama-2-7b",),
)
def _tune(args: argparse.Namespace) -> int:
    from frontier_llm.config import load_model

    model = load_model(args.model)
    import torch  # imported after the model's name is checked, because this import is slow

    from frontier_llm.errors import BackendError
    from frontier_llm.experiments.measure.attention_choice import tune

    if args.device == "cuda" and not torch.cuda.is_available():
        raise BackendError("torch sees no GPU", "run it on a machine with a GPU, or use --device cpu", "ops tune")
    report = tune(args.output, model, args.micro_batch, args.dtype, args.device)

    def lines() -> Iterator[str]:
        for name, found in report.items():
            yield f"{name}: " + ", ".join(
                f"{backend} {seconds * 1e3:.3f} ms" for backend, seconds in found["seconds"].items()
            )
            yield from (f"  not {backend}: {why}" for backend, why in found["not_run"].items())
        yield f"wrote {args.output}: use it with ops.attention_table={args.output}"

    show(args, report, lambda: "\n".join(lines()))
    return 0


ops = Command(
    about=(
        "Show which back-end each fused op uses and why it does not use another. Inspect, check and time the "
        "prebuilt GPU kernels."
    ),
    examples=("frontier-llm ops list --dtype bf16", "frontier-llm ops kernels gfx90a", "frontier-llm ops check --all"),
    actions={"list": _list, "kernels": _kernels, "check": _check, "tune": _tune},
)
