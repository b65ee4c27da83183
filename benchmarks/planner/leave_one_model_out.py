"""Fits two constants of NeMo's stacks on DGX-H100 rows, and reports the error on each model that the fit has not seen.

The constants are the rate of 16-bit products (`gemm_efficiency`) and the further factor of FP8 (`linear_speedup`). The
rows of a weak-scaling series contain nearly the same information. The fit therefore uses only the row with the fewest
devices of each series. Each pair of model and precision has the same weight. The errors are reported for all rows.

A third constant, the rate of experts' products relative to other products (`grouped_share`), is fitted for each
precision on the rows of Grok-1 with 32 devices and more. Its errors are reported for each number of layers, with the
factor that was fitted without the rows of this number.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from statistics import fmean

from benchmarks.harness import MEASURED, parse_arguments, write_measured
from benchmarks.published.datasets import PUBLISHED, PublishedRun, read_stated
from benchmarks.published.predict import cluster_rates, complete, rates_of, seconds_of
from frontier_llm.blueprint.layout import Layout
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.time import step_s

PAGE = MEASURED / "planner.md"
ROWS = "dgxc_dense.tsv"
# Values that are tried for the constants. They lie below the ceilings of frontier_llm/experiments/measure/ceilings.py.
GEMM = [step / 1000 for step in range(600, 700, 5)]
SPEEDUP = [step / 1000 for step in range(1500, 2000, 25)]
EXPERT_ROWS = "dgxc_moe.tsv"
EXPERT_DEVICES = 32
EXPERT_SHARE = [step / 1000 for step in range(800, 1165, 5)]

Constants = tuple[float, float]


def all_runs(name: str = ROWS) -> list[PublishedRun]:
    """Return all rows of a file of the release that have a run."""
    return [reading.run for reading in read_stated(PUBLISHED / name) if reading.run is not None]


def expert_runs() -> list[PublishedRun]:
    """Return the rows with experts on which their factors are fitted."""
    return [run for run in all_runs(EXPERT_ROWS) if run.layout.devices >= EXPERT_DEVICES]


def smallest(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Return the row with the fewest devices of each series: one model, number of layers, precision and release."""
    series: dict[tuple[object, ...], PublishedRun] = {}
    for run in runs:
        release = run.key.split("-")[1]
        key = (
            run.model.name,
            run.model.layers,
            run.stack,
            release,
        )
        if key not in series or run.layout.devices < series[key].layout.devices:
            series[key] = run
    return list(series.values())


def is_fp8(run: PublishedRun) -> bool:
    """True if the products of the run's layers are in FP8."""
    return run.stack.endswith("fp8")


def kind_of(run: PublishedRun) -> str:
    """Return the group of rows to which this row belongs in the second table."""
    split = "CP" if run.layout.cp > 1 else "dense"
    precision = "FP8" if is_fp8(run) else "BF16"
    return f"{split}, {precision}"


def as_run(run: PublishedRun) -> tuple[Layout, Rates]:
    """Return the layout of a row and the machine file's constants with the row's software."""
    shipped = cluster_rates(run.machine, run.stack)
    numbers = rates_of(run, shipped)
    return complete(run, numbers), numbers


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
        if not is_fp8(run):
            speedup = 1.0
        return self.at(run.key, gemm, speedup)

    def _at(self, key: str, gemm: float, speedup: float) -> float:
        run = self.runs[key]
        layout, numbers = as_run(run)
        changed = replace(
            numbers,
            gemm_efficiency=gemm,
            linear_speedup=speedup,
        )
        closed_s = float(step_s(run.model, layout, changed))
        predicted_s = closed_s * self.simulated(key)
        return predicted_s / run.seconds - 1

    def _simulated(self, key: str) -> float:
        """Return simulated time / closed form of a row. The ratio hardly depends on the two constants."""
        run = self.runs[key]
        layout, numbers = as_run(run)
        closed_s = float(step_s(run.model, layout, numbers))
        return seconds_of(run.model, layout, numbers) / closed_s


def mean_square(runs: Sequence[PublishedRun], errors: Errors, constants: Constants) -> float:
    """Return the mean squared error, with the same weight for each model and precision.

    With so few models, the mean absolute error would have several minima of about the same height.
    """
    groups: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        group = groups.setdefault((run.model.name, run.stack), [])
        error = errors.of(run, constants)
        group.append(error**2)
    means = [fmean(group) for group in groups.values()]
    return fmean(means)


def fit(runs: Sequence[PublishedRun], errors: Errors) -> Constants:
    """Return the constants of the grid with the smallest mean squared error."""

    def height(constants: Constants) -> float:
        return mean_square(runs, errors, constants)

    return min(product(GEMM, SPEEDUP), key=height)


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
        others = [run for run in runs if run.model.name != name]
        constants = fit(others, errors)
        gemm, speedup = constants
        cells = [
            name,
            f"{gemm:.3f}",
            f"{speedup:.3f}",
        ]
        for fp8 in (False, True):
            sizes = []
            for run in rows:
                if run.model.name != name or is_fp8(run) != fp8:
                    continue
                size = 100 * abs(errors.of(run, constants))
                sizes.append(size)
                kinds.setdefault(kind_of(run), []).append(size)
            cells.append(str(len(sizes)))
            cells.append(f"{fmean(sizes):.1f} %")
        line = " | ".join(cells)
        yield f"| {line} |"
    gemm, speedup = fit(runs, errors)
    yield f"| none (the machine file's values) | {gemm:.3f} | {speedup:.3f} | | | | |"
    yield ""
    yield "| kind of the rows of models left out | rows | mean error |"
    yield "|---|--:|--:|"
    for kind, sizes in sorted(kinds.items()):
        mean = fmean(sizes)
        yield f"| {kind} | {len(sizes)} | {mean:.1f} % |"


class ExpertErrors:
    """Relative errors of rows with experts as a function of the rate of their products."""

    def __init__(self) -> None:
        self.of = cache(self._of)
        self.runs = {run.key: run for run in expert_runs()}

    def _of(self, key: str, share: float) -> float:
        run = self.runs[key]
        layout, numbers = as_run(run)
        predicted_s = seconds_of(run.model, layout, replace(numbers, grouped_share=share))
        return predicted_s / run.seconds - 1

    def fit(self, runs: Sequence[PublishedRun]) -> float:
        """Return the factor with the smallest mean squared error. Each number of layers has one row in the fit."""

        def height(share: float) -> float:
            return fmean(self.of(run.key, share) ** 2 for run in smallest(runs))

        return min(EXPERT_SHARE, key=height)


def expert_table() -> Iterator[str]:
    """Yield a table: for each number of layers the experts' factors fitted without its rows, and its mean errors."""
    errors = ExpertErrors()
    rows = list(errors.runs.values())
    by_precision: dict[bool, list[PublishedRun]] = {
        False: [],
        True: [],
    }
    for run in rows:
        by_precision[is_fp8(run)].append(run)
    sizes: dict[bool, list[float]] = {
        False: [],
        True: [],
    }
    yield "| layers left out | 16-bit factor | BF16 rows | mean error | FP8 factor | FP8 rows | mean error |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for layers in sorted({run.model.layers for run in rows}):
        cells = [str(layers)]
        for fp8, runs in by_precision.items():
            others = [run for run in runs if run.model.layers != layers]
            share = errors.fit(others)
            mine = []
            for run in runs:
                if run.model.layers == layers:
                    error = errors.of(run.key, share)
                    mine.append(100 * abs(error))
            sizes[fp8] += mine
            cells += _cells(share, mine)
        line = " | ".join(cells)
        yield f"| {line} |"
    cells = ["none (the machine file's values)"]
    for fp8, runs in by_precision.items():
        share = errors.fit(runs)
        cells += _cells(share, sizes[fp8])
    line = " | ".join(cells)
    yield f"| {line} |"


def _cells(share: float, sizes: Sequence[float]) -> list[str]:
    return [
        f"{share:.3f}",
        str(len(sizes)),
        f"{fmean(sizes):.1f} %",
    ]


def main() -> None:
    options = parse_arguments(argparse.ArgumentParser(description=__doc__), smoke=[])
    rows = all_runs()
    if options.smoke:
        rows = [run for run in smallest(rows) if run.model.name in ("GPT3-175B", "Nemotron4-340B")][:4]
    lines = list(table(rows))
    if not options.smoke:
        lines += ["", *expert_table()]
    text = "\n".join(lines)
    write_measured(PAGE, __file__, text + "\n", options.smoke)


if __name__ == "__main__":
    main()
