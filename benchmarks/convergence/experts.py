"""Compares mixtures of experts with dense models of benchmarks/convergence/dense.py, with several seeds and two
optimizers.

Active FLOPs per token, tokens, batch and learning rate are equal. The mixture has 8 experts, 2 of which process each
token. The experts have the greatest width at which a token, its router included, needs no more FLOPs than in the dense
model. The outputs of the two experts are summed, not averaged (`scale: 2`). With weights that sum to 1, the mixture
starts with half the output and learns at half the rate. After 100 steps its loss was then 0.35 nats above the dense
model's.

Resumable like benchmarks/convergence/dense.py, with the same rules, data and runs. Writes
docs/benchmarks/results/convergence_moe.json, docs/benchmarks/figures/convergence_moe.png and its measured part of
docs/benchmarks/moe.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.convergence.dense import TOKENS_PER_PARAMETER, Run, recipe, thin, train
from benchmarks.harness import FOLDER, MEASURED, ensure_text, parse_arguments, write_json, write_measured
from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.blueprint.work import model_flops_per_token
from frontier_llm.config import ModelConfig, load_model

EXPERTS = 8
TOP_K = 2
KINDS = ("dense", "experts")
# Factors of the ladder's learning rate at which the dense 170k model ends with the lowest loss
# (docs/benchmarks/optimizers.md).
RATES = {"adamw": 1.0, "muon": 2.0}


@dataclass
class Rung:
    """A dense model, the mixture with equal FLOPs, and their runs by seed under one optimizer."""

    optimizer: str
    dense: ModelConfig
    mixture: ModelConfig
    runs: dict[str, list[Run]]


def mixture_of(dense: ModelConfig) -> ModelConfig:
    """Return the model with experts of the greatest width at which a token needs no more FLOPs."""
    allowed = model_flops_per_token(dense)
    for width in range(dense.ffn_hidden // TOP_K, 0, -1):
        moe = {
            "experts": EXPERTS,
            "top_k": TOP_K,
            "expert_hidden": width,
            "scale": float(TOP_K),
        }
        model = ModelConfig.model_validate({**dense.model_dump(exclude_unset=True), "moe": moe})
        if model_flops_per_token(model) <= allowed:
            return model
    raise ValueError(f"{dense.name}: its router alone is dearer than its MLP")


def rung(name: str, optimizer: str, options: argparse.Namespace) -> Rung:
    chosen = recipe(name, options.tokens_per_parameter)
    dense = load_model(name)
    chosen = replace(chosen, lr=RATES[optimizer] * chosen.lr)
    mixture = mixture_of(dense)
    assert mixture.moe is not None
    keys = mixture.moe.model_dump(exclude_unset=True)
    # One large microbatch gives experts more rows at once. Gradients do not depend on the size of microbatches.
    overrides = {"dense": [], "experts": [f"model.moe={json.dumps(keys)}", f"batch.micro_batch={chosen.global_batch}"]}
    runs = {
        kind: [
            Run(
                f"{name}-{kind}-{optimizer}-seed{seed}",
                chosen,
                [f"train.seed={seed}", f"data.seed={seed}", f"optimizer.name={optimizer}", *overrides[kind]],
            )
            for seed in range(1, options.seeds + 1)
        ]
        for kind in KINDS
    }
    return Rung(optimizer, dense, mixture, runs)


def busiest_of_mean(run: Run, directory: Path) -> float:
    """Return the rows of the busiest expert divided by the mean over experts. The value is from the worst layer,
    averaged over the last tenth of the steps.
    """
    rows = [json.loads(line) for line in (directory / run.name / "metrics.jsonl").read_text().splitlines()]
    worst = {row["step"]: max(row["routing"]["largest_over_mean"]) for row in rows if row["kind"] == "step"}
    last = sorted(worst)[-max(1, len(worst) // 10) :]
    return float(np.mean([worst[step] for step in last]))


def study(rungs: list[Rung], options: argparse.Namespace) -> dict[str, Any]:
    """Return all numbers of the page as one JSON document."""
    return {
        "tokens_per_parameter_of_the_dense": options.tokens_per_parameter,
        "rungs": [
            {
                "model": one.dense.name,
                "optimizer": one.optimizer,
                "experts": one.mixture.moe and one.mixture.moe.model_dump(exclude_unset=True),
                "tokens": one.runs["dense"][0].recipe.tokens,
                "steps": one.runs["dense"][0].recipe.steps,
                "parameters": {"dense": total_parameters(one.dense), "experts": total_parameters(one.mixture)},
                "flops_per_token": {
                    "dense": model_flops_per_token(one.dense),
                    "experts": model_flops_per_token(one.mixture),
                },
                "held_out": {kind: [run.loss for run in one.runs[kind]] for kind in KINDS},
                "busiest_expert_over_mean": [busiest_of_mean(run, options.directory) for run in one.runs["experts"]],
                "train_loss": {
                    kind: thin(list(np.mean([run.curve for run in one.runs[kind]], axis=0))) for kind in KINDS
                },
            }
            for one in rungs
        ],
    }


def page(result: dict[str, Any]) -> str:
    """Return the measured part of docs/benchmarks/moe.md."""
    rows = []
    for rung in result["rungs"]:
        difference = np.subtract(rung["held_out"]["experts"], rung["held_out"]["dense"])
        for kind in KINDS:
            losses = rung["held_out"][kind]
            cells = (
                f"{rung['parameters'][kind]:,} | {rung['flops_per_token'][kind] / 1e6:.3f} | "
                f"{', '.join(f'{loss:.4f}' for loss in losses)}"
            )
            spread = f" ± {difference.std(ddof=1):.4f}" if len(losses) > 1 else ", one seed"
            apart = "" if kind == "dense" else f"{difference.mean():+.4f}{spread}"
            shape = (
                ""
                if kind == "dense"
                else f", {EXPERTS} experts of {rung['experts']['expert_hidden']}, top {TOP_K}, scale {TOP_K}"
            )
            rows.append(f"| {rung['model']}{shape} | {rung['optimizer']} | {cells} | {np.mean(losses):.4f} | {apart} |")
    budgets = "; ".join(
        dict.fromkeys(
            f"{rung['model']} {rung['tokens'] / 1e6:.2f} M bytes in {rung['steps']} steps" for rung in result["rungs"]
        )
    )
    uneven = ", ".join(
        f"{np.mean(rung['busiest_expert_over_mean']):.2f} ({rung['model']}, {rung['optimizer']})"
        for rung in result["rungs"]
    )
    lines = [
        "### Measured: loss at equal active FLOPs",
        "",
        f"`python -m benchmarks.convergence.experts --tokens-per-parameter "
        f"{result['tokens_per_parameter_of_the_dense']:g}`: models of [the ladder](convergence.md) and the same "
        f"models with experts. The experts have the largest width with which a token needs no more FLOPs, router "
        f"included. Bytes, batch and schedule follow the ladder's rules for the dense model ({budgets}). The learning "
        f"rate is the rule's times "
        + " and ".join(f"{factor:g} for {name}" for name, factor in RATES.items())
        + ". Nothing was tuned for the experts. Held-out loss in nats per byte, by seed of weights and sample order; "
        "two cores.",
        "",
        "| model | optimizer | parameters | MFLOP per token | held out, by seed | mean | minus dense, by seed ± s.d. |",
        "|---|---|--:|--:|---|--:|--:|",
        *rows,
        "",
        f"Rows of the busiest expert of the worst layer, over the mean number of rows, in the last tenth of the "
        f"steps: {uneven}.",
        "",
        "![Loss against training FLOPs, dense and with experts](figures/convergence_moe.png)",
        "",
    ]
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(result["rungs"]), figsize=(4.5 * len(result["rungs"]), 4), squeeze=False)
    for axis, rung in zip(axes[0], result["rungs"], strict=True):
        for color, kind in zip(("C0", "C1"), KINDS, strict=True):
            flops = rung["flops_per_token"][kind] * rung["tokens"]
            points = np.array(rung["train_loss"][kind])
            axis.plot(
                points[:, 0] / rung["steps"] * flops,
                points[:, 1],
                color=color,
                linewidth=1,
                label=f"{kind}: training, mean of seeds",
            )
            losses = rung["held_out"][kind]
            axis.plot(
                [flops] * len(losses), losses, "o", color=color, markersize=4, label=f"{kind}: held out, each seed"
            )
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="training compute, FLOP",
            ylabel="nats per byte",
            title=f"{rung['model']}, {rung['optimizer']}",
        )
        axis.set_yticks([1.5, 2, 3, 4, 5], labels=["1.5", "2", "3", "4", "5"])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladder", nargs="+", default=("ladder-170k",), metavar="MODEL")
    parser.add_argument(
        "--tokens-per-parameter",
        type=float,
        default=TOKENS_PER_PARAMETER,
        help="training tokens per parameter of the dense model",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("runs/convergence-moe"), help="folder of the runs")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("data/stdlib-bytes"),
        help="prefix of the dataset; created if it does not exist",
    )
    parser.add_argument(
        "--out", type=Path, default=MEASURED, help="folder in which results/, figures/ and moe.md are written"
    )
    folders = ["--directory", f"{FOLDER}/runs", "--data", f"{FOLDER}/data", "--out", FOLDER]
    small = ["--ladder", "ladder-30k", "--tokens-per-parameter", "0.1", "--seeds", "1"]
    options = parse_arguments(parser, smoke=[*small, *folders])
    ensure_text(options.data, options.smoke)
    rungs = [rung(name, optimizer, options) for name in options.ladder for optimizer in RATES]
    for one in rungs:
        for seed in range(options.seeds):
            for kind in KINDS:
                train(one.runs[kind][seed], options)
    result = study(rungs, options)
    write_json(options.out / "results" / "convergence_moe.json", result)
    (options.out / "figures").mkdir(exist_ok=True)
    plot(result, options.out / "figures" / "convergence_moe.png")
    write_measured(MEASURED / "moe.md", __file__, page(result), options.smoke)


if __name__ == "__main__":
    main()
