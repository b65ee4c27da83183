"""Fits the clusters' constants on one half of the published rows and writes them into configs/machines/*.yaml.

    python -m benchmarks.planner.fit_machines [--dry-run | --leave-models-out] [MACHINE ...]

The fit is robust least squares on log(predicted / measured). A residual beyond `KNEE` counts linearly, because
published tables contain stalled runs that must not influence the constants. A weak prior keeps constants that the data
do not determine near plausible values (`START`). Every fitted number keeps its tag `estimated`, and its source names
the number of rows and the data set.

`--leave-models-out` writes nothing. It predicts every model of a fitted stack by constants fitted on that cluster's
other models. Needs scipy.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import parse_arguments
from benchmarks.planner.leave_one_model_out import all_runs, expert_runs, smallest
from benchmarks.published.datasets import FITTED, FITTED_ROWS, PublishedRun, machine_path, shipped
from benchmarks.published.predict import (
    RowPrediction,
    cluster,
    cluster_rates,
    complete,
    predict,
    rates_of,
)
from benchmarks.published.validate import Accuracy, as_text, score
from frontier_llm.experiments.measure.ceilings import Ceiling, ceilings_of
from frontier_llm.experiments.measure.fit import Measurements, fit
from frontier_llm.experiments.measure.machine_file import value_of
from frontier_llm.files import write_atomically
from frontier_llm.machine.load import PLACES, load_machine
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.time import step_s

KNEE = 0.03
ROUNDING = 1e-3  # machine files have values with four digits
PRIOR = 0.003

# Start values of the constants, and centre of the weak prior. The values in the machine file are not used, because they
# change with each fit.
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
    "llm-foundry-h100": {
        "gemm_efficiency": 0.65,
        "flash_efficiency": 0.4,
        "flash_backward": 0.6,
    },
    "h100": {"gemm_efficiency": 0.7, "flash_efficiency": 0.5},
    "frontier": {"unaligned_penalty": 2.0},
}
FABRIC_START = 220e9  # bytes/s, NVLink 3 on A100: rate that large messages reach


def starting_point(machine: str, numbers: Rates, keys: Sequence[str]) -> Rates:
    """Return `numbers` with the constants to be fitted set to their start values."""
    values = {**START, **START_OF.get(machine, {})}
    constants: dict[str, Any] = {key: values[key] for key in keys if "fabric_bytes" not in key}
    if any("fabric_bytes" in key for key in keys):
        constants["fabric_bytes_s"] = tuple(FABRIC_START for _ in numbers.fabric_bytes_s)
    return replace(numbers, **constants)


def fit_rows(rows: Sequence[PublishedRun], start: Rates, constants: Sequence[str], evaluations: int = 100) -> Rates:
    """Return `start` with `constants` fitted to `rows`, which ran on one machine. No constant exceeds its ceiling."""
    layouts = [complete(row, rates_of(row, start)) for row in rows]

    def predicted_s(numbers: Rates) -> np.ndarray:
        pairs = zip(rows, layouts, strict=True)
        return np.array([float(step_s(row.model, layout, rates_of(row, numbers))) for row, layout in pairs])

    measurements = Measurements(
        start=start,
        constants=constants,
        predicted_s=predicted_s,
        measured_s=np.array([row.seconds for row in rows]),
        prior=PRIOR,
        knee=KNEE,
        ceilings=ceilings_of(cluster(rows[0].machine).device.architecture),
    )
    return fit(measurements, evaluations=evaluations, scale=0.5)


@dataclass(frozen=True)
class Above:
    """A fitted constant in a machine file that exceeds its ceiling."""

    machine: str
    stack: str
    constant: str
    value: float
    ceiling: Ceiling


def above_ceilings() -> Iterator[Above]:
    """Yield the fitted constants of all machine files that exceed their ceilings by more than the files' rounding."""
    for (machine, stack), constants in FITTED.items():
        limits = ceilings_of(cluster(machine).device.architecture)
        numbers = cluster_rates(machine, stack)
        for constant in constants:
            name, _, _ = constant.partition("/")
            value = value_of(numbers, constant)
            if name in limits and value > limits[name].value * (1 + ROUNDING):
                yield Above(
                    machine,
                    stack,
                    constant,
                    value,
                    limits[name],
                )


def leave_models_out(rows: Sequence[PublishedRun]) -> list[Accuracy]:
    """Cross-validate: predict every model of a fitted stack by constants fitted on that cluster's other models."""
    scores = []
    for (machine, stack), keys in FITTED.items():
        mine = [row for row in rows if (row.machine, row.stack) == (machine, stack) and row.known]
        models = list(dict.fromkeys(row.model.name for row in mine))
        if len(models) < 2:
            continue
        predictions: list[RowPrediction] = []
        for model in models:
            others = [row for row in mine if row.model.name != model]
            start = starting_point(machine, cluster_rates(machine, stack), keys)
            constants = fit_rows(others, start, keys, evaluations=40)
            predictions += predict([row for row in mine if row.model.name == model], constants)
        scores.append(score(f"{mine[0].dataset} ({machine})", f"left out, {len(models)} models", predictions))
    return scores


def write_fitted_rows() -> None:
    """Write the ids of the rows on which constants are fitted: the rows of FITTED, and the rows of NeMo on DGX-H100."""
    keys = {row.key for row in shipped() if row.may_be_fitted and (row.machine, row.stack) in FITTED}
    keys |= {row.key for row in smallest([*all_runs(), *expert_runs()])}
    FITTED_ROWS.write_text("".join(f"{key}\n" for key in sorted(keys)), encoding="utf-8")


def update_machine(path: Path, stack: str, fitted: Rates, constants: Iterable[str], source: str) -> None:
    """Replace the values and sources of constants in a machine file. Comments and order of the file are kept.

    `constants` are fields of Rates, as for `fit`. Raises ConfigError if the changed file cannot be read back.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    for constant in constants:
        field, _, _ = constant.partition("/")
        _, _, unit = PLACES[field]
        value = value_of(fitted, constant) / unit
        number = f'{{value: {value:.4g}, tag: estimated, source: "{source}"}}'
        for place in _places_of(lines, stack, constant):
            key, _, _ = lines[place].partition("{")
            lines[place] = key + number
    write_atomically(path, "\n".join(lines) + "\n")
    load_machine(str(path))


def _places_of(lines: Sequence[str], stack: str, constant: str) -> list[int]:
    """Return the indices of the lines in a machine file that contain the value of this constant."""
    field, _, devices = constant.partition("/")
    section, key, _ = PLACES[field]
    outer = ""
    inner = ""
    places = []
    for place, line in enumerate(lines):
        top = re.match(r"(\w+):", line)
        if top:
            outer = top[1]
            inner = ""
        elif re.match(r"  \S", line):
            inner = line.strip().removesuffix(":")
        if section == "stack":
            is_section = outer == "stacks" and inner == stack
            pattern = f"    {key}:"
        elif field == "fabric_bytes_s":
            is_section = outer == section and inner == key
            pattern = rf"    {devices or '[0-9]+'}:"
        else:
            is_section = outer == section
            pattern = rf"  {key}:.*\{{"
        if is_section and re.match(pattern, line):
            places.append(place)
    return places


def main() -> None:
    """Fit every stack for which there are constants to fit and measured rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="*")
    parser.add_argument("--dry-run", action="store_true", help="print the constants, and write no file")
    parser.add_argument(
        "--leave-models-out",
        action="store_true",
        help="cross-validate: predict each model with constants that were fitted without it",
    )
    args = parse_arguments(parser, smoke=["--dry-run", "frontier"])
    if args.leave_models_out:
        print(as_text(leave_models_out(shipped())))
        return
    for (name, stack), keys in FITTED.items():
        if args.machines and name not in args.machines:
            continue
        rows = [row for row in shipped() if (row.machine, row.stack) == (name, stack)]
        train = [row for row in rows if row.may_be_fitted]
        unseen = [row for row in rows if not row.may_be_fitted]
        best = fit_rows(train, starting_point(name, cluster_rates(name, stack), keys), keys)
        for title, part in (("fitted", train), ("unseen", unseen)):
            if part:
                error = np.array([one.error for one in predict(part, best)])
                print(
                    f"{name:20s} {stack:18s} {title} n={len(part):3d} MAPE {100 * np.mean(np.abs(error)):5.2f} % "
                    f"median {100 * np.median(np.abs(error)):5.2f} % bias {100 * np.mean(error):+5.2f} %"
                )
        for key in keys:
            print(f"    {key} = {value_of(best, key):.4g}")
        if not args.dry_run:
            write_fitted_rows()
            dataset = train[0].dataset
            of_dataset = sum(row.dataset == dataset for row in rows)
            source = f"fitted on {len(train)} of {of_dataset} rows of {dataset} (benchmarks/planner/fit_machines.py)"
            update_machine(
                machine_path(name),
                stack,
                best,
                keys,
                source,
            )


if __name__ == "__main__":
    main()
