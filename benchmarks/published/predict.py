"""Predicts a measured run: completes its layout and simulates its pipeline with its cluster's constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from benchmarks.published.datasets import PublishedRun, machine_path
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.parameters import StageSpec
from frontier_llm.config import RECOMPUTE, ModelConfig
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.machine.schema import Machine
from frontier_llm.planner.costs.memory import memory_by_rank, total
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.pipeline import simulate_step

POWERS = (1, 2, 4, 8)
GRID: dict[str, Sequence[Any]] = {
    "micro_batch": POWERS,
    "chunks": range(1, 9),
    "tp": POWERS,
    "pp": POWERS,
    "recompute": RECOMPUTE,
}


@dataclass(frozen=True)
class RowPrediction:
    """Prediction for a measured run."""

    row: PublishedRun
    seconds: float
    peak_bytes: float
    limit_bytes: float

    @property
    def error(self) -> float:
        """Relative error of the time. If it is negative, the predicted time is too short."""
        return self.seconds / self.row.seconds - 1

    @property
    def fits(self) -> bool:
        """True if the planner predicts that this run fits into memory. All runs took place, so False is an error of the
        planner.
        """
        return self.peak_bytes <= self.limit_bytes


@lru_cache(maxsize=64)
def cluster(name: str) -> Machine:
    """Return the machine of a row."""
    return load_machine(str(machine_path(name)))


@lru_cache(maxsize=64)
def cluster_rates(machine: str, stack: str) -> Rates:
    """Return the constants of a cluster."""
    return rates(cluster(machine), stack or None)


def predict(rows: Sequence[PublishedRun], constants: Rates | None = None) -> list[RowPrediction]:
    """Return one prediction per row. Without `constants`, use the constants of each row's own cluster."""
    predictions = []
    for row in rows:
        numbers = rates_of(row, constants or cluster_rates(row.machine, row.stack))
        layout = complete(row, numbers)
        seconds = seconds_of(row.model, layout, numbers)
        memory = peak_bytes(row.model, layout, numbers)
        predictions.append(RowPrediction(row, seconds, memory, numbers.memory_bytes))
    return predictions


def rates_of(row: PublishedRun, numbers: Rates) -> Rates:
    """Return a cluster's constants with this row's software options."""
    return replace(numbers, **row.software)


def seconds_of(model: ModelConfig, layout: Layout, numbers: Rates) -> float:
    """Return the step time: simulated if there is a pipeline, else in closed form (which is then exact)."""
    if layout.pp == 1 or layout.sharding.startswith("weights"):
        return float(step_s(model, layout, numbers))
    return simulate_step(model, layout, numbers, even_stages(model.layers, layout.pp * layout.chunks)).step_s


def peak_bytes(model: ModelConfig, layout: Layout, numbers: Rates) -> float:
    """Return the memory of the fullest rank."""
    stages = even_stages(model.layers, layout.pp * layout.chunks)
    return max(total(lines) for lines in memory_by_rank(model, layout, numbers, stages))


def even_stages(layers: int, pieces: int) -> tuple[StageSpec, ...]:
    """Divide layers in the same way as other frameworks: as evenly as possible, and the first stages get the remainder.

    Embedding and head usually do not count. If counting them as one layer each makes the split even, the first and last
    piece have one layer less. This is Megatron's account-for-embedding and -loss in the split, and matches Llama 3's
    126 layers in 16 x 8 pieces.
    """
    base, more = divmod(layers, pieces)
    counts = [base + (index < more) for index in range(pieces)]
    if pieces > 1 and more == pieces - 2:
        counts = [base, *[base + 1] * more, base]
    return tuple(
        StageSpec(sum(counts[:index]), number, index == 0, index == pieces - 1) for index, number in enumerate(counts)
    )


def complete(row: PublishedRun, numbers: Rates) -> Layout:
    """Return the row's layout. Unstated fields are set to the fastest choice that fits the device, as a tuned run would
    have.
    """
    given = row.layout
    model = row.model
    if not row.unstated:
        return given
    choices = []
    for values in product(*(GRID[name] for name in row.unstated)):
        option = replace(given, **dict(zip(row.unstated, values, strict=True)))
        dp, uneven = divmod(given.devices, option.tp * option.cp * option.pp)
        if dp < 1 or uneven or option.pp * option.chunks > model.layers + 2 or model.heads % option.tp:
            continue
        m, uneven = divmod(given.global_batch, dp * option.micro_batch)
        if m < 1 or uneven or (option.chunks > 1 and option.pp == 1):
            continue
        choices.append(replace(option, dp=dp, microbatches=m, schedule="interleaved" if option.chunks > 1 else "1f1b"))
    even = [option for option in choices if model.layers % (option.pp * option.chunks) == 0]
    choices = even or choices  # uneven stages only if no number of stages divides the layers
    fitting = [option for option in choices if peak_bytes(model, option, numbers) <= numbers.memory_bytes] or choices
    if fitting:
        return min(fitting, key=lambda option: float(step_s(model, option, numbers)))
    return given
