"""Compares predicted with measured step times on this computer, over several layouts.

    python -m benchmarks.planner.plan [--rounds 3] [--machine calibrated.yaml] [--json FILE]

Calibrates first unless a machine file is given. Predictions simulate the schedule with the constants of that file.
Measurements are the medians of `frontier-llm bench step`, one process per rank. The layouts alternate, so that a
disturbance affects more than one of them. The exit code is 1 if a prediction is off by more than 15 %.
Takes 4 minutes on an otherwise idle computer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import interleave, parse_arguments, write_json
from frontier_llm.blueprint.layout import layout_of
from frontier_llm.config import RunConfig, load_run
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.pipeline import simulate_step
from frontier_llm.run.rank_env import environment
from frontier_llm.topology.plan import make_plan

RANKS = 2
BAR = 0.15
LAYOUTS = {
    "one rank": [],
    "one rank, microbatch 1": ["batch.micro_batch=1"],
    "one rank, full recomputation": ["train.recompute=full"],
    "TP2": ["parallel.tensor=2"],
    "TP2, microbatch 1": ["parallel.tensor=2", "batch.micro_batch=1"],
    "TP2, sequence parallel": ["parallel.tensor=2", "parallel.sequence_parallel=true"],
    "PP2": ["parallel.pipeline=2"],
    "PP2, microbatch 1": ["parallel.pipeline=2", "batch.micro_batch=1"],
    "PP2, GPipe": ["parallel.pipeline=2", "parallel.schedule=gpipe"],
    "PP2, 2 chunks": ["parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=interleaved"],
    "PP2, ZB-H1": ["parallel.pipeline=2", "parallel.schedule=zb-h1"],
    "DP2": ["parallel.data=2"],
    "DP2, ZeRO-0": ["parallel.data=2", "parallel.zero=0"],
}


def frontier_llm(*words: str) -> str:
    """Run the command line and return its stdout. A single rank gets the threads of one of `RANKS` ranks."""
    threads = max(1, (os.cpu_count() or 1) // RANKS)
    command = [sys.executable, "-m", "frontier_llm.cli.main", *words]
    env = {**environment(), "OMP_NUM_THREADS": str(threads)}
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=env,
    ).stdout


def predicted_s(config: RunConfig, numbers: Rates) -> float:
    """Return the simulated time of a step."""
    parallel = config.parallel
    ranks = parallel.tensor * parallel.pipeline * (parallel.data or 1)
    plan = make_plan(config, ranks)
    return simulate_step(config.model, layout_of(config, ranks), numbers, plan.stages).step_s


def measured_s(run: str, overrides: list[str], steps: int) -> float:
    """Return the median step time of one `bench step`. Its ranks write their logs into a temporary directory."""
    with tempfile.TemporaryDirectory() as run_dir:
        out = bench_step(run, [*overrides, f"train.run_dir={run_dir}"], steps)
    return float(json.loads(out[out.index("{") :])["step_time_s"])


def bench_step(run: str, overrides: list[str], steps: int) -> str:
    """Run `frontier-llm bench step` and return its stdout."""
    return frontier_llm(
        "bench",
        "step",
        run,
        *overrides,
        "--steps",
        str(steps),
        "--json",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="a calibrated machine file (default: calibrate now)")
    parser.add_argument("--run", default="bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured steps per round and layout")
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=LAYOUTS,
        default=list(LAYOUTS),
        metavar="LAYOUT",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to this file")
    args = parse_arguments(parser, smoke=["--machine", "local", "--rounds", "1", "--steps", "1", "--layouts", "DP2"])
    with tempfile.TemporaryDirectory() as folder:
        machine = args.machine or f"{folder}/calibrated.yaml"
        if not args.machine:
            print(
                frontier_llm(
                    "calibrate",
                    args.run,
                    "--ranks",
                    str(RANKS),
                    "--output",
                    machine,
                )
            )
        numbers = rates(load_machine(machine))
    work = {name: partial(measured_s, args.run, LAYOUTS[name], args.steps) for name in args.layouts}
    samples = interleave(work, args.rounds)
    rows: list[dict[str, Any]] = []
    print(
        f"| {'layout':28} | {'measured':>8} | {'rounds':>17} | {'predicted':>9} | {'error':>8} |\n|---|--:|--:|--:|--:|"
    )
    for name in args.layouts:
        overrides = LAYOUTS[name]
        measured = median(samples[name])
        predicted = predicted_s(load_run(args.run, overrides), numbers)
        error = predicted / measured - 1
        spread = f"{min(samples[name]):.3f} … {max(samples[name]):.3f} s"
        print(f"| {name:28} | {measured:>6.3f} s | {spread:>17} | {predicted:>7.3f} s | {100 * error:>+6.1f} % |")
        rows.append(
            {
                "layout": name,
                "measured_s": measured,
                "rounds_s": samples[name],
                "predicted_s": predicted,
                "error": error,
            }
        )
    worst = max(abs(row["error"]) for row in rows)
    print(f"worst {100 * worst:.1f} %, bar {100 * BAR:.0f} %")
    write_json(args.json, rows)
    return int(worst > BAR and not args.smoke)


if __name__ == "__main__":
    sys.exit(main())
