"""Compares Muon with AdamW: predicted and measured overhead of a step, and loss of small models, with seeds and a sweep
of learning rates.

Resumable: a finished run is only read. Writes the measured part of docs/benchmarks/optimizers.md, results/muon.json and
figures/muon.png beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.convergence.dense import FINAL, MICRO_BATCH, WARMUP, Recipe, evaluated_samples, recipe
from benchmarks.harness import (
    FOLDER,
    MEASURED,
    RESULTS,
    ensure_text,
    last_json,
    parse_arguments,
    write_json,
    write_measured,
)
from frontier_llm.blueprint.matrices import Part, is_matrix, matrices_of
from frontier_llm.blueprint.parameters import block_parameters, model_parameters
from frontier_llm.comm import single
from frontier_llm.config import load_model
from frontier_llm.optim.newton_schulz import MatrixStack, orthogonalize_
from frontier_llm.planner.costs.update import products, update_flops

PAGE = MEASURED / "optimizers.md"
FACTORS = {
    "adamw": (0.5, 1.0, 2.0),
    "muon": (0.5, 1.0, 2.0, 4.0),
}  # factors by which the learning rate of `recipe` is multiplied


@dataclass(frozen=True)
class Trained:
    """One run: held-out loss in nats per byte, and training loss by step."""

    recipe: Recipe
    optimizer: str
    factor: float
    seed: int
    loss: float
    curve: tuple[float, ...]


def train(chosen: Recipe, optimizer: str, factor: float, seed: int, options: argparse.Namespace) -> Trained | None:
    """Run `frontier-llm train` unless the run is finished. Returns None if no time is left for the run."""
    folder = options.directory / f"{chosen.model}-{optimizer}-lr{factor:g}-seed{seed}"
    rows = read(folder)
    if final(rows, chosen) is None:
        if time.monotonic() > options.deadline_s:
            return None
        lr = chosen.lr * factor
        command = [
            sys.executable,
            "-m",
            "frontier_llm.cli.main",
            "train",
            "convergence",
            f"model={chosen.model}",
            f"train.run_dir={folder}",
            f"batch.global_batch={chosen.global_batch}",
            f"batch.micro_batch={MICRO_BATCH}",
            f"optimizer.name={optimizer}",
            f"optimizer.lr={lr:g}",
            f"optimizer.min_lr={FINAL * lr:g}",
            f"optimizer.warmup_steps={round(WARMUP * chosen.steps)}",
            f"train.steps={chosen.steps}",
            f"train.seed={seed}",
            f"data.seed={seed}",
            f"train.eval_samples={evaluated_samples(chosen, options)}",
            f"data.train=[{{path: {options.data}/train}}]",
            f"data.validation=[{{path: {options.data}/validation}}]",
            "train.save_final=false",
        ]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "output.txt").open("a") as output:
            done = subprocess.run(
                command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=output, check=False
            )
        if done.returncode:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}; see {folder}/output.txt")
        rows = read(folder)
    steps = {row["step"]: row for row in rows if row["kind"] == "step"}
    curve = tuple(steps[step]["loss"] for step in sorted(steps))
    return Trained(
        chosen,
        optimizer,
        factor,
        seed,
        final(rows, chosen) or 0.0,
        curve,
    )


def read(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def final(rows: list[dict], chosen: Recipe) -> float | None:
    losses = [row["loss"] for row in rows if row["kind"] == "evaluation" and row["step"] == chosen.steps]
    return losses[-1] if losses else None


def steps_to(curve: tuple[float, ...], loss: float) -> float:
    """Return the first step at which the mean of 20 training losses is below `loss`. Returns inf if there is none."""
    means = np.convolve(curve, np.ones(20) / 20, mode="valid")
    below = np.flatnonzero(means < loss)
    return float(below[0] + 20) if len(below) else float("inf")


def step_costs(chosen: Recipe, data: Path, rounds: int = 3) -> dict[str, float]:
    """Return the CPU seconds of a step under each optimizer: the best of `rounds` medians.

    The optimizers alternate, and CPU time is comparable on a shared machine.
    """
    best = dict.fromkeys(FACTORS, float("inf"))
    for _, optimizer in product(range(rounds), FACTORS):
        command = [
            sys.executable,
            "-m",
            "frontier_llm.cli.main",
            "bench",
            "step",
            "convergence",
            f"model={chosen.model}",
            f"batch.global_batch={chosen.global_batch}",
            f"batch.micro_batch={MICRO_BATCH}",
            f"optimizer.name={optimizer}",
            f"data.train=[{{path: {data}/train}}]",
            f"data.validation=[{{path: {data}/validation}}]",
            "--steps",
            "8",
            "--json",
        ]
        with tempfile.TemporaryDirectory() as folder:
            ended = subprocess.run(
                [*command, f"train.run_dir={folder}"],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                check=True,
            )
        output = ended.stdout.decode()
        result = last_json(output)
        best[optimizer] = min(best[optimizer], median(result["cpu_times_s"]))
    return best


def at_best_rate(
    trained: Sequence[Trained], model: str, optimizer: str
) -> tuple[dict[float, list[float]], list[Trained]]:
    """Return the held-out losses by learning rate, and the runs at the best rate.

    Only rates with the largest number of seeds are candidates for the best rate.
    """
    runs = [one for one in trained if one.recipe.model == model and one.optimizer == optimizer]
    by_rate = {factor: [one for one in runs if one.factor == factor] for factor in sorted({one.factor for one in runs})}
    losses = {factor: [one.loss for one in ones] for factor, ones in by_rate.items()}
    return losses, by_rate[min(losses, key=lambda factor: (-len(losses[factor]), np.mean(losses[factor])))]


def study(trained: Sequence[Trained], data: Path) -> dict[str, Any]:
    """Return the results by model and optimizer: losses by learning rate, losses by seed and mean curve at the best
    rate, and step cost.

    Also contains the steps after which Muon reaches AdamW's final loss.
    """
    result: dict[str, Any] = {}
    for model in dict.fromkeys(one.recipe.model for one in trained):
        best = {optimizer: at_best_rate(trained, model, optimizer) for optimizer in FACTORS}
        costs = step_costs(best["adamw"][1][0].recipe, data)
        rows = {
            optimizer: {
                "losses_by_rate": by_rate,
                "losses": [one.loss for one in ones],
                "curve": np.mean([one.curve for one in ones], axis=0).round(4).tolist(),
                "step_cpu_s": costs[optimizer],
            }
            for optimizer, (by_rate, ones) in best.items()
        }
        ends = (float(np.mean(one.curve[-20:])) for one in best["adamw"][1])
        reached = [
            steps_to(ours.curve, end) / len(ours.curve) for ours, end in zip(best["muon"][1], ends, strict=False)
        ]
        result[model] = {
            **rows,
            "share_of_tokens": float(np.mean(reached)),
            "cost": costs["muon"] / costs["adamw"],
        }
    return result


def convergence_lines(result: dict[str, Any]) -> list[str]:
    """Return a table with the best learning rate of each optimizer and the loss by seed.

    The table also has the number of steps after which Muon reaches AdamW's final loss.
    """
    lines = [
        "| model | optimizer | learning rates tried, times the rule's: mean held-out loss | seeds at the best | mean "
        "± s.d. |",
        "|---|---|---|--:|--:|",
    ]
    for model, row in result.items():
        for optimizer in FACTORS:
            losses = row[optimizer]["losses"]
            spread = f" ± {np.std(losses, ddof=1):.4f}" if len(losses) > 1 else ""
            tried = ", ".join(
                f"{factor:g}: {np.mean(each):.4f}"
                + (f" ({len(each)} of {len(losses)} seeds)" if len(each) < len(losses) else "")
                for factor, each in row[optimizer]["losses_by_rate"].items()
            )
            lines.append(f"| {model} | {optimizer} | {tried} | {len(losses)} | {np.mean(losses):.4f}{spread} |")
    lines += [
        "",
        "| model | tokens after which Muon's training loss is where AdamW's ends | a step's processor seconds over "
        "AdamW's | seconds |",
        "|---|--:|--:|--:|",
    ]
    lines += [
        f"| {model} | {row['share_of_tokens']:.0%} | {row['cost']:.2f} | {row['share_of_tokens'] * row['cost']:.0%} |"
        for model, row in result.items()
    ]
    return lines


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot training loss against the share of tokens, and against CPU seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, len(result), figsize=(4 * len(result), 6), squeeze=False)
    for (model, row), (by_tokens, by_seconds) in zip(result.items(), panels.T, strict=True):
        for optimizer in FACTORS:
            smooth = np.convolve(row[optimizer]["curve"], np.ones(20) / 20, mode="valid")
            steps = np.arange(20, 20 + len(smooth))
            by_tokens.plot(
                steps / steps[-1], smooth, label=f"{optimizer}: {np.mean(row[optimizer]['losses']):.3f} held out"
            )
            by_seconds.plot(steps * row[optimizer]["step_cpu_s"], smooth)
        by_tokens.set(title=model, xlabel="share of the tokens", yscale="log")
        by_seconds.set(xlabel="processor seconds", yscale="log")
        by_tokens.legend(fontsize=8)
    for panel in panels[:, 0]:
        panel.set_ylabel("training loss, nats per byte")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def overhead_lines() -> list[str]:
    """Return a table of Newton-Schulz on this processor: seconds predicted from the rate of its products, seconds
    measured, and share of a step's FLOPs.
    """
    lines = [
        "| model | matrices of a block | FLOPs of the update per block | share of a step's of 4,096 tokens per "
        "replica | predicted | measured |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name in ("ladder-840k", "bench-l8-h384"):
        model = load_model(name)
        block = [one for one in block_parameters(model, 0) if is_matrix(one)]
        flops = sum(update_flops(one, {}) for one in block)
        everything = [matrices for one in block for matrices in matrices_of(one)]
        training = 6.0 * 4096 * sum(one.numel for one in block)
        predicted = sum(
            5 * product_s(product.m, product.n, product.k) * product.batch
            for one in everything
            for product in products(one, 1)
        )
        stacks = [torch.randn(one.count, one.short, one.long, dtype=torch.bfloat16) for one in everything]

        def update(stacks: list[torch.Tensor] = stacks) -> None:
            for x in stacks:
                orthogonalize_([MatrixStack(x, Part.ALL)], single("tp"))

        shapes = ", ".join(f"{one.rows}x{one.columns}" for one in everything)
        lines.append(
            f"| {name} | {shapes} | {flops:.2e} | {flops / training:.1%} | {1e3 * predicted:.1f} ms | "
            f"{1e3 * best_of(update):.1f} ms |"
        )
    return lines


def product_s(m: int, n: int, k: int) -> float:
    """Measure the seconds of one bf16 product on this processor."""
    a = torch.randn(m, k, dtype=torch.bfloat16)
    b = torch.randn(k, n, dtype=torch.bfloat16)
    return best_of(lambda: a @ b)


def best_of(work, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        begin_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin_s)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladder", nargs="+", default=("ladder-30k", "ladder-70k", "ladder-170k"), metavar="MODEL")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens-per-parameter", type=float, default=20.0)
    parser.add_argument("--factors", type=float, nargs="+", help="factors of the rule's learning rate to try")
    parser.add_argument("--figure", type=Path, default=MEASURED / "figures" / "muon.png")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this time")
    parser.add_argument("--directory", type=Path, default=Path("runs/muon"))
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("data/stdlib-bytes"),
        help="prefix of the dataset; created if it does not exist",
    )
    folders = ["--directory", f"{FOLDER}/runs", "--data", f"{FOLDER}/data", "--figure", f"{FOLDER}/muon.png"]
    small = ["--ladder", "ladder-30k", "--seeds", "1", "--tokens-per-parameter", "0.1", "--factors", "1"]
    options = parse_arguments(parser, smoke=[*small, *folders])
    options.deadline_s = time.monotonic() + 60 * options.minutes
    torch.set_num_threads(1)
    ensure_text(options.data, options.smoke)
    trained: list[Trained] = []
    # Every learning rate with the first seed comes first, then the other seeds.
    rates = [(name, factor) for name, factors in FACTORS.items() for factor in options.factors or factors]
    for model, seed, (optimizer, factor) in product(options.ladder, range(1, options.seeds + 1), rates):
        run = train(
            recipe(model, options.tokens_per_parameter),
            optimizer,
            factor,
            seed,
            options,
        )
        if run is not None:
            trained.append(run)
    result = study(trained, options.data)
    write_json(RESULTS / "muon.json", result, options.smoke)
    plot(result, options.figure)
    sizes = {model: sum(one.numel for one in model_parameters(load_model(model)).values()) for model in options.ladder}
    lines = [
        "## Measured: loss",
        "",
        "`benchmarks/convergence/muon.py`: the ladder of [convergence](convergence.md), with 20 bytes per parameter "
        "and the same data, batch and decay. "
        + ", ".join(f"{model} has {size:,} parameters" for model, size in sizes.items())
        + ". Muon updates the matrices. A seed sets weights and sample order. Losses are in nats per byte. Steps were "
        "interleaved and timed in CPU seconds, with one thread.",
        "",
        *convergence_lines(result),
        "",
        "![Muon against AdamW](figures/muon.png)",
        "",
        "## Measured: the update",
        "",
        f"One thread of a shared {os.uname().machine} processor, bf16:",
        "",
        *overhead_lines(),
        "",
    ]
    write_measured(PAGE, __file__, "\n".join(lines), options.smoke)


if __name__ == "__main__":
    main()
