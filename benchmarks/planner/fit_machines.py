"""Fit the clusters' constants on the stated half of the published rows and write them into configs/machines/*.yaml.

    python -m benchmarks.planner.fit_machines [--dry-run | --leave-models-out] [MACHINE ...]

Robust least squares on log(predicted / measured): a residual beyond `KNEE` counts linearly, because published tables
hold stalled runs that no constant should bend towards. A weak prior keeps constants that the data do not determine
where engineering puts them. Every fitted number keeps its tag `estimated` and says in its source on how many rows of
which data set it was fitted. `--leave-models-out` fits nothing for good: every model of a fitted stack is predicted by
constants fitted on that cluster's other models. Needs scipy.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from frontier_llm.config import configs_dir
from frontier_llm.machine.load import PLACES, load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.published.datasets import FITTED, PublishedRun, shipped
from frontier_llm.planner.published.predict import RowPrediction, cluster_rates, complete, predict, rates_of
from frontier_llm.planner.published.validate import Accuracy, as_text, score

KNEE = 0.03  # of log time
PRIOR = 0.003  # weight of (log constant - log start)² against one row
CEILING = 1.0  # efficiencies are shares

# where each constant starts, and what the weak prior holds it to; the file's own value would drift from fit to fit
START = {
    "gemm_efficiency": 0.8,
    "gemm_k_half": 100.0,
    "unaligned_penalty": 4.0,
    "flash_efficiency": 0.6,
    "flash_backward": 0.75,
    "hbm_efficiency": 0.75,
    "kernel_s": 8e-6,
    "launch_s": 30e-6,
    "microbatch_s": 5e-4,
    "step_s": 2e-2,
    "fabric_latency_s": 20e-6,
    "fabric_hop_s": 2e-6,
    "network_efficiency": 0.8,
    "network_crowding": 0.8,
    "network_latency_s": 25e-6,
    "fabric_share": 0.4,
    "linear_speedup": 1.6,
}
START_OF: dict[str, dict[str, float]] = {
    "llm-foundry-h100": {"gemm_efficiency": 0.65, "flash_efficiency": 0.4, "flash_backward": 0.6},
    "eos": {"gemm_efficiency": 0.7, "flash_efficiency": 0.5},
    "frontier": {"unaligned_penalty": 2.0},
}
# NVLink 3 on A100: what large messages reach, and the link rate, bytes/s
FABRIC_START = 240e9
FABRIC_CEILING = 300e9


def starting_point(machine: str, numbers: Rates, keys: Sequence[str]) -> Rates:
    """`numbers` with the constants that are to be fitted set back to where every fit starts."""
    values = {**START, **START_OF.get(machine, {})}
    constants: dict[str, Any] = {key: values[key] for key in keys if "fabric_bytes" not in key}
    if any("fabric_bytes" in key for key in keys):
        constants["fabric_bytes_s"] = tuple(FABRIC_START for _ in numbers.fabric_bytes_s)
    return replace(numbers, **constants)


def fit(rows: Sequence[PublishedRun], start: Rates, keys: Sequence[str], evaluations: int = 100) -> Rates:
    """`start` with `keys` changed to suit `rows` best."""
    layouts = [complete(row, rates_of(row, start)) for row in rows]
    measured_s = np.array([row.seconds for row in rows])

    def residual(x: np.ndarray) -> np.ndarray:
        constants = apply(start, keys, x)
        seconds = [
            float(step_s(row.model, layout, rates_of(row, constants)))
            for row, layout in zip(rows, layouts, strict=True)
        ]
        return np.concatenate([soften(np.log(np.array(seconds) / measured_s)), np.sqrt(PRIOR) * x])

    return apply(
        start, keys, least_squares(residual, np.zeros(len(keys)), diff_step=1e-3, x_scale=0.5, max_nfev=evaluations).x
    )


def soften(error: np.ndarray) -> np.ndarray:
    """Residuals whose squares are Huber's loss with knee `KNEE`."""
    size = np.abs(error)
    return np.sign(error) * np.where(size < KNEE, size, np.sqrt(np.maximum(2 * KNEE * size - KNEE**2, 0.0)))


def apply(start: Rates, keys: Sequence[str], x: np.ndarray) -> Rates:
    """`start` with each key multiplied by exp(x); shares stay at most 1.

    A tuple is scaled as a whole, or, with the key's suffix "/N", in its entry for groups of N devices.
    """
    changes: dict[str, Any] = {}
    for key, shift in zip(keys, x, strict=True):
        name, _, ranks = key.partition("/")
        value = changes.get(name, getattr(start, name))
        if ranks:
            at = start.fabric_size.index(int(ranks))
            changes[name] = (*value[:at], min(float(value[at] * np.exp(shift)), FABRIC_CEILING), *value[at + 1 :])
        elif isinstance(value, tuple):
            changes[key] = tuple(min(float(one * np.exp(shift)), FABRIC_CEILING) for one in value)
        else:
            grown = float(value * np.exp(shift))
            changes[key] = min(grown, CEILING) if key.endswith(("efficiency", "crowding")) else grown
    return replace(start, **changes)


def leave_models_out(rows: Sequence[PublishedRun]) -> list[Accuracy]:
    """Cross-validation: every model of a fitted stack predicted by constants fitted on that cluster's other models."""
    scores = []
    for (machine, stack), keys in FITTED.items():
        mine = [row for row in rows if (row.machine, row.stack) == (machine, stack) and row.known]
        models = list(dict.fromkeys(row.model.name for row in mine))
        if len(models) < 2:
            continue
        predictions: list[RowPrediction] = []
        for model in models:
            others = [row for row in mine if row.model.name != model]
            constants = fit(others, starting_point(machine, cluster_rates(machine, stack), keys), keys, evaluations=40)
            predictions += predict([row for row in mine if row.model.name == model], constants)
        scores.append(score(f"{mine[0].dataset} ({machine})", f"left out, {len(models)} models", predictions))
    return scores


def rewrite(path: Path, stack: str, key: str, value: float, source: str) -> None:
    """Replace one number's value and source in place; comments and order of the file stay."""
    key, _, ranks = key.partition("/")
    section, name, unit = PLACES[key]
    lines = path.read_text().splitlines()
    inside = ""
    out = []
    within_fabric = False
    for line in lines:
        top = re.match(r"^(\w+):", line)
        if top:
            inside = top.group(1)
        sub = re.match(r"^  ([\w-]+):\s*$", line)
        if inside == "stacks" and sub:
            inside_stack = sub.group(1)
        if inside == "node" and line.startswith("  ") and not line.startswith("    "):
            within_fabric = line.strip() == "fabric_gbps:"
        here = (
            section == "stack" and inside == "stacks" and line.startswith(f"    {name}:") and inside_stack == stack
        ) or (section == inside and line.startswith(f"  {name}:") and "{" in line)
        if key == "fabric_bytes_s":
            here = within_fabric and bool(re.match(rf"^    {ranks or '[0-9]+'}:", line))
        if here:
            head = line.split("{")[0]
            line = f'{head}{{value: {value / unit:.4g}, tag: estimated, source: "{source}"}}'
        out.append(line)
    path.write_text("\n".join(out) + "\n")


def value_of(best: Rates, key: str) -> float:
    """A fitted constant; "fabric_bytes_s/4" is the entry for groups of four."""
    name, _, ranks = key.partition("/")
    value = getattr(best, name)
    return value[best.fabric_size.index(int(ranks)) if ranks else 0] if isinstance(value, tuple) else value


def main() -> None:
    """Fit every stack that has keys and rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="*")
    parser.add_argument("--dry-run", action="store_true", help="print, do not write")
    parser.add_argument(
        "--leave-models-out", action="store_true", help="score constants on models that they were not fitted on"
    )
    args = parser.parse_args()
    if args.leave_models_out:
        print(as_text(leave_models_out(shipped())))
        return
    for (name, stack), keys in FITTED.items():
        if args.machines and name not in args.machines:
            continue
        rows = [row for row in shipped() if (row.machine, row.stack) == (name, stack)]
        train = [row for row in rows if row.fitted]
        unseen = [row for row in rows if not row.fitted]
        best = fit(train, starting_point(name, rates(load_machine(name), stack), keys), keys)
        for title, part in (("fitted", train), ("unseen", unseen)):
            if part:
                error = np.array([one.error for one in predict(part, best)])
                print(
                    f"{name:20s} {stack:18s} {title} n={len(part):3d} MAPE {100 * np.mean(np.abs(error)):5.2f} % "
                    f"median {100 * np.median(np.abs(error)):5.2f} % bias {100 * np.mean(error):+5.2f} %"
                )
        for key in keys:
            value = value_of(best, key)
            print(f"    {key} = {value:.4g}")
            if not args.dry_run:
                share = f"{len(train)} of {len(rows)} rows of {train[0].dataset}"
                source = f"fitted on {share} (benchmarks/planner/fit_machines.py)"
                rewrite(configs_dir() / "machines" / f"{name}.yaml", stack, key, value, source)


if __name__ == "__main__":
    main()
