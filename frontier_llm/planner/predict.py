"""Predict a measured run: simulate its pipeline under its cluster's constants; fill in what the source leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from frontier_llm.blueprint import StageSpec
from frontier_llm.costs.memory import memory_by_rank, total
from frontier_llm.costs.time import step_s
from frontier_llm.costs.workload import SCHEDULES, Workload
from frontier_llm.machine import Rates, load_machine, rates
from frontier_llm.planner.datasets import Measurement
from frontier_llm.planner.pipeline import play

GRID = {"B": (1, 2, 4, 8), "chunks": (1, 2, 3, 4, 5, 6, 7, 8), "tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8), "recompute": (0, 1, 2)}


@dataclass(frozen=True)
class Prediction:
    """What the model says about a measured run."""

    row: Measurement
    seconds: float
    peak_bytes: float
    limit_bytes: float

    @property
    def error(self) -> float:
        """Relative error of the time; negative is too fast."""
        return self.seconds / self.row.seconds - 1

    @property
    def fits(self) -> bool:
        """Whether the planner would have admitted this run. It ran, so False is a false alarm."""
        return self.peak_bytes <= self.limit_bytes


@lru_cache(maxsize=64)
def cluster_rates(machine: str, stack: str) -> Rates:
    """The shipped constants of a cluster."""
    return rates(load_machine(machine), stack or None)


def predict(rows: Sequence[Measurement], constants: Rates | None = None) -> list[Prediction]:
    """One prediction per row, under `constants` or else under each row's own cluster."""
    found = []
    for row in rows:
        numbers = constants or cluster_rates(row.machine, row.stack)
        w = complete(row, numbers)
        found.append(Prediction(row, seconds_of(w, numbers), peak_bytes(w, numbers), numbers.memory_bytes))
    return found


def seconds_of(w: Workload, numbers: Rates) -> float:
    """Step time: simulated where there is a pipeline with whole microbatches, else in closed form (which is then exact)."""
    if w.pp == 1 or w.m != int(w.m) or w.zero >= 2:
        return float(step_s(w, numbers))
    stages = even_stages(int(w.layers), int(w.pp * w.chunks))
    name = "interleaved" if w.chunks > 1 else SCHEDULES[int(w.schedule)]
    return play(w, numbers, name, stages).step_s


def peak_bytes(w: Workload, numbers: Rates) -> float:
    """Memory of the fullest rank."""
    stages = even_stages(int(w.layers), int(w.pp * w.chunks))
    return max(total(lines) for lines in memory_by_rank(w, numbers, stages))


def even_stages(layers: int, pieces: int) -> tuple[StageSpec, ...]:
    """Layers cut as other frameworks cut them: as even as possible by count, leftovers to the front, the head not weighed.

    Unless counting the embedding and the head as a layer each makes it even: then the first and the last piece have one layer less
    (Megatron's account-for-embedding and -loss in the split; Llama 3's 126 layers in 16 x 8 pieces).
    """
    base, more = divmod(layers, pieces)
    counts = [base + (index < more) for index in range(pieces)]
    if pieces > 1 and more == pieces - 2:
        counts = [base, *[base + 1] * more, base]
    return tuple(StageSpec(sum(counts[:index]), number, index == 0, index == pieces - 1) for index, number in enumerate(counts))


def complete(row: Measurement, numbers: Rates) -> Workload:
    """The row's workload, with unstated knobs set as a user who tunes would: the fastest choice that fits the device."""
    w = row.workload
    if not row.unstated:
        return w
    replicas_batch = w.m * w.B * w.dp
    choices = []
    for values in product(*(GRID[name] for name in row.unstated)):
        option = replace(w, **dict(zip(row.unstated, values, strict=True)))
        dp = w.devices / option.tp / option.pp
        if dp < 1 or dp != int(dp) or option.pp * option.chunks > w.layers + 2 or w.A % option.tp:
            continue
        m = replicas_batch / dp / option.B
        if m < 1 or m != int(m) or (option.chunks > 1 and option.pp == 1):
            continue
        choices.append(replace(option, dp=dp, m=m, schedule=2 if option.chunks > 1 else 1))
    even = [option for option in choices if w.layers % (option.pp * option.chunks) == 0]
    choices = even or choices  # uneven stages only where no number of stages divides the layers
    fitting = [option for option in choices if peak_bytes(option, numbers) <= numbers.memory_bytes] or choices
    return min(fitting, key=lambda option: float(np.asarray(step_s(option, numbers)))) if fitting else w
