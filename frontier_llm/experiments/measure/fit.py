"""Least-squares fit of a machine's constants (fields of Rates) to measured times.

The commands `calibrate` and `tune` and benchmarks/planner/fit_machines.py use this module.

Each constant is its start value times exp(x). The fit minimises a cost, which is quadratic in the log errors of the
predicted times, and linear beyond a limit, the knee. A weak prior is added to the cost and draws x towards 0. Constants
that the measurements do not determine keep their start values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from frontier_llm.experiments.measure.ceilings import Ceiling, ceilings_of
from frontier_llm.machine.rates import Rates

_PATTERN = tuple(np.array(offsets) for offsets in product((0.0, -0.5, 0.5, -1.0, 1.0), repeat=2))


@dataclass(frozen=True)
class Measurements:
    """Measured times, and the constants that a fit may change.

    `constants` are fields of Rates. "fabric_bytes_s" scales the bandwidths of all group sizes, "fabric_bytes_s/N" that
    of groups of N devices. `predicted_s` returns one time per entry of `measured_s`.
    """

    start: Rates
    constants: Sequence[str]
    predicted_s: Callable[[Rates], np.ndarray]
    measured_s: np.ndarray
    # weight in the fit of the square of a constant's logarithmic change, relative to the squared log error of one time
    prior: float
    # absolute log error of a time beyond which its cost in the fit grows linearly instead of quadratically
    knee: float
    ceilings: Mapping[str, Ceiling] = field(default_factory=lambda: ceilings_of(None))

    def rates(self, x: np.ndarray) -> Rates:
        """Return the constants at a point of the fit."""
        return scaled(self.start, self.constants, x, self.ceilings)

    def log_errors(self, x: np.ndarray) -> np.ndarray:
        """Return log(predicted / measured) of each time."""
        return np.log(self.predicted_s(self.rates(x)) / self.measured_s)


def scaled(start: Rates, constants: Sequence[str], x: np.ndarray, ceilings: Mapping[str, Ceiling]) -> Rates:
    """Return `start` with each constant multiplied by exp(x) with its entry of `x`, but at most its ceiling."""
    changes: dict[str, Any] = {}
    for constant, shift in zip(constants, x, strict=True):
        name, _, devices = constant.partition("/")
        value = changes.get(name, getattr(start, name))
        factor = math.exp(shift)
        ceiling = ceilings[name].value if name in ceilings else math.inf
        if isinstance(value, tuple):
            sizes = start.fabric_size if not devices else (int(devices),)
            value = tuple(
                min(one * factor, ceiling) if size in sizes else one
                for size, one in zip(start.fabric_size, value, strict=True)
            )
        else:
            value = min(value * factor, ceiling)
        changes[name] = value
    return replace(start, **changes)


def soften(errors: np.ndarray, knee: float) -> np.ndarray:
    """Return residuals whose squares are Huber's loss of the errors: quadratic below the knee, linear beyond."""
    size = np.abs(errors)
    return np.sign(errors) * np.where(size < knee, size, np.sqrt(np.maximum(2 * knee * size - knee**2, 0.0)))


def fit(
    measurements: Measurements,
    *,
    evaluations: int,
    smooth: bool = False,
    scale: float = 1.0,
) -> Rates:
    """Return `start` with the constants that fit the measurements best. Needs scipy.

    `evaluations` bounds the number of evaluations. If `smooth`, the cost changes smoothly at the knee (soft_l1), and
    the prior is softened too. `scale` is the expected size of x.
    """
    from scipy.optimize import least_squares

    def residuals(x: np.ndarray) -> np.ndarray:
        errors = measurements.log_errors(x)
        if not smooth:
            errors = soften(errors, measurements.knee)
        return np.concatenate([errors, math.sqrt(measurements.prior) * x])

    best = least_squares(
        residuals,
        np.zeros(len(measurements.constants)),
        diff_step=1e-3,
        loss="soft_l1" if smooth else "linear",
        f_scale=measurements.knee if smooth else 1.0,
        x_scale=scale,
        max_nfev=evaluations,
    )
    return measurements.rates(best.x)


def fit_two(measurements: Measurements) -> Rates:
    """Fit two constants as `fit` does, to a relative precision of 1/1000, with numpy alone.

    A pattern search: a grid of 25 points moves to its best point. If the best point is its centre, the grid's width is
    halved.
    """

    def loss(x: np.ndarray) -> float:
        errors = soften(measurements.log_errors(x), measurements.knee)
        return float(np.sum(errors**2) + measurements.prior * np.sum(x**2))

    best = np.zeros(2)
    width = 0.5
    while width > 1e-3:
        step = min(_PATTERN, key=lambda offset: loss(best + width * offset))
        best = best + width * step
        width = width if step.any() else width / 2
    return measurements.rates(best)
