"""Muon against AdamW: the overhead of a step, predicted and measured, and the loss of small models, with seeds and a sweep of learning rates.

Resumable: a finished run is only read. Writes the measured part of docs/optimizers.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from frontier_llm.blueprint import block_parameters
from frontier_llm.blueprint.matrices import Part, is_matrix, matrices_of
from frontier_llm.blueprint.parameters import model_parameters
from frontier_llm.comm import single
from frontier_llm.config import load_model
from frontier_llm.costs.update import products, update_flops
from frontier_llm.optim.newton_schulz import MatrixStack, orthogonalize_

sys.path.insert(0, str(Path(__file__).resolve().parent))

from convergence import EVALUATED_SAMPLES, FINAL, MICRO_BATCH, WARMUP, Recipe, recipe
from measured_page import write_measured

PAGE = Path(__file__).resolve().parents[1] / "docs" / "optimizers.md"
OPTIMIZERS, FACTORS = ("adamw", "muon"), (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Trained:
    """One run: held-out loss in nats per byte, and seconds of its steps."""

    recipe: Recipe
    optimizer: str
    factor: float
    seed: int
    loss: float
    curve: tuple[float, ...]
    seconds: float


def train(chosen: Recipe, optimizer: str, factor: float, seed: int, options: argparse.Namespace) -> Trained | None:
    """Run `frontier-llm train` unless it has run; None when there is no time left for it."""
    folder = options.directory / f"{chosen.model}-{optimizer}-lr{factor:g}-seed{seed}"
    rows = read(folder)
    if final(rows, chosen) is None:
        if time.monotonic() > options.deadline_s:
            return None
        lr = chosen.lr * factor
        command = [
            sys.executable, "-m", "frontier_llm.cli.main", "train", "convergence", f"model={chosen.model}", f"train.run_dir={folder}",
            f"batch.global_batch={chosen.global_batch}", f"batch.micro_batch={MICRO_BATCH}", f"optimizer.name={optimizer}", f"optimizer.lr={lr:g}",
            f"optimizer.min_lr={FINAL * lr:g}", f"optimizer.warmup_steps={round(WARMUP * chosen.steps)}", f"train.steps={chosen.steps}",
            f"train.seed={seed}", f"data.seed={seed}", f"train.eval_samples={EVALUATED_SAMPLES}", f"data.train=[{{path: {options.data}/train}}]",
            f"data.validation=[{{path: {options.data}/validation}}]", "train.save_final=false",
        ]  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "output.txt").open("a") as output:
            done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=output, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}; see {folder}/output.txt")
        rows = read(folder)
    steps = {row["step"]: row for row in rows if row["kind"] == "step"}
    curve = tuple(steps[step]["loss"] for step in sorted(steps))
    return Trained(chosen, optimizer, factor, seed, final(rows, chosen) or 0.0, curve, sum(row["step_time_s"] for row in steps.values()))


def read(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def final(rows: list[dict], chosen: Recipe) -> float | None:
    losses = [row["loss"] for row in rows if row["kind"] == "evaluation" and row["step"] == chosen.steps]
    return losses[-1] if losses else None


def steps_to(curve: tuple[float, ...], loss: float) -> float:
    """Steps after which the mean of 20 training losses is below `loss` for the first time; inf if never."""
    means = np.convolve(curve, np.ones(20) / 20, mode="valid")
    below = np.flatnonzero(means < loss)
    return float(below[0] + 20) if len(below) else float("inf")


def convergence_lines(trained: list[Trained]) -> list[str]:
    """Best learning rate of each optimizer, loss by seed, and how soon Muon is where AdamW ends."""
    lines = [
        "| model | optimizer | learning rates tried, times the rule's: mean held-out loss | seeds at the best | mean ± s.d. | seconds per step |",
        "|---|---|---|--:|--:|--:|",
    ]
    for model in dict.fromkeys(one.recipe.model for one in trained):
        best: dict[str, list[Trained]] = {}
        for optimizer in OPTIMIZERS:
            runs = [one for one in trained if one.recipe.model == model and one.optimizer == optimizer]
            by_rate = {factor: [one for one in runs if one.factor == factor] for factor in sorted({one.factor for one in runs})}
            means = {factor: float(np.mean([one.loss for one in ones])) for factor, ones in by_rate.items()}
            if not means:
                continue
            chosen = by_rate[min(means, key=lambda factor: means[factor])]
            best[optimizer] = chosen
            losses = [one.loss for one in chosen]
            spread = f" ± {np.std(losses, ddof=1):.4f}" if len(losses) > 1 else ""
            tried = ", ".join(f"{factor:g}: {mean:.4f}" for factor, mean in means.items())
            per_step = np.median([one.seconds / len(one.curve) for one in chosen])
            lines.append(f"| {model} | {optimizer} | {tried} | {len(losses)} | {np.mean(losses):.4f}{spread} | {per_step:.3f} |")
        if len(best) == 2:
            reached = []
            for ours, theirs in zip(best["muon"], best["adamw"], strict=False):
                end = float(np.mean(theirs.curve[-20:]))
                reached.append(steps_to(ours.curve, end) / len(theirs.curve))
            slower = np.median([one.seconds for one in best["muon"]]) / np.median([one.seconds for one in best["adamw"]])
            share = float(np.mean(reached))
            lines.append(
                f"| {model} | | Muon is where AdamW's training loss ends after {100 * share:.0f} % of the tokens | | | x {slower:.2f} |"
            )
    return lines


def overhead_lines() -> list[str]:
    """Newton-Schulz on this processor: seconds predicted from its products' rate, and measured; and its share of a step's FLOPs."""
    lines = [
        "| model | matrices of a block | FLOPs of the update per block | share of a step's of 4,096 tokens per replica | predicted | measured |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name in ("ladder-840k", "bench-l8-h384"):
        model = load_model(name)
        block = [one for one in block_parameters(model, 0) if is_matrix(one)]
        flops = sum(update_flops(one, {}) for one in block)
        everything = [matrices for one in block for matrices in matrices_of(one)]
        training = 6.0 * 4096 * sum(one.numel for one in block)
        predicted = sum(
            5 * product_s(product.m, product.n, product.k) * product.batch for one in everything for product in products(one, 1)
        )
        stacks = [torch.randn(one.count, one.short, one.long, dtype=torch.bfloat16) for one in everything]

        def update(stacks: list[torch.Tensor] = stacks) -> None:
            for x in stacks:
                orthogonalize_([MatrixStack(x, Part.ALL)], single("tp"))

        shapes = ", ".join(f"{one.rows}x{one.columns}" for one in everything)
        lines.append(
            f"| {name} | {shapes} | {flops:.2e} | {flops / training:.1%} | {1e3 * predicted:.1f} ms | {1e3 * best_of(update):.1f} ms |"
        )
    return lines


def product_s(m: int, n: int, k: int) -> float:
    """Seconds of one bf16 product on this processor, measured."""
    a, b = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(k, n, dtype=torch.bfloat16)
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
    parser.add_argument("--minutes", type=float, default=1e9, help="no run is begun after that")
    parser.add_argument("--directory", type=Path, default=Path("runs/muon"))
    parser.add_argument("--data", type=Path, default=Path("data/stdlib-bytes"), help="made if it is not there")
    options = parser.parse_args()
    options.deadline_s = time.monotonic() + 60 * options.minutes
    torch.set_num_threads(1)
    if not (options.data / "validation.idx").exists():
        command = [sys.executable, "-m", "frontier_llm.cli.main", "data", "stdlib", str(options.data), "--tokenizer", "bytes"]
        subprocess.run(command, check=True)
    trained: list[Trained] = []
    # every learning rate with the first seed, then the other seeds
    for model, seed, factor, optimizer in product(options.ladder, range(1, options.seeds + 1), FACTORS, OPTIMIZERS):
        run = train(recipe(model, 20.0), optimizer, factor, seed, options)
        if run is not None:
            trained.append(run)
    sizes = {model: sum(one.numel for one in model_parameters(load_model(model)).values()) for model in options.ladder}
    lines = [
        "## Measured: loss", "",
        "`scripts/muon.py`: the ladder of [convergence](convergence.md) (20 bytes per parameter, the same data, batch and decay; "
        + ", ".join(f"{model} has {size:,} parameters" for model, size in sizes.items())
        + "), Muon for matrices, three learning rates, seeds for weights and sample order alike. Nats per byte.", "",
        *convergence_lines(trained), "",
        "## Measured: the update", "", f"One thread of a shared {os.uname().machine} processor, bf16:", "", *overhead_lines(), "",
    ]  # fmt: skip
    write_measured(PAGE, __file__, "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
