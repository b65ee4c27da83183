"""Trains one run that changes vendor and layout every few hundred steps, and one run for each vendor that never
changes.

    python -m benchmarks.training.switch_vendors [--devices cpu,cuda] [--dtypes fp32,bf16] [--steps 200] [--directory
    runs/switch_vendors] [--out docs]

This repeats the experiment of MosaicML's post "training LLMs with AMD MI250" (2023), in which a run moved between AMD
and NVIDIA GPUs. Every segment is a start of `frontier-llm train` that loads the checkpoint of the previous segment. On
one device (default: the CPU) the two vendors differ in the code of every op (C++ or plain torch) and in the transport
(shared memory or gloo). With two devices each vendor is a device. The run may differ from the uninterrupted runs by as
much as these differ from each other. After an interruption the same command continues with the missing segment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from benchmarks.harness import FOLDER, ensure_text, parse_arguments, write_json
from frontier_llm.checkpoint.directory import named_steps, read_manifest, step_name
from frontier_llm.ops.reference import GROUPS

LAYOUTS: dict[str, tuple[int, list[str]]] = {  # number of ranks, and settings
    "1 rank": (1, []),
    "tp 2, sequence parallel": (2, ["parallel.tensor=2", "parallel.sequence_parallel=true"]),
    "pp 2, 2 chunks, interleaved": (2, ["parallel.pipeline=2", "parallel.chunks=2", "parallel.schedule=interleaved"]),
    "dp 2, no ZeRO": (2, ["parallel.data=2", "parallel.zero=0"]),
    "tp 2 x dp 2, ZeRO-1": (4, ["parallel.tensor=2", "parallel.data=2"]),
    "dp 2 x pp 2, zb-h1": (4, ["parallel.data=2", "parallel.pipeline=2", "parallel.schedule=zb-h1"]),
}
CPU_VENDORS = {
    "cpu: C++ ops, shared memory": ["comm.transport=shm"],
    "cpu: plain torch, gloo": [*(f"ops.{group}=reference" for group in GROUPS), "comm.transport=torch"],
}
SEQUENCES = 8  # sequences of a step
RUN = """
model: {{base: llama-tiny, vocab_size: 257, sequence_length: 128}}
batch: {{global_batch: {sequences}, micro_batch: 2}}
optimizer: {{lr: 1.0e-3, warmup_steps: 20, decay_steps: {total}}}
precision: {{dtype: {dtype}}}
data: {{train: [{{path: {data}/train}}], tokenizer: bytes}}
train: {{run_dir: {run_dir}, device: cpu, tensorboard: false, save_interval: {steps}, keep_checkpoints: 100}}
"""


def vendors(devices: list[str]) -> dict[str, list[str]]:
    """Return name → words for `frontier-llm train`."""
    if len(devices) == 1:
        return {name: [*words, f"train.device={devices[0]}"] for name, words in CPU_VENDORS.items()}
    return {device: [f"train.device={device}"] for device in devices}


def layout_on(vendor: str, name: str) -> tuple[str, list[str]]:
    """Return the layout, or the layout with one rank if the vendor has too few devices."""
    ranks, words = LAYOUTS[name]
    return (
        (name, words)
        if not vendor.startswith("cuda") or ranks <= torch.cuda.device_count()
        else next((k, w) for k, (_, w) in LAYOUTS.items())
    )


def train(run_dir: Path, until: int, words: list[str]) -> str:
    """Return the output of all starts of `frontier-llm train` from the run's last checkpoint to step `until`.

    If the run has already reached this step, the output is read from a file.
    """
    said = run_dir / f"until_{until}.txt"
    unfinished = run_dir / f"until_{until}.unfinished"
    if not said.exists():
        command = [
            sys.executable,
            "-m",
            "frontier_llm.cli.main",
            "train",
            str(run_dir / "run.yaml"),
            f"train.steps={until}",
            *words,
        ]
        with unfinished.open("a") as output:
            done = subprocess.run(
                command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=output, check=False
            )
        if done.returncode:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}; see {unfinished}")
        unfinished.rename(said)
    return said.read_text()


def losses(run_dir: Path, steps: int) -> np.ndarray:
    """Return the losses by step. If a step was done twice, the later loss counts."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    by_step = {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}
    return np.array([by_step[step] for step in range(1, steps + 1)])


def contents(run_dir: Path, steps: int) -> list[dict[str, Any]]:
    """Return the non-numeric content of the checkpoint after each segment, and its position in the data.

    None of this content may depend on a device, a back-end or a layout.
    """
    held = []
    checkpoints = run_dir / "checkpoints"
    for step in (step for step in named_steps(checkpoints) if step % steps == 0):
        manifest, _ = read_manifest(path := checkpoints / step_name(step))
        types = set[str]()
        for shard in manifest.shards:
            with safe_open(path / shard.file, "numpy") as file:
                types |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 no mapping
        tensors = sorted((tensor.name, tensor.shape, manifest.kinds_of(tensor)) for tensor in manifest.tensors)
        place = (step, manifest.progress.consumed_samples, manifest.progress.tokens)
        held.append(
            {
                "types": sorted(types),
                "tensors": tensors,
                "optimizer": manifest.optimizer,
                "data": manifest.data,
                "place": place,
            }
        )
    return held


def rehearse(dtype: str, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the effects of the switches, and curves by name: one for each vendor, and one that switches."""
    sides = vendors(args.devices.split(","))
    steps = args.steps
    total = args.steps * len(args.layouts)
    folders = {
        name: (args.directory / dtype / name.replace(": ", "_").replace(", ", "_").replace(" ", "_")).resolve()
        for name in (*sides, "switching")
    }
    for run_dir in folders.values():
        run_dir.mkdir(parents=True, exist_ok=True)
        settings = {
            "sequences": SEQUENCES,
            "total": total,
            "dtype": dtype,
            "data": args.data.resolve(),
            "run_dir": run_dir,
            "steps": steps,
        }
        (run_dir / "run.yaml").write_text(RUN.format(**settings))
    for name, words in sides.items():
        train(folders[name], total, words)
    switching = folders["switching"]
    segments = list[dict[str, Any]]()
    for number, asked in enumerate(args.layouts):
        vendor = list(sides)[number % len(sides)]
        layout, words = layout_on(vendor, asked)
        said = train(switching, (number + 1) * steps, [*words, *sides[vendor]])
        changes = [
            line.partition("differs from the checkpoint: ")[2]
            for line in said.splitlines()
            if "differs from the checkpoint: " in line
        ]
        segments.append(
            {
                "vendor": vendor,
                "layout": layout,
                "said on resuming": changes,
            }
        )
    curves = {name: losses(run_dir, total) for name, run_dir in folders.items()}
    first, *others = (curves[name] for name in sides)
    for number, segment in enumerate(segments):
        part = slice(number * steps, (number + 1) * steps)
        segment["from steady"] = float(np.abs(curves["switching"] - first)[part].max())
        segment["of vendors"] = float(max(np.abs(other - first)[part].max() for other in others))
    steady = contents(folders[next(iter(sides))], steps)
    held = contents(switching, steps)
    if steady != held:
        sys.exit(f"checkpoints of {switching} hold something else than those of a steady run:\n{held}\n{steady}")
    result = {
        "steps": total,
        "segments": segments,
        "checkpoints": {
            "alike": len(held),
            "types": held[-1]["types"],
            "tensors": len(held[-1]["tensors"]),
            "samples": max(one["place"][1] for one in held),
        },
        "between two steps, median": float(np.median(np.abs(np.diff(first)))),
        "mean of the last segment": {name: float(curve[-steps:].mean()) for name, curve in curves.items()},
    }
    return result, curves


def plot(curves: dict[str, dict[str, np.ndarray]], steps: int, names: list[str], path: Path) -> None:
    """Plot a column for each type: curves above, and their differences below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(curves), figsize=(7 * len(curves), 6), sharex=True, squeeze=False, layout="constrained"
    )
    for (top, bottom), (dtype, by_name) in zip(axes.T, curves.items(), strict=True):
        (steady, first), *others = by_name.items()
        top.plot(first, label=steady, linewidth=3, alpha=0.4)
        for color, (name, curve) in enumerate(others, 1):
            top.plot(curve, label=name, linewidth=0.7, color=f"C{color}")
            bottom.semilogy(
                np.maximum(np.abs(curve - first), 1e-9),
                label=f"{name}, minus {steady}",
                linewidth=0.7,
                color=f"C{color}",
            )
        for number, name in enumerate(names):
            top.axvline(number * steps, color="grey", linewidth=0.5)
            top.text(
                (number + 0.05) * steps,
                first.max(),
                name,
                rotation=90,
                verticalalignment="top",
                fontsize=7,
            )
        top.set(title=dtype, ylabel="loss, nats per byte")
        bottom.set(ylabel="difference", xlabel="step")
        top.legend(fontsize=7, loc="center right")
        bottom.legend(fontsize=7, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the experiment. Returns the written results by type, then by segment."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=200, help="steps of each segment")
    options.add_argument("--devices", default="cpu", help="devices, comma-separated, used one after another: cpu,cuda")
    options.add_argument(
        "--dtypes", default="fp32,bf16", help="working dtypes, comma-separated; each one is a separate run"
    )
    options.add_argument(
        "--layouts",
        nargs="+",
        default=list(LAYOUTS),
        metavar="LAYOUT",
        help="one after another",
    )
    options.add_argument("--directory", type=Path, default=Path("runs/switch_vendors"), help="folder of the runs")
    options.add_argument(
        "--data",
        type=Path,
        default=Path("data/stdlib-bytes"),
        help="prefix of the dataset; created if it does not exist",
    )
    options.add_argument(
        "--out",
        type=Path,
        default=Path("runs/switch_vendors"),
        help="folder in which results/ and figures/ are written",
    )
    folders = ["--directory", f"{FOLDER}/runs", "--data", f"{FOLDER}/data", "--out", f"{FOLDER}/out"]
    small = ["--steps", "2", "--dtypes", "fp32", "--layouts", "1 rank", "dp 2 x pp 2, zb-h1"]
    args = parse_arguments(options, [*small, *folders], argv)
    ensure_text(args.data, args.smoke)
    results = dict[str, Any]()
    curves = defaultdict[str, dict[str, np.ndarray]](dict)
    for dtype in args.dtypes.split(","):
        results[dtype], curves[dtype] = rehearse(dtype, args)
    target = args.out / "results" / "switch_vendors.json"
    write_json(target, results)
    plot(curves, args.steps, args.layouts, args.out / "figures" / "switch_vendors.png")
    print(json.dumps(results, indent=1))
    return results


if __name__ == "__main__":
    main()
