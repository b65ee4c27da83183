"""Writes the planner's errors on vTrain's multi-node runs into docs/benchmarks/planner.md.

Errors are grouped by bubble, message per NIC, host time, memory, tensor degree and microbatch. A second table has the
share of pairs that the planner ranks correctly, by their measured gap.

    python -m benchmarks.planner.residuals
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from benchmarks.harness import MEASURED, parse_arguments, write_measured
from benchmarks.published.datasets import is_fitted, shipped
from benchmarks.published.predict import RowPrediction, cluster_rates, peak_bytes, predict
from benchmarks.published.validate import order_by_gap, ranked_pairs
from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import ModelConfig
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.layouts import ranks_per_node
from frontier_llm.planner.costs.seconds import FORWARD_OPS
from frontier_llm.planner.costs.time import p2p_bytes

DATASET = "vTrain multi-node"
PAGE = MEASURED / "planner.md"


def bubble(model: ModelConfig, layout: Layout, rates: Rates) -> float:
    """Return the pipeline bubble in percent of the microbatches."""
    return 100 * (layout.pp - 1) / layout.microbatches


def message_mib(model: ModelConfig, layout: Layout, rates: Rates) -> float:
    """Return the MiB of a pipeline message on one NIC while all devices of a node send. Returns 0 if no message leaves
    the node.
    """
    place = ranks_per_node(layout, rates)
    if layout.pp == 1 or place.pp_inside:
        return 0.0
    return float(p2p_bytes(model, layout, rates)) * float(place.pp_sharing) / rates.node_devices / 2**20


def host_ms(model: ModelConfig, layout: Layout, rates: Rates) -> float:
    """Return the host's time to launch one microbatch's forward on one rank, in ms."""
    return 1e3 * (model.layers / layout.pp * FORWARD_OPS * rates.launch_s + rates.microbatch_s)


def memory_share(model: ModelConfig, layout: Layout, rates: Rates) -> float:
    """Return the memory of the fullest device in percent. An allocator that runs short would slow down such runs."""
    return 100 * peak_bytes(model, layout, rates) / rates.memory_bytes


COLUMNS: dict[str, tuple[Callable[[ModelConfig, Layout, Rates], float], tuple[float, ...]]] = {
    "bubble, % of the microbatches": (bubble, (10, 30, 100)),
    "pipeline message per NIC, MiB": (message_mib, (0.1, 8, 32)),
    "host per microbatch, ms": (host_ms, (2, 4, 8)),
    "memory of the fullest device, %": (memory_share, (40, 60, 75)),
    "tensor degree": (lambda model, layout, rates: layout.tp, (1.5, 3, 6)),
    "microbatch": (lambda model, layout, rates: layout.micro_batch, (1.5, 3, 6)),
}


def classes(
    predictions: Sequence[RowPrediction], values: np.ndarray, edges: Sequence[float]
) -> list[tuple[str, np.ndarray]]:
    """Return (class, errors in percent of log time) of each class that has rows."""
    errors = 100 * np.log([one.seconds / one.row.seconds for one in predictions])
    bounds = [-np.inf, *edges, np.inf]
    words = [f"below {edges[0]:g}", *(f"{low:g} to {high:g}" for low, high in pairwise(edges)), f"from {edges[-1]:g}"]
    parts = [
        (word, errors[(values >= low) & (values < high)])
        for word, (low, high) in zip(words, pairwise(bounds), strict=True)
    ]
    return [(word, part) for word, part in parts if len(part)]


def pairs(predictions: Sequence[RowPrediction]) -> list[str]:
    """Return a table with the fraction of pairs of layouts that are ranked correctly, for the fitted and the unseen
    half of the runs. Each row of the table is a range of the measured gap between the two layouts of a pair.
    """
    halves = [[one for one in predictions if is_fitted(one.row) == fitted] for fitted in (True, False)]
    fitted, unseen = (order_by_gap(ranked_pairs(half)) for half in halves)
    lines = [
        "| measured gap of a pair | fitted: pairs | ranked right, % | unseen: pairs | ranked right, % |",
        "|---|--:|--:|--:|--:|",
    ]
    for (name, number, share), (_, other_number, other_share) in zip(fitted, unseen, strict=True):
        lines.append(f"| {name} | {number} | {share:.1f} | {other_number} | {other_share:.1f} |")
    return lines


def table() -> str:
    """Return the lines of the page."""
    predictions = predict([row for row in shipped() if row.dataset == DATASET])
    rates = cluster_rates(predictions[0].row.machine, predictions[0].row.stack)
    lines = ["| | class | runs | mean | standard deviation |", "|---|---|--:|--:|--:|"]
    errors = 100 * np.log([one.seconds / one.row.seconds for one in predictions])
    lines.append(f"| all | | {len(errors)} | {errors.mean():+.1f} | {errors.std():.1f} |")
    for name, (of, edges) in COLUMNS.items():
        values = np.array([of(one.row.model, one.row.layout, rates) for one in predictions])
        parts = classes(predictions, values, edges)
        between = sum(len(part) * (part.mean() - errors.mean()) ** 2 for _, part in parts) / len(errors)
        lines.append(f"| **{name}** | explains {100 * between / errors.var():.0f} % of the variance | | | |")
        lines += [f"| | {word} | {len(part)} | {part.mean():+.1f} | {part.std():.1f} |" for word, part in parts]
    return "\n".join([*pairs(predictions), "", *lines]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse_arguments(parser, smoke=[])
    write_measured(PAGE, __file__, table(), options.smoke)
