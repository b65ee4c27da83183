"""Measures every layout of a small space on a local Slurm of four nodes, for docs/benchmarks/results/tune.csv.

    python -m benchmarks.planner.measure_layouts DIR [--minutes M] [WORD …]

Starts slurmctld and four slurmds on this machine (tests/harness/slurm.py, needs root). Queues slurm/tune.sbatch with
--exhaustive and ends after M minutes of walltime. The same command continues from there. WORDs are further words of
`frontier-llm tune`.

Ranks that have joined run at a high priority. Each rank is bound to the core with its own number, modulo the number of
cores. Other load on the machine then has little influence on a layout's step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.harness.scenarios import training_cluster
from tests.harness.slurm import ROOT

# Four ranks, one per node and two per core. A step of this model takes about half a second on two cores.
MODEL = [
    "model.hidden=128",
    "model.layers=8",
    "model.sequence_length=128",
    "model.heads=4",
    "model.ffn_hidden=512",
    "model.vocab_size=512",
]
RUN = [
    "model=gpt-tiny",
    *MODEL,
    "precision.dtype=fp32",
    "batch.global_batch=16",
    "data.train=synthetic",
    "train.device=cpu",
]
FIXED = ("recompute=none", "zero=1", "axis_order=tp-dp-pp", "sequence_parallel=false")
WITHIN = 3.0
SPACE = [*(word for choice in FIXED for word in ("--fix", choice)), "--within", str(WITHIN)]

PLUGIN = """
import os, threading, time

# otherwise the scheduler's balancing of two ranks per core would be what varies
core = int(os.environ.get("SLURM_PROCID", 0)) % os.cpu_count()
# login sessions share the cores equally, whatever the nice values of their processes
with open("/proc/self/autogroup", "w") as group:
    group.write("-15")

def prefer():
    while True:
        for thread in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(thread), {core})
            except OSError:
                pass
        time.sleep(0.5)

threading.Thread(target=prefer, daemon=True).start()
"""


def main() -> int:
    """Return 0. The job's exit code is ignored, because the end of its walltime is not a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=int, default=9)
    args, words = parser.parse_known_args()
    output = args.directory.resolve()
    output.mkdir(parents=True, exist_ok=True)
    plugin = output / "prefer.py"
    plugin.write_text(PLUGIN)
    python = output / "python"
    python.write_text(f'#!/bin/bash\nexec nice -n -5 {sys.executable} "$@"\n')
    python.chmod(0o755)
    with training_cluster(nodes=4) as cluster:
        options = [
            "-N4",
            "--ntasks-per-node=1",
            "--partition=local",
            f"--time={args.minutes}",
            f"--output={output}/job.out",
        ]
        tune = [
            *RUN,
            f"plugins=[{plugin}]",
            *SPACE,
            "--steps",
            "12",
            "--max-node-hours",
            "100",
            "--output",
            str(output),
            *(words or ["--exhaustive"]),
        ]
        job_id = cluster.submit(
            *options, str(ROOT / "slurm" / "tune.sbatch"), *tune, cwd=ROOT, env={"FRONTIER_LLM_PYTHON": str(python)}
        )
        job = cluster.wait_job(job_id, 60 * args.minutes + 120)
    print((output / "job.out").read_text()[-3000:], job["JobState"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
