"""frontier-llm bench ops: each fused op against eager torch, with interleaved measurements in one run."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import JSON, command, option, positive, show
from frontier_llm.tables import aligned
from frontier_llm.units import TERA, format_seconds

if TYPE_CHECKING:
    from frontier_llm.experiments.measure.ops import Timing


@command(
    JSON,
    option(
        "--model",
        default="bench-l8-h384",
        help="model whose shapes are measured: name in configs/models, or a path (default: %(default)s)",
    ),
    option(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        default="bf16",
        help="working precision (default: bf16)",
    ),
    option(
        "--micro-batch",
        type=positive,
        default=4,
        metavar="N",
        help="samples per microbatch (default: 4)",
    ),
    option(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda is also ROCm's name in torch (default: cpu)",
    ),
    line="time each fused op and eager torch, alternately in one run",
    about="Time each fused op and the same op in eager torch, alternately in one run.",
    examples=(
        "frontier-llm bench ops --model llama-2-7b --device cuda",
        "frontier-llm bench ops --json",
    ),
)
def ops(args: argparse.Namespace) -> int:
    """Measure the ops and print a table. The bandwidths and FLOP rates in the table describe the package's ops, not
    eager torch.
    """
    from frontier_llm.config import OpsConfig, load_model

    model = load_model(args.model)
    import torch  # imported after the model's name is checked, because this import is slow

    from frontier_llm.errors import BackendError
    from frontier_llm.experiments.measure.ops import compare, copy_bandwidth
    from frontier_llm.ops import select_ops, working_dtype
    from frontier_llm.training.device import keep_freed_memory

    if args.device == "cuda" and not torch.cuda.is_available():
        fix = "check the module, the container and ROCR_VISIBLE_DEVICES, or use --device cpu"
        raise BackendError("torch sees no GPU", fix, "--device cuda")
    if args.device == "cpu":
        keep_freed_memory()  # training uses the same allocator setting
    dtype = working_dtype(args.dtype)
    timings = list(compare(select_ops(OpsConfig(), args.device, dtype), model, args.micro_batch, dtype, args.device))
    copy_bytes_per_s = copy_bandwidth(args.device)
    rows = [asdict(timing) | ({"seconds": None} if timing.error else {}) for timing in timings]  # JSON has no NaN
    where = f"{args.dtype} on {args.device}, {torch.get_num_threads()} threads"
    head = f"{args.model}, microbatch {args.micro_batch}, {where}; copy {copy_bytes_per_s / 1e9:.0f} GB/s"
    show(args, {"copy_bytes_per_s": copy_bytes_per_s, "ops": rows}, lambda: f"{head}\n{_table(timings)}")
    return 0


def _table(timings: list[Timing]) -> str:
    """Return a table of the package's ops and eager torch, one line per op, and then the failures."""
    rows = []
    failures = []
    for op, ways in groupby(timings, lambda timing: timing.op):
        timed = {timing.way: timing for timing in ways}
        failures += [
            f"{op} {way}: {timing.error}"
            for way, timing in timed.items()
            if timing.error and way in ("ours", "eager", "all")
        ]
        ours = timed.get("ours")
        eager = timed.get("eager")
        if ours and eager and not ours.error and not eager.error:
            if ours.flops:
                rate = f"{ours.flops / ours.seconds / TERA:.3f} TFLOP/s"
            else:
                rate = f"{ours.bytes_moved / ours.seconds / 1e9:.0f} GB/s"
            gain = f"{eager.seconds / ours.seconds:.2f}x"
            rows.append((op, format_seconds(ours.seconds), format_seconds(eager.seconds), gain, rate))
    return "\n".join([aligned(("op", ">ours", ">eager", ">gain", ">our rate"), rows), *failures])
