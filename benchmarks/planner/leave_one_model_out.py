"""Fits two constants of NeMo's stacks on DGX-H100 rows, and reports the error on each model that the fit has not seen.

The constants are the rate of 16-bit products (`gemm_efficiency`) and the further factor of FP8 (`linear_speedup`). A
weak-scaling series is one row repeated, so the fit uses the row of each series with the fewest devices, and all rows of
a model weigh as much as those of another model. The reported errors are those of all rows.
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
from benchmarks.published.predict import cluster_rates, complete, rates_of, seconds_of
from frontier_llm.planner.costs.time import step_s

PAGE = MEASURED / "planner.md"
ROWS = "dgxc_dense.tsv"
# Grids of both constants. The ceilings are 0.75 of the peak for products in 16 bit, which cuBLAS reaches on H100, and
# the factor 2 between the peaks.
GEMM = tuple(np.round(np.arange(0.6, 0.7, 0.005), 3).tolist())
SPEEDUP = tuple(np.round(np.arange(1.5, 2.0, 0.025), 3).tolist())

Constants = tuple[float, float]


def all_runs() -> list[PublishedRun]:
    """Return all rows of the release that have a run."""
    return [reading.run for reading in read_stated(PUBLISHED / ROWS) if reading.run is not None]


def smallest(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Return the row with the fewest devices of each series: one model, number of layers, precision and release."""
    series: dict[tuple[object, ...], PublishedRun] = {}
    for run in runs:
        release = run.key.split("-")[1]
        key = (run.model.name, run.model.layers, run.stack, release)
        if key not in series or run.layout.devices < series[key].layout.devices:
            series[key] = run
    return list(series.values())


class Errors:
    """Relative errors of rows as a function of both constants."""

    def __init__(self) -> None:
        self.at = cache(self._at)
        self.simulated = cache(self._simulated)
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
        closed_s = float(step_s(run.model, layout, changed))
        return closed_s * self.simulated(key) / run.seconds - 1

    def _simulated(self, key: str) -> float:
        """Return simulated time / closed form of a row. The ratio hardly depends on both constants."""
        run = self.runs[key]
        numbers = rates_of(run, cluster_rates(run.machine, run.stack))
        layout = complete(run, numbers)
        return seconds_of(run.model, layout, numbers) / float(step_s(run.model, layout, numbers))


def mean_square(runs: Sequence[PublishedRun], errors: Errors, constants: Constants) -> float:
    """Return the mean squared error, with the same weight for each model and precision.

    With absolute errors so few models have several minima of about the same height.
    """
    groups: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        groups.setdefault((run.model.name, run.stack), []).append(errors.of(run, constants) ** 2)
    return float(np.mean([np.mean(group) for group in groups.values()]))


def fit(runs: Sequence[PublishedRun], errors: Errors) -> Constants:
    """Return the constants of the grid with the smallest mean squared error."""
    return min(product(GEMM, SPEEDUP), key=lambda constants: mean_square(runs, errors, constants))


def table(rows: Sequence[PublishedRun]) -> Iterator[str]:
    """Yield two tables: for each model the constants fitted without it and its errors with them, and the same errors
    by kind of row.
    """
    errors = Errors()
    runs = smallest(rows)
    kinds: dict[str, list[float]] = {}
    yield "| model left out | 16-bit rate | FP8 factor | BF16 rows | mean error | FP8 rows | mean error |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for name in dict.fromkeys(run.model.name for run in runs):
        constants = fit([run for run in runs if run.model.name != name], errors)
        cells = [name, f"{constants[0]:.3f}", f"{constants[1]:.3f}"]
        for is_fp8 in (False, True):
            mine = [run for run in rows if run.model.name == name and run.stack.endswith("fp8") == is_fp8]
            sizes = [100 * abs(errors.of(run, constants)) for run in mine]
            for run, size in zip(mine, sizes, strict=True):
                kind = f"{'CP' if run.layout.cp > 1 else 'dense'}, {'FP8' if is_fp8 else 'BF16'}"
                kinds.setdefault(kind, []).append(size)
            cells += [str(len(sizes)), f"{np.mean(sizes):.1f} %"]
        yield "| " + " | ".join(cells) + " |"
    gemm, speedup = fit(runs, errors)
    yield f"| none (the machine file's values) | {gemm:.3f} | {speedup:.3f} | | | | |"
    yield ""
    yield "| kind of the rows of models left out | rows | mean error |"
    yield "|---|--:|--:|"
    for kind, sizes in sorted(kinds.items()):
        yield f"| {kind} | {len(sizes)} | {np.mean(sizes):.1f} % |"


def main() -> None:
    options = parse_arguments(argparse.ArgumentParser(description=__doc__), smoke=[])
    rows = all_runs()
    if options.smoke:
        rows = [run for run in smallest(rows) if run.model.name in ("GPT3-175B", "Nemotron4-340B")][:4]
    write_measured(PAGE, __file__, "\n".join(table(rows)) + "\n", options.smoke)


if __name__ == "__main__":
    main()
