"""Predicted beside measured step time on this computer, over a spread of layouts.

    frontier-llm calibrate --output calibrated.yaml
    python scripts/bench_plan.py calibrated.yaml [--run bench] [--steps 5]

Predictions simulate the schedule under the calibrated machine file; measurements are `frontier-llm bench step`, one process per rank.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from frontier_llm.config import load_run
from frontier_llm.costs import from_config
from frontier_llm.machine import load_machine, rates
from frontier_llm.planner.pipeline import play
from frontier_llm.topology import make_plan

LAYOUTS = (
    ("1 rank", []),
    ("1 rank, microbatch 1", ["batch.micro_batch=1"]),
    ("1 rank, full recomputation", ["train.recompute=full"]),
    ("TP2", ["parallel.tensor=2"]),
    ("TP2, sequence parallel", ["parallel.tensor=2", "parallel.sequence_parallel=true"]),
    ("PP2", ["parallel.pipeline=2"]),
    ("PP2, 2 chunks", ["parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=interleaved"]),
    ("PP2, ZB-H1", ["parallel.pipeline=2", "parallel.schedule=zb-h1"]),
    ("DP2", ["parallel.data=2"]),
)


def main() -> int:
    """Print the table; exit code 1 when a prediction is off by more than 15 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--run", default="bench")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    numbers = rates(load_machine(args.machine))
    worst = 0.0
    print(f"{'layout':30} {'measured':>10} {'predicted':>10} {'error':>7}")
    for name, overrides in LAYOUTS:
        config = load_run(args.run, overrides)
        ranks = config.parallel.tensor * config.parallel.pipeline * (config.parallel.data or 1)
        plan = make_plan(config, ranks)
        predicted = play(from_config(config, ranks), numbers, plan.schedule, plan.stages).step_s
        command = [
            sys.executable,
            "-m",
            "frontier_llm.cli.main",
            "bench",
            "step",
            args.run,
            *overrides,
            "--steps",
            str(args.steps),
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        measured = json.loads(done.stdout[done.stdout.index("{") :])["step_time_s"]
        error = predicted / measured - 1
        worst = max(worst, abs(error))
        print(f"{name:30} {measured:>8.3f} s {predicted:>8.3f} s {100 * error:>+6.1f} %")
    print(f"worst {100 * worst:.1f} %")
    return int(worst > 0.15)


if __name__ == "__main__":
    sys.exit(main())
