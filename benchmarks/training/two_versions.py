"""Compares this checkout with another one: seconds per training step, and CPU seconds of commands.

    python -m benchmarks.training.two_versions OLD [--rounds 3] [--steps 40] [--json FILE]

OLD is a checkout with its own environment in `.venv`. The training runs of both versions start at the same time, so
that they share the cores and all other load equally. Their speeds are lower than alone, and only the ratio has a
meaning. A ratio is this version's time divided by the other's: above 1, this version is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, TINY, interleave, parse_arguments, write_json

WARM_UP_STEPS = 5
TRAINING = {
    "step, 1 rank": ["parallel.tensor=1", "parallel.pipeline=1"],
    "step, TP2 x PP2": ["parallel.tensor=2", "parallel.pipeline=2"],
}
COMMANDS = {
    "plan gpt-1t, 384 nodes": ["plan", "gpt-1t", "--machine", "frontier", "--nodes", "384"],
    "--help": ["--help"],
    "train --help": ["train", "--help"],
}


def program(checkout: Path) -> str:
    """Return the command-line program of a checkout. Raises SystemExit if there is none."""
    path = checkout / ".venv" / "bin" / "frontier-llm"
    if checkout == ROOT and not path.exists():
        path = Path(sys.executable).with_name("frontier-llm")
    if not path.exists():
        raise SystemExit(f"{path} does not exist: install that version into {checkout}/.venv (scripts/install.sh)")
    return str(path)


def step_seconds(checkouts: dict[str, Path], words: list[str], steps: int, overrides: list[str]) -> dict[str, float]:
    """Train with both versions at the same time. Return version → median seconds of a step."""
    with tempfile.TemporaryDirectory(prefix="frontier-llm-versions-") as folder:
        runs = {}
        for version, checkout in checkouts.items():
            command = [program(checkout), "train", "train_small", *words, *overrides, "optimizer.warmup_steps=0"]
            command += [f"train.steps={steps}", "train.log_interval=1", f"train.run_dir={folder}/{version}"]
            with open(f"{folder}/{version}.log", "wb") as log:
                runs[version] = subprocess.Popen(
                    command,
                    cwd=checkout,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=log,
                )
        for version, run in runs.items():
            if run.wait():
                raise SystemExit(f"{version}: {Path(folder, f'{version}.log').read_text()[-2000:]}")
        return {version: _median_step_s(Path(folder, version, "metrics.jsonl")) for version in checkouts}


def _median_step_s(metrics: Path) -> float:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    times = [row["step_time_s"] for row in rows if "step_time_s" in row]
    return statistics.median(times[WARM_UP_STEPS:] or times)


def cpu_seconds(checkout: Path, words: list[str]) -> float:
    """Return the CPU seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([program(checkout), *words], cwd=checkout, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="steps of each training run")
    parser.add_argument("--json", type=Path)
    args = parse_arguments(parser, [str(ROOT), "--rounds", "1", "--steps", "2"])
    checkouts = {"old": args.old.resolve(), "new": ROOT}
    overrides = [*TINY, "model.kv_heads=2"] if args.smoke else ["batch.global_batch=8"]

    rows: dict[str, dict[str, float]] = {}
    for name, words in TRAINING.items():
        pairs = [step_seconds(checkouts, words, args.steps, overrides) for _ in range(args.rounds)]
        rows[name] = {version: statistics.median(pair[version] for pair in pairs) for version in checkouts}
        rows[name]["ratio"] = statistics.median(pair["new"] / pair["old"] for pair in pairs)
    for name, words in COMMANDS.items():
        found = interleave(
            {version: partial(cpu_seconds, path, words) for version, path in checkouts.items()},
            args.rounds,
            warm_up=0 if args.smoke else 1,
        )
        rows[name] = {version: statistics.median(values) for version, values in found.items()}
        rows[name]["ratio"] = rows[name]["new"] / rows[name]["old"]

    print("seconds: median of each version (training: both at the same time; commands: CPU seconds); new / old")
    for name, row in rows.items():
        print(f"{name:24} old {row['old']:7.3f}  new {row['new']:7.3f}  ratio {row['ratio']:.2f}")
    revisions = {
        version: subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=path, capture_output=True, text=True, check=False
        ).stdout.strip()
        for version, path in checkouts.items()
    }
    write_json(args.json, {"revisions": revisions, "rounds": args.rounds, "rows": rows}, args.smoke)


if __name__ == "__main__":
    main()
