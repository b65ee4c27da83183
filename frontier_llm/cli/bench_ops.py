"""frontier-llm bench ops: each fused op against eager torch, in one interleaved run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import positive

if TYPE_CHECKING:
    from frontier_llm.measure.ops import Timing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the bench."""
    parser.add_argument("--model", default="bench-l8-h384", help="name in configs/models, or a path: whose shapes (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="working precision (default: bf16)")
    parser.add_argument("--micro-batch", type=positive, default=4, metavar="N", help="samples per microbatch (default: 4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda is also ROCm's name in torch (default: cpu)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; bandwidth and FLOP rates are of our ops."""
    from frontier_llm.config import OpsConfig, load_model

    model = load_model(args.model)
    import torch  # after a mistyped model's name

    from frontier_llm.errors import BackendError
    from frontier_llm.measure.ops import compare, copy_bandwidth
    from frontier_llm.ops import select_ops, working_dtype
    from frontier_llm.train.host_memory import keep_freed_memory

    if args.device == "cuda" and not torch.cuda.is_available():
        fix = "check the module, the container and ROCR_VISIBLE_DEVICES, or take --device cpu"
        raise BackendError("torch sees no GPU", fix, "--device cuda")
    if args.device == "cpu":
        keep_freed_memory()  # as in training
    dtype = working_dtype(args.dtype)
    timings = list(compare(select_ops(OpsConfig(), args.device, dtype), model, args.micro_batch, dtype, args.device))
    copy_bytes_per_s = copy_bandwidth(args.device)
    if args.json:
        rows = [asdict(timing) | ({"seconds": None} if timing.error else {}) for timing in timings]  # JSON has no nan
        print(json.dumps({"copy_bytes_per_s": copy_bytes_per_s, "ops": rows}, indent=1))
        return 0
    where = f"{args.dtype} on {args.device}, {torch.get_num_threads()} threads"
    print(f"{args.model}, microbatch {args.micro_batch}, {where}; copy {copy_bytes_per_s / 1e9:.0f} GB/s")
    _print(timings)
    return 0


def _print(timings: list[Timing]) -> None:
    """One line per op: ours beside eager torch."""
    from frontier_llm.units import TERA, format_seconds

    print(f"{'op':<22} {'ours':>9} {'eager':>9} {'gain':>6}   rate of ours")
    for op, ways in groupby(timings, lambda timing: timing.op):
        timed = {timing.way: timing for timing in ways}
        for timing in timed.values():
            if timing.error and timing.way in ("ours", "eager", "all"):
                print(f"{op:<22} {timing.way}: {timing.error}")
        ours, eager = timed.get("ours"), timed.get("eager")
        if ours and eager and not ours.error and not eager.error:
            rate = f"{ours.flops / ours.seconds / TERA:.3f} TFLOP/s" if ours.flops else f"{ours.bytes_moved / ours.seconds / 1e9:.0f} GB/s"
            times = f"{format_seconds(ours.seconds):>9} {format_seconds(eager.seconds):>9} {eager.seconds / ours.seconds:5.2f}x"
            print(f"{op:<22} {times}   {rate}")
