"""Writes what the planner misses on vTrain's multi-node runs, by bubble, message per NIC, host, tensor degree and microbatch, into docs/planner.md.

python -m scripts.residuals
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import ModelConfig
from frontier_llm.costs.seats import seats
from frontier_llm.costs.seconds import FORWARD_OPS
from frontier_llm.costs.time import p2p_bytes
from frontier_llm.machine import Rates
from frontier_llm.planner.published.datasets import shipped
from frontier_llm.planner.published.predict import RowPrediction, cluster_rates, predict
from scripts.measured_page import write_measured

DATASET = "vTrain multi-node"
PAGE = Path(__file__).parents[1] / "docs" / "planner.md"


def bubble(model: ModelConfig, layout: Layout, rates: Rates) -> float:
    """Microbatches' worth of waiting over microbatches, percent."""
    return 100 * (layout.pp - 1) / layout.microbatches


def message_mib(model: ModelConfig, layout: Layout, rates: Rates) -> float:
    """What a pipeline message puts on one NIC, all devices of a node sending, in MiB; 0 where no message leaves the node."""
    place = seats(layout, rates)
    if layout.pp == 1 or place.pp_inside:
        return 0.0
    return float(p2p_bytes(model, layout, rates)) * float(place.pp_sharing) / rates.node_devices / 2**20


def host_ms(model: ModelConfig, layout: Layout, rates: Rates) -> float:
    """What the host dispatches for one microbatch's forward on one rank, in ms."""
    return 1e3 * (model.layers / layout.pp * FORWARD_OPS * rates.launch_s + rates.microbatch_s)


COLUMNS: dict[str, tuple[Callable[[ModelConfig, Layout, Rates], float], tuple[float, ...]]] = {
    "bubble, % of the microbatches": (bubble, (10, 30, 100)),
    "pipeline message per NIC, MiB": (message_mib, (0.1, 8, 32)),
    "host per microbatch, ms": (host_ms, (2, 4, 8)),
    "tensor degree": (lambda model, layout, rates: layout.tp, (1.5, 3, 6)),
    "microbatch": (lambda model, layout, rates: layout.micro_batch, (1.5, 3, 6)),
}


def classes(predictions: Sequence[RowPrediction], values: np.ndarray, edges: Sequence[float]) -> list[tuple[str, np.ndarray]]:
    """(words, errors in percent of log time) of each class that has rows."""
    errors = 100 * np.log([one.seconds / one.row.seconds for one in predictions])
    bounds = [-np.inf, *edges, np.inf]
    words = [f"below {edges[0]:g}", *(f"{low:g} to {high:g}" for low, high in pairwise(edges)), f"from {edges[-1]:g}"]
    parts = [(word, errors[(values >= low) & (values < high)]) for word, (low, high) in zip(words, pairwise(bounds), strict=True)]
    return [(word, part) for word, part in parts if len(part)]


def table() -> str:
    """The lines of the page."""
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
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_measured(PAGE, __file__, table())
