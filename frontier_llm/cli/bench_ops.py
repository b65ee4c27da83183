"""frontier-llm bench ops: each fused op against eager torch, in one interleaved run."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the bench."""
    parser.add_argument("--model", default="bench-l8-h384", help="whose shapes (default bench-l8-h384)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def run(args: argparse.Namespace) -> int:
    """Measure and print; bandwidth and FLOP rates are of our ops."""
    from dataclasses import asdict

    import torch

    from frontier_llm.config.load import load_model
    from frontier_llm.config.schema import OpsConfig
    from frontier_llm.ops import select_ops
    from frontier_llm.ops.bench import compare, copy_bandwidth
    from frontier_llm.units import format_seconds

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]
    ops = select_ops(OpsConfig(), args.device, dtype)
    results = compare(ops, load_model(args.model), args.micro_batch, dtype, args.device)
    ceiling = copy_bandwidth(args.device)
    if args.json:
        from frontier_llm.cli.bench import print_json

        print_json({"copy_bytes_per_s": ceiling, "ops": [asdict(result) for result in results]})
        return 0
    print(
        f"{args.model}, microbatch {args.micro_batch}, {args.dtype} on {args.device}, {torch.get_num_threads()} threads; copy {ceiling / 1e9:.0f} GB/s"
    )
    print(f"{'op':<22} {'ours':>9} {'eager':>9} {'gain':>6}   rate of ours")
    for result in results:
        rate = (
            f"{result.flops / result.ours_s / 1e12:.3f} TFLOP/s" if result.flops else f"{result.bytes_moved / result.ours_s / 1e9:.0f} GB/s"
        )
        gain = f"{result.eager_s / result.ours_s:5.2f}x"
        print(f"{result.op:<22} {format_seconds(result.ours_s):>9} {format_seconds(result.eager_s):>9} {gain}   {rate}")
    return 0
