#!/usr/bin/env python3
"""Compares the training step with megatron-core and DeepSpeed: same model, same layout, one thread per rank,
alternating rounds.

    python -m benchmarks.peers.gpt --peers-python PEERS_VENV/bin/python [--rounds 3] [--layouts tp1,tp2,pp2,dp2,tp2pp2]
    [--json FILE]

PEERS_VENV contains torch==2.13.0, megatron-core==0.16.1 and deepspeed==0.19.8 (pip install --no-build-isolation). This
interpreter contains frontier_llm. Each cell is the median over all steps of all rounds. The ratio compares this project
with the best peer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.harness import ROOT, last_json, parse_arguments, write_json

LAYOUTS = {
    "serial": (1, 1, 1),
    "tp2": (2, 1, 1),
    "pp2": (1, 2, 1),
    "dp2": (1, 1, 2),
    "tp2pp2": (2, 2, 1),
    "pp2dp2": (1, 2, 2),
}
SHAPE = {
    "layers": 8,
    "hidden": 384,
    "heads": 6,
    "ffn": 1536,
    "sequence": 256,
    "vocab": 8192,
    "micro_batch": 4,
    "global_batch": 16,
}


def tokens_per_step(shape: dict[str, int]) -> int:
    return shape["global_batch"] * shape["sequence"]


TOKENS = tokens_per_step(SHAPE)
PEERS = {
    "megatron-core": "benchmarks.peers.megatron_core_step",
    "deepspeed": "benchmarks.peers.deepspeed_pipeline_step",
}


def ours(layout: tuple[int, int, int], dtype: str, steps: int, shape: dict[str, int]) -> list[float]:
    tp, pp, dp = layout
    with tempfile.TemporaryDirectory() as run_dir:
        overrides = [
            f"parallel.tensor={tp}",
            f"parallel.pipeline={pp}",
            f"parallel.data={dp}",
            f"precision.dtype={dtype}",
            f"model.layers={shape['layers']}",
            f"batch.global_batch={shape['global_batch']}",
        ]
        command = [sys.executable, "-m", "frontier_llm.cli.main", "bench", "step", "bench", *overrides]
        command += [f"train.run_dir={run_dir}", "--steps", str(steps), "--json"]
        result = run(command)
    step_times_s: list[float] = last_json(result)["step_times_s"]
    return step_times_s


def peer(
    name: str, python: str, layout: tuple[int, int, int], dtype: str, steps: int, shape: dict[str, int]
) -> list[float]:
    tp, pp, dp = layout
    arguments = [
        f"--{key}={value}"
        for key, value in {
            **shape,
            "tp": tp,
            "pp": pp,
            "steps": steps,
            "warmup": 2,
        }.items()
    ]
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp * pp * dp}"]
    result = run([*command, "--module", PEERS[name], f"--dtype={dtype}", *arguments])
    match = re.search(r"^RESULT (.*)$", result, re.M)
    assert match, result
    return json.loads(match[1])["step_s"]


def run(command: list[str]) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    # for ninja, because DeepSpeed compiles an op at start-up
    environment["PATH"] = f"{Path(command[0]).parent}:{environment['PATH']}"
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layouts", default="serial,tp2,pp2,dp2,tp2pp2")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--layers", type=int, default=SHAPE["layers"])
    parser.add_argument("--global-batch", type=int, default=SHAPE["global_batch"])
    parser.add_argument("--json", type=Path)
    small = ["--rounds", "1", "--steps", "1", "--layouts", "serial", "--dtypes", "fp32"]
    small += ["--layers", "1", "--global-batch", str(SHAPE["micro_batch"])]
    args = parse_arguments(parser, smoke=["--peers-python", sys.executable, *small])
    shape = {**SHAPE, "layers": args.layers, "global_batch": args.global_batch}
    tokens = tokens_per_step(shape)
    seconds: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for round_index in range(args.rounds):
        for layout in args.layouts.split(","):
            for dtype in args.dtypes.split(","):
                seconds["frontier_llm", layout, dtype] += ours(LAYOUTS[layout], dtype, args.steps, shape)
                seconds["megatron-core", layout, dtype] += peer(
                    "megatron-core", args.peers_python, LAYOUTS[layout], dtype, args.steps, shape
                )
                if LAYOUTS[layout][0] == 1:
                    seconds["deepspeed", layout, dtype] += peer(
                        "deepspeed", args.peers_python, LAYOUTS[layout], dtype, args.steps, shape
                    )
                print(f"round {round_index + 1}/{args.rounds}: {layout} {dtype} done", file=sys.stderr, flush=True)
    rows = []
    print(
        "| layout | dtype | frontier_llm | megatron-core 0.16.1 | DeepSpeed 0.19.8 | ratio to the best peer "
        "|\n|---|---|--:|--:|--:|--:|"
    )
    for layout in args.layouts.split(","):
        for dtype in args.dtypes.split(","):
            rate = {
                name: tokens / median(seconds[name, layout, dtype])
                for name in ("frontier_llm", *PEERS)
                if seconds[name, layout, dtype]
            }
            ratio = rate["frontier_llm"] / max(value for name, value in rate.items() if name != "frontier_llm")
            cells = " | ".join(f"{rate[name]:,.0f}" if name in rate else "-" for name in ("frontier_llm", *PEERS))
            print(f"| {layout} | {dtype} | {cells} | {ratio:.2f} |")
            rows.append(
                {
                    "layout": layout,
                    "dtype": dtype,
                    "tokens_per_s": rate,
                    "ratio": ratio,
                }
            )
    write_json(
        args.json,
        {
            "shape": shape,
            "rounds": args.rounds,
            "steps": args.steps,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
