"""Fits two constants of NeMo's stacks on DGX-H100 rows, and reports the error on each model that the fit has not seen.

The constants are the rate of 16-bit products (`gemm_efficiency`) and the further factor of FP8 (`linear_speedup`). A
weak-scaling series is one row repeated, so all rows of a model weigh as much as those of another model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from benchmarks.harness import MEASURED, parse_arguments, write_measured
from benchmarks.published.datasets import PUBLISHED, PublishedRun, read_stated
from benchmarks.published.predict import cluster_rates, complete, rates_of
from frontier_llm.planner.costs.time import step_s

PAGE = MEASURED / "planner.md"
ROWS = "dgxc_dense.tsv"
# Grids of both constants. The ceilings are 0.75 of the peak for products in 16 bit, which cuBLAS reaches on H100, and
# the factor 2 between the peaks.
GEMM = tuple(np.round(np.arange(0.575, 0.7, 0.01), 3).tolist())
SPEEDUP = tuple(np.round(np.arange(1.5, 2.0, 0.05), 2).tolist())

Constants = tuple[float, float]


def smallest_runs() -> list[PublishedRun]:
    """Return the row with the fewest devices of each series: one model, number of layers, precision and release."""
    series: dict[tuple[object, ...], PublishedRun] = {}
    for reading in read_stated(PUBLISHED / ROWS):
        run = reading.run
        if run is None:
            continue
        release = run.key.split("-")[1]
        key = (run.model.name, run.model.layers, run.stack, release)
        if key not in series or run.layout.devices < series[key].layout.devices:
            series[key] = run
    return list(series.values())


class Errors:
    """Relative errors of rows as a function of both constants."""

    def __init__(self) -> None:
        self.at = cache(self._at)
        self.runs: dict[str, PublishedRun] = {}

    def of(self, run: PublishedRun, constants: Constants) -> float:
        """Return predicted / measured - 1 of a row. The FP8 factor does not matter for a row in 16 bit."""
        self.runs[run.key] = run
        gemm, speedup = constants
        return self.at(run.key, gemm, speedup if run.stack.endswith("fp8") else 1.0)

    def _at(self, key: str, gemm: float, speedup: float) -> float:
        run = self.runs[key]
        numbers = rates_of(run, cluster_rates(run.machine, run.stack))
        layout = complete(run, numbers)
        changed = replace(numbers, gemm_efficiency=gemm, linear_speedup=speedup)
        return float(step_s(run.model, layout, changed)) / run.seconds - 1


def mean_error(runs: Sequence[PublishedRun], errors: Errors, constants: Constants) -> float:
    """Return the mean absolute error, with the same weight for each model and precision."""
    groups: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        groups.setdefault((run.model.name, run.stack), []).append(abs(errors.of(run, constants)))
    return float(np.mean([np.mean(group) for group in groups.values()]))


def fit(runs: Sequence[PublishedRun], errors: Errors) -> Constants:
    """Return the constants of the grid with the smallest mean error."""
    return min(product(GEMM, SPEEDUP), key=lambda constants: mean_error(runs, errors, constants))


def table(runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Yield the table: for each model the constants fitted without it, and its errors with them."""
    errors = Errors()
    yield "| model left out | 16-bit rate | FP8 factor | BF16 rows | mean error | FP8 rows | mean error |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for name in dict.fromkeys(run.model.name for run in runs):
        constants = fit([run for run in runs if run.model.name != name], errors)
        cells = [name, f"{constants[0]:.3f}", f"{constants[1]:.2f}"]
        for is_fp8 in (False, True):
            mine = [run for run in runs if run.model.name == name and run.stack.endswith("fp8") == is_fp8]
            sizes = [100 * abs(errors.of(run, constants)) for run in mine]
            cells += [str(len(sizes)), f"{np.mean(sizes):.1f} %"]
        yield "| " + " | ".join(cells) + " |"
    gemm, speedup = fit(runs, errors)
    yield f"| none (the machine file's values) | {gemm:.3f} | {speedup:.2f} | | | | |"


def main() -> None:
    options = parse_arguments(argparse.ArgumentParser(description=__doc__), smoke=[])
    runs = smallest_runs()
    if options.smoke:
        runs = [run for run in runs if run.model.name in ("GPT3-175B", "Nemotron4-340B")][:4]
    write_measured(PAGE, __file__, "\n".join(table(runs)) + "\n", options.smoke)


if __name__ == "__main__":
    main()
