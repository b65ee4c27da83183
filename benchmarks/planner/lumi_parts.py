"""Compares the measured step of GPT-175B on LUMI with the prediction, in two parts: a microbatch, and the rest."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from benchmarks.harness import MEASURED, parse_arguments, write_measured
from benchmarks.published.datasets import PUBLISHED, PublishedRun, read_stated
from benchmarks.published.predict import cluster_rates, even_stages, rates_of
from frontier_llm.planner.costs.collectives import collective_s
from frontier_llm.planner.pipeline import simulate_step

PAGE = MEASURED / "planner.md"
ROWS = "mi250x_rows.tsv"
MODEL = "lumi-mds-175b-"
COLLECTIVES = "lumi_collectives.tsv"
MICROBATCHES = "lumi_microbatches.tsv"
FURTHER_MICROBATCHES = 8  # number of microbatches that are simulated in addition, to predict the time of one


@dataclass(frozen=True)
class Point:
    """One row of the series: measured and predicted step time, and the predicted time of one more microbatch."""

    run: PublishedRun
    microbatch_s: float  # measured between two messages of rank 0's log, in the steady part of a step
    priced_s: float
    priced_microbatch_s: float

    @property
    def microbatches(self) -> int:
        """Microbatches of a replica."""
        return self.run.layout.microbatches

    @property
    def rest_s(self) -> float:
        """The measured step time without its microbatches. It includes the pipeline's bubble."""
        return self.run.seconds - self.microbatches * self.microbatch_s

    @property
    def priced_rest_s(self) -> float:
        """The predicted step time without its microbatches. It includes the pipeline's bubble."""
        return self.priced_s - self.microbatches * self.priced_microbatch_s


def read_tsv(name: str) -> list[dict[str, str]]:
    """Return the rows of a published table without its comment lines."""
    text = (PUBLISHED / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines, delimiter="\t"))


def measured_microbatches() -> dict[int, float]:
    """Return number of GCDs → measured seconds of a microbatch in the steady part of a step."""
    seconds = {}
    for row in read_tsv(MICROBATCHES):
        first, last = (datetime.strptime(row[name], "%H:%M:%S.%f") for name in ("first", "last"))
        seconds[int(row["gcds"])] = (last - first).total_seconds() / int(row["intervals"])
    return seconds


def series() -> list[Point]:
    """Return the rows of GPT-175B, which differ only in their number of replicas."""
    measured_s = measured_microbatches()
    points = []
    for reading in read_stated(PUBLISHED / ROWS):
        run = reading.run
        if run is None or not run.key.startswith(MODEL):
            continue
        numbers = rates_of(run, cluster_rates(run.machine, run.stack))
        stages = even_stages(run.model.layers, run.layout.pp)
        more = replace(run.layout, microbatches=run.layout.microbatches + FURTHER_MICROBATCHES)
        priced_s = simulate_step(run.model, run.layout, numbers, stages).step_s
        longer_s = simulate_step(run.model, more, numbers, stages).step_s
        points.append(
            Point(
                run=run,
                microbatch_s=measured_s[run.layout.devices],
                priced_s=priced_s,
                priced_microbatch_s=(longer_s - priced_s) / FURTHER_MICROBATCHES,
            )
        )
    return points


def parts(points: list[Point]) -> Iterator[str]:
    """Yield the table of both parts."""
    yield "| GCDs | microbatches | step, s | priced, s | microbatch, s | priced, s | rest, s | priced, s |"
    yield "|--:|--:|--:|--:|--:|--:|--:|--:|"
    for point in points:
        cells = (
            point.run.layout.devices,
            point.microbatches,
            f"{point.run.seconds:.1f}",
            f"{point.priced_s:.1f}",
            f"{point.microbatch_s:.2f}",
            f"{point.priced_microbatch_s:.2f} ({percent(point.priced_microbatch_s, point.microbatch_s)})",
            f"{point.rest_s:.1f}",
            f"{point.priced_rest_s:.1f} ({percent(point.priced_rest_s, point.rest_s)})",
        )
        yield "| " + " | ".join(map(str, cells)) + " |"


def percent(priced: float, measured: float) -> str:
    """Return the relative error of a prediction as text: '+3 %'."""
    return f"{100 * (priced / measured - 1):+.0f} %"


def collectives() -> Iterator[str]:
    """Yield the table of the published collectives between nodes, of eight groups that share a node's NICs."""
    numbers = cluster_rates("lumi", "megatron-deepspeed")
    yield "| collective | bytes | nodes | minimum, ms | median, ms | priced, ms |"
    yield "|---|--:|--:|--:|--:|--:|"
    for row in read_tsv(COLLECTIVES):
        nodes = int(row["nodes"])
        if "8 groups" not in row["note"]:
            continue
        priced_s = collective_s(
            rates=numbers,
            ranks=nodes,
            per_node=1,
            sharing=8,
            size_bytes=float(row["bytes"]),
            operation=row["operation"],
        )
        measured = (row["minimum_ms"], row["median_ms"])
        cells = (row["operation"], row["bytes"], nodes, *measured, f"{1e3 * float(priced_s):.0f}")
        yield "| " + " | ".join(map(str, cells)) + " |"


def tables() -> str:
    """Return both tables."""
    both = ("\n".join(parts(series())), "\n".join(collectives()))
    return "\n" + "\n\n".join(both) + "\n\n"


def main() -> None:
    options = parse_arguments(argparse.ArgumentParser(description=__doc__), smoke=[])
    write_measured(PAGE, __file__, tables(), options.smoke)


if __name__ == "__main__":
    main()
