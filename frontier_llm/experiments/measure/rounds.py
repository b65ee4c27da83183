"""Calibration within a budget of seconds: all measurements are repeated in rounds until the budget is used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from frontier_llm import log
from frontier_llm.comm import Mesh, all_reduce_
from frontier_llm.config import RunConfig
from frontier_llm.experiments.measure.calibration import Samples
from frontier_llm.experiments.measure.samples import measure
from frontier_llm.units import plural


def measure_within(
    budget_s: float,
    most_rounds: int,
    *,
    config: RunConfig,
    mesh: Mesh,
    device: torch.device,
    memory_bytes: float,
) -> Samples:
    """Return the medians over up to `most_rounds` rounds, each with one reading per sample. Collective over the world.

    A round begins only if the remaining budget is at least the time of the longest round so far. The first round always
    runs.
    """
    begin_s = time.perf_counter()
    rounds: list[Samples] = []
    elapsed_s = 0.0
    longest_s = 0.0
    while not rounds or (len(rounds) < most_rounds and elapsed_s + longest_s <= budget_s):
        rounds.append(measure(config, mesh, device, memory_bytes, repeats=1))
        before_s = elapsed_s
        elapsed_s = _agreed_max(time.perf_counter() - begin_s, mesh, device)
        longest_s = max(longest_s, elapsed_s - before_s)
    if mesh.world.rank == 0:
        log.info(f"{plural(len(rounds), 'round')} of measurements in {elapsed_s:.0f} s (budget {budget_s:g} s)")
    return median_samples(rounds)


def _agreed_max(value: float, mesh: Mesh, device: torch.device) -> float:
    """Return the maximum over all ranks, so that all ranks run the same number of rounds."""
    if mesh.world.size == 1:
        return value
    return float(all_reduce_(torch.tensor([value], dtype=torch.float64, device=device), mesh.world, "max"))


def median_samples(rounds: Sequence[Samples]) -> Samples:
    """Return the median over rounds of each time. The rounds have the same measurements in the same order.

    The shares of contention are those of the first round, because each round chooses its own number of repetitions.
    """
    merged = {one.name: _median([getattr(samples, one.name) for samples in rounds]) for one in fields(Samples)}
    return replace(Samples(**merged), contention=rounds[0].contention)


def _median(values: Sequence[Any]) -> Any:
    """Return the median of numbers, element by element in lists and tuples. Equal values, such as names, are kept."""
    if all(value == values[0] for value in values):
        return values[0]
    if isinstance(values[0], float):
        return float(np.median(values))
    return type(values[0])(_median(elements) for elements in zip(*values, strict=True))
