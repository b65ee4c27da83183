"""Writes docs/generated/planner_accuracy.md: every published row with its prediction, the largest errors first."""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import ROOT, parse_arguments
from benchmarks.planner.fit_machines import above_ceilings
from benchmarks.planner.leave_one_model_out import expert_table
from benchmarks.published.datasets import FURTHER, PUBLISHED, PublishedRun, Reading, is_fitted, read_stated, shipped
from benchmarks.published.predict import RowPrediction, cluster
from benchmarks.published.validate import band_of, judged, order_by_gap, ranked_pairs

PAGE = ROOT / "docs" / "generated" / "planner_accuracy.md"
FIGURE = ROOT / "docs" / "generated" / "planner_accuracy.svg"
HIDDEN = "vTrain single-node"  # 722 rows of one node; only the worst are listed
SHOWN_OF_HIDDEN = 40
WIDEST = 1.28  # factor of the prediction interval for rows whose stack was not fitted
# Errors that other models of training time report on their own data.
YARDSTICKS = (
    (
        "Charon",
        "5.35 %",
        "its own clusters",
    ),
    (
        "Calculon",
        "11 to 13 %",
        "SC'23, Megatron rows on A100",
    ),
    (
        "Subramanian et al.",
        "17 to 21 %",
        "nothing measured on the target",
    ),
    (
        "Primus projection",
        "no figure for all rows",
        "MI300X",
    ),
)
INTRODUCTION = """# Accuracy of the planner, row by row

`python -m benchmarks.planner.accuracy_page` writes this page.
Errors are of seconds per step: predicted / measured - 1.
A row is *fitted* if a constant was fitted on it (`benchmarks/published/fitted_rows.txt`).
A model is *seen* if a constant of the same machine and stack was fitted on a row with the same layers and width.
To add rows, write a TSV with the columns of `benchmarks/published/*.tsv` and run
`frontier-llm plan --validate FILE --rows`.
A measurement that a later release repeats to the last digit is one row.
No run on an MI250X by this program is among the rows.
"""


@dataclass(frozen=True)
class Judged:
    """A published row and its prediction."""

    prediction: RowPrediction
    # fitted (a constant was fitted on this row) | seen (a constant was fitted on another row of this model) | new
    seen: str

    @property
    def row(self) -> PublishedRun:
        """The measured run."""
        return self.prediction.row

    @property
    def error(self) -> float:
        """Relative error of the step time."""
        return self.prediction.error

    @property
    def inside(self) -> bool:
        """True if the measured time lies within the 90 % interval."""
        return abs(math.log(1 + self.error)) <= math.log(band_of(self.row))

    @property
    def kind(self) -> str:
        """Kind of run: dense, long context (CP) or experts, in BF16 or FP8."""
        row = self.row
        axis = "experts" if row.model.moe else "CP" if row.layout.cp > 1 else "dense"
        return f"{axis} {'FP8' if row.stack.endswith('fp8') else 'BF16'}"


def readings() -> list[Reading]:
    """Return all measurements of benchmarks/published, without repetitions."""
    further = [reading for name in FURTHER for reading in read_stated(PUBLISHED / name)]
    return without_repetitions([*further, *(Reading(row.key, row) for row in shipped())])


def without_repetitions(rows: Iterable[Reading]) -> list[Reading]:
    """Return the rows without repetitions. A repetition is the same run with the same step time to the last digit.

    Releases of a table repeat figures that were not measured again.
    """
    kept: dict[object, Reading] = {}
    for reading in rows:
        run = reading.run
        if run is None:
            kept[reading.key] = reading
        else:
            content = (run.machine, run.stack, run.model.model_dump_json(exclude={"name"}), run.layout)
            software = tuple(sorted(run.software.items()))
            kept.setdefault((*content, software, run.seconds), reading)
    return list(kept.values())


def judge(rows: Iterable[Reading]) -> tuple[list[Judged], list[Reading]]:
    """Return the rows with a prediction, and the rows without one."""
    results = [judged(reading) for reading in rows]
    fitted_models = {_model(one.row) for _, one in results if one is not None and is_fitted(one.row)}
    priced = []
    for _, prediction in results:
        if prediction is None:
            continue
        row = prediction.row
        seen = "fitted" if is_fitted(row) else "seen" if _model(row) in fitted_models else "new"
        priced.append(Judged(prediction, seen))
    return priced, [reading for reading, prediction in results if prediction is None]


def _model(row: PublishedRun) -> tuple[object, ...]:
    return row.machine, row.stack, row.model.layers, row.model.hidden


def vendor(row: PublishedRun) -> str:
    """Return the vendor of the row's devices."""
    return {"amd": "AMD", "nvidia": "NVIDIA"}.get(cluster(row.machine).device.vendor, "other")


def summary(rows: Sequence[Judged]) -> Iterator[str]:
    """Yield a table of errors by vendor, machine, stack, kind, and whether a constant was fitted on the model."""
    columns = [
        "vendor",
        "machine",
        "stack",
        "kind",
        "model",
        "rows",
        "mean error",
        "bias",
        "largest",
        "inside",
        "refused",
    ]
    yield f"| {' | '.join(columns)} |"
    yield "|---|---|---|---|---|--:|--:|--:|--:|--:|--:|"
    groups: dict[tuple[str, ...], list[Judged]] = defaultdict(list)
    for one in rows:
        groups[vendor(one.row), one.row.machine, one.row.stack, one.kind, one.seen].append(one)
    for key, members in sorted(groups.items()):
        errors = 100 * np.array([one.error for one in members])
        inside = 100 * np.mean([one.inside for one in members])
        refused = sum(not one.prediction.fits and not one.row.approximate for one in members)
        largest = errors[np.argmax(np.abs(errors))]
        figures = (
            f"{np.abs(errors).mean():.1f} % | {errors.mean():+.1f} % | {largest:+.1f} % | {inside:.0f} % | {refused}"
        )
        yield f"| {' | '.join(key)} | {len(members)} | {figures} |"


def order(rows: Sequence[Judged]) -> Iterator[str]:
    """Yield a table with the fraction of pairs of rows that are predicted in the measured order. Each row of the table
    is a range of the measured gap between the two rows of a pair.
    """
    yield "| measured gap of a pair | fitted: pairs | in the measured order | others: pairs | in the measured order |"
    yield "|---|--:|--:|--:|--:|"
    parts = [[one.prediction for one in rows if is_fitted(one.row) == fitted] for fitted in (True, False)]
    fitted, others = (order_by_gap(ranked_pairs(part)) for part in parts)
    for (name, number, share), (_, other_number, other_share) in zip(fitted, others, strict=True):
        words = ["" if value is None else f"{value:.0f} %" for value in (share, other_share)]
        yield f"| {name} | {number} | {words[0]} | {other_number} | {words[1]} |"


def listing(rows: Sequence[Judged]) -> Iterator[str]:
    """Yield the table of all rows, the largest errors first."""
    yield "| row | machine, stack | model | devices | measured, s | predicted, s | error | interval | model |"
    yield "|---|---|---|--:|--:|--:|--:|--:|---|"
    hidden = 0
    for one in sorted(rows, key=lambda one: -abs(math.log(1 + one.error))):
        row = one.row
        hidden += row.dataset == HIDDEN
        if row.dataset == HIDDEN and hidden > SHOWN_OF_HIDDEN:
            continue
        cells = (
            row.key,
            f"{row.machine}, {row.stack}",
            row.model.name,
            row.layout.devices,
            f"{row.seconds:.4g}",
            f"{one.prediction.seconds:.4g}",
            f"{100 * one.error:+.1f} %",
            f"{band_of(row):.2f}{'' if one.inside else ' (outside)'}",
            one.seen,
        )
        yield "| " + " | ".join(map(str, cells)) + " |"


def ceilings() -> Iterator[str]:
    """Yield a table of the fitted constants that exceed their ceilings, in the units of Rates."""
    yield "| machine, stack | constant | fitted | ceiling | source of the ceiling |"
    yield "|---|---|--:|--:|---|"
    for one in above_ceilings():
        cells = (
            f"{one.machine}, {one.stack}",
            f"`{one.constant}`",
            f"{one.value:.4g}",
            f"{one.ceiling.value:.4g}",
            one.ceiling.source,
        )
        yield f"| {' | '.join(cells)} |"


def figure(rows: Sequence[Judged]) -> str:
    """Return an SVG: predicted against measured seconds, both logarithmic, with the prediction interval of a factor of
    1.28.
    """
    size = 640
    margin = 50
    low = -2.5
    high = 3.5

    def place(seconds: float) -> float:
        return margin + (math.log10(seconds) - low) / (high - low) * (size - 2 * margin)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="13">',
        f'<rect width="{size}" height="{size}" fill="#fff"/>',
    ]
    for factor in (1 / WIDEST, 1.0, WIDEST):
        ends = (10**low * WIDEST, 10**high / WIDEST)
        points = [f"{place(x):.1f} {size - place(x * factor):.1f}" for x in ends]
        dashes = "" if factor == 1 else ' stroke-dasharray="4 4"'
        lines.append(f'<path d="M{points[0]}L{points[1]}" stroke="#888"{dashes} fill="none"/>')
    for power in range(-2, 4):
        at = place(10.0**power)
        lines.append(f'<text x="{at:.0f}" y="{size - 28}" text-anchor="middle">{10.0**power:g}</text>')
        lines.append(f'<text x="{margin - 8}" y="{size - at + 4:.0f}" text-anchor="end">{10.0**power:g}</text>')
    lines.append(f'<text x="{size / 2:.0f}" y="{size - 8}" text-anchor="middle">measured seconds per step</text>')
    lines.append(f'<text x="14" y="{size / 2:.0f}" transform="rotate(-90 14 {size / 2:.0f})">predicted</text>')
    for number, (name, colour) in enumerate((("AMD", "#d62728"), ("NVIDIA", "#1f77b4"))):
        for one in rows:
            if vendor(one.row) == name:
                x = place(one.row.seconds)
                y = size - place(one.prediction.seconds)
                lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}" fill-opacity="0.6"/>')
        lines.append(f'<text x="{margin + 12}" y="{margin + 18 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def page(rows: Sequence[Judged], without: Sequence[Reading]) -> str:
    """Return the page in Markdown."""
    stated = [one for one in rows if not one.row.approximate and not one.row.unstated]
    unseen = [one for one in stated if one.seen != "fitted"]
    new = [one for one in unseen if one.seen == "new"]
    inside = 100 * np.mean([one.inside for one in unseen])
    inside_new = 100 * np.mean([one.inside for one in new])
    parts = [
        INTRODUCTION,
        "![Predicted against measured seconds per step; dashed: a factor of 1.28](planner_accuracy.svg)\n",
        "## By machine, stack and kind\n",
        "\n".join(summary(rows)) + "\n",
        f"Of {len(unseen)} rows with a stated layout that no constant was fitted on, {inside:.0f} % lie inside their "
        f"interval.\nOf the {len(new)} among them whose model is new, {inside_new:.0f} % do.\n",
        "## Experts, with one size left out\n",
        "Errors of Grok-1 on 32 GPUs and more, with factors that were fitted without the rows of this size:\n",
        "\n".join(expert_table()) + "\n",
        "## Constants above their ceilings\n",
        "A fit keeps each rate and share below a ceiling (`frontier_llm/experiments/measure/ceilings.py`).\n"
        "These constants were fitted without it. They also contain errors of other parts of the formula:\n",
        "\n".join(ceilings()) + "\n",
        "## Order of layouts\n",
        "Pairs of rows that differ only in their layout, by the difference of their measured times:\n",
        "\n".join(order(rows)) + "\n",
        "## Yardsticks\n",
        "Errors that other planners report on their own rows:\n",
        "| planner | error | rows |\n|---|--:|---|\n"
        + "\n".join(f"| {name} | {error} | {where} |" for name, error, where in YARDSTICKS)
        + "\n",
        "## Every row\n",
        f"The largest errors are first. Of {HIDDEN} only the {SHOWN_OF_HIDDEN} largest are listed.\n",
        "\n".join(listing(rows)) + "\n",
        "## Rows without a prediction\n",
        "| row | reason |\n|---|---|\n" + "\n".join(f"| {one.key} | {one.reason} |" for one in without) + "\n",
    ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    options = parse_arguments(parser, smoke=[])
    rows, without = judge(read_stated(PUBLISHED / FURTHER[0]) if options.smoke else readings())
    text = page(rows, without)
    print("\n".join(summary(rows)))
    if not options.smoke:
        PAGE.write_text(text, encoding="utf-8")
        FIGURE.write_text(figure(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
