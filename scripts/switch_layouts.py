"""One run that changes layout, schedule, ZeRO and working precision every few hundred steps, on top of one that never does.

    python scripts/switch_layouts.py [--steps 200] [--out docs/figures/switch_layouts.png]

The experiment of MosaicML's "training LLMs with AMD MI250" (2023), whose run moved between AMD and NVIDIA GPUs: here every segment is a
start of `frontier-llm train` that loads the checkpoint of the segment before. With a GPU, add `--devices cpu,cuda` to alternate devices; without one,
`--ops auto,reference` alternates between the C++ ops and plain torch, which are as far apart as two vendors' kernels: another code for every op.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from frontier_llm.ops.reference import GROUPS

SEGMENTS = [
    ("1 rank", []),
    ("tp 2, sequence parallel", ["parallel.tensor=2", "parallel.sequence_parallel=true"]),
    ("pp 2, 2 chunks", ["parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=interleaved"]),
    ("dp 2, no ZeRO", ["parallel.data=2", "parallel.zero=0"]),
    ("dp 2, ZeRO-1, bf16", ["parallel.data=2", "precision.dtype=bf16"]),
    ("tp 2, pp 2, zb-h1", ["parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.pipeline=2", "parallel.schedule=zb-h1"]),
]
RUN = """
model: llama-tiny
batch: {{global_batch: 8, micro_batch: 2}}
optimizer: {{lr: 1.0e-3, warmup_steps: 20, decay_steps: {total}}}
precision: {{dtype: fp32}}
train: {{run_dir: {run_dir}, device: cpu, tensorboard: false}}
"""


def train(run: Path, steps: int, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "frontier_llm.cli.main", "train", str(run), f"train.steps={steps}", *overrides]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} failed\n{done.stderr[-3000:]}")


def losses(run_dir: Path) -> list[float]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "step"]


def plot(steady: list[float], switching: list[float], steps: int, names: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=[3, 1])
    top.plot(steady, label="one rank, fp32, never interrupted", linewidth=3, alpha=0.4)
    top.plot(switching, label="another layout in every segment", linewidth=1)
    for number, name in enumerate(names):
        top.axvline(number * steps, color="grey", linewidth=0.5)
        top.text(number * steps + 2, max(steady), name, rotation=90, verticalalignment="top", fontsize=7)
    top.set_ylabel("loss, nats per token")
    top.legend()
    bottom.plot([a - b for a, b in zip(switching, steady, strict=True)], linewidth=0.7)
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=200, help="of each segment")
    options.add_argument("--devices", default="cpu", help="comma-separated, one after another")
    options.add_argument("--ops", default="auto", help="providers of all ops, comma-separated, one after another")
    options.add_argument("--out", type=Path, default=Path("runs/switch_layouts.png"))
    args = options.parse_args()
    devices, providers, total = args.devices.split(","), args.ops.split(","), args.steps * len(SEGMENTS)
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Path(folder) / f"{name}.yaml" for name in ("steady", "switching")}
        for name, path in runs.items():
            path.write_text(RUN.format(run_dir=Path(folder) / name, total=total))
        train(runs["steady"], total, [])
        for number, (_, overrides) in enumerate(SEGMENTS):
            ops = [f"ops.{group}={providers[number % len(providers)]}" for group in GROUPS]
            train(runs["switching"], (number + 1) * args.steps, [*overrides, *ops, f"train.device={devices[number % len(devices)]}"])
        steady, switching = losses(Path(folder) / "steady"), losses(Path(folder) / "switching")
    plot(steady, switching, args.steps, [name for name, _ in SEGMENTS], args.out)
    apart = [
        max(abs(a - b) for a, b in zip(steady[s : s + args.steps], switching[s : s + args.steps], strict=True))
        for s in range(0, total, args.steps)
    ]
    print(
        json.dumps(
            {
                "steps": total,
                "final": [steady[-1], switching[-1]],
                "largest difference by segment": dict(zip([n for n, _ in SEGMENTS], apart, strict=True)),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
