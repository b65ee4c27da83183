"""Compares the predicted speeds of pipeline schedules with the only published comparison: Primus on eight MI300X,
relative to 1F1B.

Primus states neither microbatches nor batch. The prediction is therefore a range over 16 to 128 microbatches. No
constant is fitted to these rows.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from itertools import combinations

from benchmarks.harness import MEASURED, parse_arguments, write_measured
from benchmarks.published.datasets import PUBLISHED
from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.search import simulate_layout

PAGE = MEASURED / "schedules.md"
ROWS = "primus_schedules.tsv"
PREFIX = "primus-mi300x-pp8-"
MICROBATCHES = (16, 32, 64, 128)
# name in Primus → our schedule and virtual stages per rank; zbb needs as much memory as 1F1B, so it is ZB-H1
OURS = {
    "1f1b": ("1f1b", 1),
    "interleaved-2": ("interleaved", 2),
    "zbb": ("zb-h1", 1),
    "zb-v": ("zb-v", 2),
    "v-half": ("v-half", 2),
    "v-min": ("v-min", 2),
}


def measured() -> dict[str, float]:
    """Return schedule → tokens per second, relative to 1F1B."""
    lines = (PUBLISHED / ROWS).read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader((line for line in lines if not line.startswith("#")), delimiter="\t")
    speeds = {row["schedule"]: float(row["tokens_per_s_per_dev"]) for row in rows if row["id"].startswith(PREFIX)}
    return {name: speed / speeds["1f1b"] for name, speed in speeds.items()}


def predicted(microbatches: int) -> dict[str, float]:
    """Return schedule → predicted speed relative to 1F1B, of the row's model on eight pipeline ranks."""
    model = load_model("llama-2-7b", {"layers": 16})
    numbers = rates(load_machine("mi300x"), "megatron-core")
    seconds = {}
    for name, (schedule, chunks) in OURS.items():
        layout = Layout(pp=8, chunks=chunks, schedule=schedule, microbatches=microbatches)
        seconds[name] = simulate_layout(model, layout, numbers).step_s
    return {name: seconds["1f1b"] / one for name, one in seconds.items()}


def table(counts: Sequence[int]) -> Iterator[str]:
    """Yield the table, and a line with the fraction of pairs of schedules that are predicted in the measured order."""
    truth = measured()
    ours = {count: predicted(count) for count in counts}
    yield f"| schedule | measured | {' | '.join(f'{count} microbatches' for count in counts)} |"
    yield "|---|--:|" + "--:|" * len(counts)
    for name, speed in truth.items():
        yield f"| {name} | {speed:.2f} | " + " | ".join(f"{ours[count][name]:.2f}" for count in counts) + " |"
    pairs = list(combinations(truth, 2))
    right = [
        sum((truth[one] - truth[other]) * (ours[count][one] - ours[count][other]) > 0 for one, other in pairs)
        for count in counts
    ]
    yield f"| pairs in the measured order | {len(pairs)} | " + " | ".join(map(str, right)) + " |"


def main() -> None:
    options = parse_arguments(argparse.ArgumentParser(description=__doc__), smoke=[])
    counts = MICROBATCHES[:1] if options.smoke else MICROBATCHES
    write_measured(PAGE, __file__, "\n".join(table(counts)) + "\n", options.smoke)


if __name__ == "__main__":
    main()
