"""Trains a ladder of small models, each to its Chinchilla budget, and fits held-out loss against compute.

A rung is one model of the ladder. One rung is also trained in fp32 and bf16, in three layouts, with another seed and
with other learning rates.
Every run of `frontier-llm train` is resumable. If the script is killed and started again, it continues from the runs'
own checkpoints. A finished run is only read.

Writes docs/benchmarks/results/convergence.json, docs/benchmarks/figures/convergence_*.png and the measured part of
docs/benchmarks/convergence.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.convergence.power_law import find_irreducible, fit_power_law
from benchmarks.harness import FOLDER, MEASURED, ensure_text, parse_arguments, write_json, write_measured
from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.blueprint.work import model_flops_per_token
from frontier_llm.config import load_model

LADDER = ("ladder-30k", "ladder-70k", "ladder-170k", "ladder-360k", "ladder-840k")
COMPARED = "ladder-170k"  # model that is also trained with other precisions, layouts, seeds and learning rates
TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022 (arXiv:2203.15556), table 3
# Warm-up as a share of the steps, and the final learning rate as a share of the highest.
WARMUP = 0.05
FINAL = 0.1
MICRO_BATCH = 8
EVALUATED_SAMPLES = 2016  # a multiple of every rung's batch, so that all rungs are evaluated on the same text
LAYOUTS = {
    "one rank": [],
    "TP2 with sequence parallelism": ["parallel.tensor=2", "parallel.sequence_parallel=true"],
    "PP2 x DP2": ["parallel.pipeline=2", "parallel.data=2"],
}


@dataclass(frozen=True)
class Recipe:
    """Training settings of a model that follow from the scaling rules."""

    model: str
    parameters: int  # all parameters, embedding included
    non_embedding: int
    compute_flops: float  # FLOPs of the complete run
    tokens: int
    global_batch: int
    steps: int
    lr: float


@dataclass
class Run:
    """One training run and its measurements."""

    name: str
    recipe: Recipe
    overrides: list[str] = field(default_factory=list)
    loss: float = 0.0  # held out, nats per byte
    curve: list[float] = field(default_factory=list)  # training loss by step


def recipe(name: str, tokens_per_parameter: float) -> Recipe:
    """Return the settings of a model: tokens by Hoffmann et al., batch and learning rate by DeepSeek LLM.

    With compute C, the batch has 0.292 C^0.3271 tokens and the learning rate is 0.3118 C^-0.125 (arXiv:2401.02954, eq.
    1).
    """
    model = load_model(name)
    parameters = total_parameters(model)
    S = model.sequence_length
    compute = tokens_per_parameter * parameters * model_flops_per_token(model)
    batch = max(MICRO_BATCH, MICRO_BATCH * round(0.2920 * compute**0.3271 / S / MICRO_BATCH))
    steps = max(1, round(tokens_per_parameter * parameters / (batch * S)))
    tokens = steps * batch * S
    lr = float(f"{0.3118 * compute**-0.125:.3g}")
    embedding = model.padded_vocab_size * model.hidden
    return Recipe(
        name, parameters, parameters - embedding, tokens * model_flops_per_token(model), tokens, batch, steps, lr
    )


def runs(options: argparse.Namespace) -> dict[str, Run]:
    """Return every run of the study, the ladder's runs first."""
    recipes = {name: recipe(name, options.tokens_per_parameter) for name in {*options.ladder, options.compared}}
    result = {name: Run(name, recipes[name]) for name in options.ladder}
    chosen = recipes[options.compared]
    for number, layout in enumerate(LAYOUTS):
        overrides = ["precision.dtype=fp32", "batch.micro_batch=4", *LAYOUTS[layout]]
        result[layout] = Run(f"{options.compared}-fp32-{number}", chosen, overrides)
    result["bf16"] = Run(options.compared, chosen)
    result["another seed"] = Run(f"{options.compared}-seed", chosen, ["train.seed=2", "data.seed=2"])
    for factor in (0.5, 2.0):
        lr = chosen.lr * factor
        result[f"lr x {factor:g}"] = Run(
            f"{options.compared}-lr{factor:g}", chosen, [f"optimizer.lr={lr:g}", f"optimizer.min_lr={FINAL * lr:g}"]
        )
    return result


def evaluated_samples(chosen: Recipe, options: argparse.Namespace) -> int:
    """Return the number of held-out samples after the last step. A short run evaluates one batch."""
    return chosen.global_batch if options.smoke else EVALUATED_SAMPLES


def train(run: Run, options: argparse.Namespace) -> None:
    """Run `frontier-llm train` unless its last evaluation exists, then read the run directory."""
    folder = options.directory / run.name
    recipe = run.recipe
    samples = evaluated_samples(recipe, options)
    if samples % recipe.global_batch:
        sys.exit(f"{recipe.model}: {samples} held-out samples are no multiple of its batch {recipe.global_batch}")
    metrics = folder / "metrics.jsonl"
    if _final(metrics, recipe.steps) is None:
        command = [
            sys.executable,
            "-m",
            "frontier_llm.cli.main",
            "train",
            "convergence",
            f"model={recipe.model}",
            f"train.run_dir={folder}",
            f"batch.global_batch={recipe.global_batch}",
            f"batch.micro_batch={MICRO_BATCH}",
            f"optimizer.lr={recipe.lr:g}",
            f"optimizer.min_lr={FINAL * recipe.lr:g}",
            f"optimizer.warmup_steps={round(WARMUP * recipe.steps)}",
            f"train.steps={recipe.steps}",
            f"train.eval_samples={samples}",
            f"data.train=[{{path: {options.data}/train}}]",
            f"data.validation=[{{path: {options.data}/validation}}]",
            *run.overrides,
        ]
        print(f"{run.name}: {recipe.steps} steps of {recipe.global_batch} x 256 bytes", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "output.txt").open("a") as output:
            done = subprocess.run(
                command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=output, check=False
            )
        if done.returncode:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}; see {folder}/output.txt")
    run.loss = _final(metrics, recipe.steps) or 0.0
    # If a step was done twice, the later record counts.
    by_step = {row["step"]: row["loss"] for row in _rows(metrics) if row["kind"] == "step"}
    run.curve = [by_step[step] for step in range(1, recipe.steps + 1)]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _final(path: Path, steps: int) -> float | None:
    losses = [row["loss"] for row in _rows(path) if row["kind"] == "evaluation" and row["step"] == steps]
    return losses[-1] if losses else None


def study(done: dict[str, Run], options: argparse.Namespace) -> dict[str, Any]:
    """Return all numbers of docs/benchmarks/convergence.md as one JSON document."""
    ladder = [done[name] for name in options.ladder]
    compute = [run.recipe.compute_flops for run in ladder]
    losses = [run.loss for run in ladder]
    law = fit_power_law(compute, losses)
    unseen = fit_power_law(compute[:-1], losses[:-1])
    irreducible = find_irreducible(compute, losses)
    reference = done["one rank"]
    bf16 = done["bf16"]
    return {
        "rules": {
            "tokens_per_parameter": options.tokens_per_parameter,
            "warmup": WARMUP,
            "final_lr": FINAL,
            "evaluated_samples": EVALUATED_SAMPLES,
        },
        "compared": asdict(reference.recipe),
        "ladder": [
            {
                **asdict(run.recipe),
                "loss": run.loss,
                "bits_per_byte": run.loss / np.log(2),
                "train_loss": thin(run.curve),
            }
            for run in ladder
        ],
        "power_law": asdict(law),
        "irreducible": {
            **asdict(irreducible),
            "identified": irreducible.identified,
            "law": asdict(fit_power_law(compute, losses, irreducible.best)),
        },
        "largest_from_the_others": {
            "predicted": unseen.predict(compute[-1]),
            "measured": losses[-1],
            "error": losses[-1] / unseen.predict(compute[-1]) - 1,
        },
        "precision": {"loss": bf16.loss, **apart(bf16.curve, reference.curve)},
        "layouts": {name: {"loss": done[name].loss, **apart(done[name].curve, reference.curve)} for name in LAYOUTS},
        "seed": {"loss": done["another seed"].loss},
        "learning_rate": {name: done[name].loss for name in ("lr x 0.5", "bf16", "lr x 2")},
    }


def page(result: dict[str, Any]) -> str:
    """Return the measured part of docs/benchmarks/convergence.md."""
    law = result["power_law"]
    free = result["irreducible"]
    last = result["largest_from_the_others"]
    rows = [
        f"| {rung['parameters']:,} | {rung['tokens'] / 1e6:.2f} M | {rung['compute_flops']:.2e} | {rung['steps']} x "
        f"{rung['global_batch']} | {rung['lr']:g} "
        f"| {rung['loss']:.4f} | {rung['bits_per_byte']:.4f} | {residual:+.2%} |"
        for rung, residual in zip(result["ladder"], law["residuals"], strict=True)
    ]
    low, high = law["exponent_interval"]
    says = "It excludes 0" if free["identified"] else "It contains 0, so these sizes do not determine E"
    compared = {f"{name}, fp32": run for name, run in result["layouts"].items()} | {
        "one rank, bf16": result["precision"]
    }
    rows_compared = [
        f"| {name} | {run['loss']:.4f} | {run['first_50']:.1e} | {run['largest']:.1e} | "
        f"{run['mean_of_last_tenth']:.1e} |"
        for name, run in compared.items()
    ]
    rates = result["learning_rate"]
    lines = [
        "## Measured: loss against compute",
        "",
        f"`python -m benchmarks.convergence.dense --ladder {' '.join(rung['model'] for rung in result['ladder'])}`",
        "",
        "| parameters | bytes | FLOPs | steps x batch | learning rate | held-out, nats | bits per byte | off the fit |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
        *rows,
        "",
        f"L(C) = {law['coefficient']:.3f} · C^-{law['exponent']:.4f} nats per byte, R² {law['r_squared']:.4f}. The "
        f"95 % interval of the exponent is {low:.4f} to "
        f"{high:.4f} (Student's t, {len(rows) - 2} degrees of freedom). With an irreducible term, E + A · C^-b, "
        f"the best E is {free['best']:.3f}, with a 95 % interval of "
        f"{free['interval'][0]:.3f} to {free['interval'][1]:.3f} (F test). {says}.",
        "",
        f"A fit without the largest model predicts its loss as {last['predicted']:.4f}; measured "
        f"{last['measured']:.4f}, {last['error']:+.2%}.",
        "",
        "![Loss against compute, with the fitted power law](figures/convergence_ladder.png)",
        "",
        "## Measured: precision, layout, seed, learning rate",
        "",
        f"All runs train the {result['compared']['parameters']:,}-parameter model for {result['compared']['steps']} "
        f"steps. The distance of a training curve from one rank in fp32 is in nats. The columns are the maximum of the "
        f"first 50 steps, the maximum of all steps, and the mean of the last tenth.",
        "",
        "| run | held-out, nats | first 50 steps | at most | last tenth |",
        "|---|--:|--:|--:|--:|",
        *rows_compared,
        f"| one rank, bf16, another seed for weights and sample order | {result['seed']['loss']:.4f} | | | |",
        "",
        "![bf16 against fp32](figures/convergence_bf16.png)",
        "",
        "![Three layouts](figures/convergence_layouts.png)",
        "",
        "| learning rate | half the rule's | the rule's | twice the rule's |",
        "|---|--:|--:|--:|",
        f"| held-out, nats | {rates['lr x 0.5']:.4f} | {rates['bf16']:.4f} | {rates['lr x 2']:.4f} |",
        "",
    ]
    return "\n".join(lines)


def apart(curve: list[float], reference: list[float]) -> dict[str, float]:
    """Return the difference between two training curves in nats.

    `first_50` is the maximum over the first 50 steps, `largest` the maximum over all, and `mean_of_last_tenth` the mean
    over the last tenth.
    """
    difference = np.abs(np.subtract(curve, reference))
    return {
        "first_50": float(difference[:50].max()),
        "largest": float(difference.max()),
        "mean_of_last_tenth": float(difference[-max(1, len(difference) // 10) :].mean()),
    }


def thin(curve: list[float], points: int = 60) -> list[list[float]]:
    """Reduce a curve for a plot: return [step, mean loss since the previous point] at about equal distances in
    log(step).
    """
    edges = np.unique(np.geomspace(1, len(curve), points).astype(int))
    return [
        [int(edge), round(float(np.mean(curve[start:edge])), 5)]
        for start, edge in zip([0, *edges[:-1]], edges, strict=True)
    ]


def plot_ladder(result: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2,
        1,
        figsize=(8, 6.5),
        sharex=True,
        height_ratios=[4, 1],
    )
    law = result["power_law"]
    ladder = result["ladder"]
    compute = np.array([rung["compute_flops"] for rung in ladder])
    for rung in ladder:
        points = np.array(rung["train_loss"])
        line = top.plot(points[:, 0] / rung["steps"] * rung["compute_flops"], points[:, 1], linewidth=1, alpha=0.6)
        label = (
            f"{rung['model'].removeprefix('ladder-')}: {rung['parameters']:,} parameters, {rung['tokens'] / 1e6:.1f} MB"
        )
        top.plot(
            rung["compute_flops"],
            rung["loss"],
            "o",
            color=line[0].get_color(),
            label=label,
        )
    span = np.geomspace(compute.min() / 2, compute.max() * 2, 50)
    fit = f"{law['coefficient']:.2f} C^-{law['exponent']:.4f}, R² {law['r_squared']:.4f}"
    top.plot(
        span,
        law["coefficient"] * span ** -law["exponent"],
        "k--",
        linewidth=1,
        label=fit,
    )
    top.set(xscale="log", yscale="log", ylabel="nats per byte: curves training, dots held out", ylim=(0.8, 6))
    top.set_yticks([1, 1.5, 2, 3, 4, 6], labels=["1", "1.5", "2", "3", "4", "6"])
    top.minorticks_off()
    top.legend(fontsize=8)
    bottom.axhline(0, color="black", linewidth=0.8)
    bottom.plot(compute, 100 * np.array(law["residuals"]), "o-", linewidth=0.7)
    bottom.set(ylabel="residual, %", xlabel="training compute, FLOP")
    _write(figure, path)


def plot_curves(curves: dict[str, list[float]], path: Path) -> None:
    """Plot the curves, and below them their distance from the first curve."""
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2,
        1,
        figsize=(8, 5),
        sharex=True,
        height_ratios=[2.5, 1],
    )
    names = list(curves)
    for number, name in enumerate(names):
        top.plot(curves[name], linewidth=3 if number == 0 else 1, alpha=0.4 if number == 0 else 1, label=name)
        if number:
            bottom.plot(np.subtract(curves[name], curves[names[0]]), linewidth=0.7, color=f"C{number}")
    top.set(ylabel="training loss, nats per byte")
    top.legend()
    bottom.set(ylabel=f"minus {names[0]}", xlabel="step")
    _write(figure, path)


def _write(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ladder",
        nargs="+",
        default=LADDER,
        metavar="MODEL",
        help="at least 4 models, smallest first",
    )
    parser.add_argument(
        "--compared",
        default=COMPARED,
        metavar="MODEL",
        help="model that is also trained with other precisions, layouts, seeds and learning rates",
    )
    parser.add_argument("--tokens-per-parameter", type=float, default=TOKENS_PER_PARAMETER)
    parser.add_argument("--directory", type=Path, default=Path("runs/convergence"), help="folder of the runs")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("data/stdlib-bytes"),
        help="prefix of the dataset; created if it does not exist",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="RUN", help="train only these runs, e.g. to divide the runs between two shells"
    )
    parser.add_argument(
        "--out", type=Path, default=MEASURED, help="folder in which results/, figures/ and convergence.md are written"
    )
    folders = ["--directory", f"{FOLDER}/runs", "--data", f"{FOLDER}/data", "--out", FOLDER]
    small = ["--tokens-per-parameter", "0.1", "--compared", "ladder-30k", "--only", "bf16"]
    options = parse_arguments(parser, smoke=[*small, *folders])
    ensure_text(options.data, options.smoke)
    planned = runs(options)
    for name, run in planned.items():
        if not options.only or name in options.only:
            train(run, options)
    if options.only:
        return
    import matplotlib

    matplotlib.use("Agg")
    result = study(planned, options)
    target = options.out / "results" / "convergence.json"
    write_json(target, result)
    figures = options.out / "figures"
    plot_ladder(result, figures / "convergence_ladder.png")
    plot_curves({"fp32": planned["one rank"].curve, "bf16": planned["bf16"].curve}, figures / "convergence_bf16.png")
    plot_curves({name: planned[name].curve for name in LAYOUTS}, figures / "convergence_layouts.png")
    if (options.out / "convergence.md").exists():
        write_measured(options.out / "convergence.md", __file__, page(result))
    else:
        print(page(result))


if __name__ == "__main__":
    main()
