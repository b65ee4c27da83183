"""Fits L(C) = E + A · C^-b, loss against compute, with its uncertainty. Also tests whether the data distinguish E from
0.

Kaplan et al. 2020 (arXiv:2001.08361) fit E = 0 within one family of models. Hoffmann et al. 2022 (arXiv:2203.15556) fit
an irreducible E > 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from frontier_llm.experiments.scaling.harvest import t95

_GRID = 2000  # candidate values of E between 0 and the smallest loss


@dataclass(frozen=True)
class PowerLaw:
    """E + A · C^-b, fitted by least squares on log(L - E) against log C with E fixed."""

    irreducible: float  # E, in the loss's unit
    coefficient: float  # A
    exponent: float  # b
    exponent_interval: tuple[float, float]  # 95 % interval, given E
    r_squared: float  # of log(L - E)
    residuals: tuple[float, ...]  # relative: measured / predicted - 1

    def predict(self, compute_flops: float) -> float:
        """Return the loss at this compute."""
        return float(self.irreducible + self.coefficient * compute_flops**-self.exponent)


@dataclass(frozen=True)
class Irreducible:
    """Estimate of E: the best value, and the interval of values that agree with the measured losses."""

    best: float
    interval: tuple[float, float]  # 95 %, by an F test on the residual sum of squares of log L

    @property
    def identified(self) -> bool:
        """True if the interval excludes 0."""
        return self.interval[0] > 0


def fit_power_law(compute_flops: Sequence[float], losses: Sequence[float], irreducible: float = 0.0) -> PowerLaw:
    """Fit A and b for a given E. Raises ValueError for fewer than 3 points or for losses not above E."""
    C = np.asarray(compute_flops, dtype=float)
    L = np.asarray(losses, dtype=float)
    if len(C) < 3 or len(C) != len(L) or (irreducible >= L).any():
        raise ValueError(
            f"{len(C)} points and {len(L)} losses, smallest {L.min() if len(L) else None}: at least 3, all above "
            f"{irreducible}"
        )
    x = np.log(C)
    y = np.log(L - irreducible)
    slope, level = np.polyfit(x, y, 1)
    errors = y - (level + slope * x)
    dof = len(x) - 2
    spread = np.sqrt(errors @ errors / dof / np.sum((x - x.mean()) ** 2))
    half = t95(dof) * spread
    law = irreducible + np.exp(level + slope * x)
    return PowerLaw(
        irreducible=irreducible,
        coefficient=float(np.exp(level)),
        exponent=float(-slope),
        exponent_interval=(float(-slope - half), float(-slope + half)),
        r_squared=float(1 - errors @ errors / np.sum((y - y.mean()) ** 2)),
        residuals=tuple(map(float, L / law - 1)),
    )


def find_irreducible(compute_flops: Sequence[float], losses: Sequence[float]) -> Irreducible:
    """Estimate E by profiling it over [0, smallest loss). Raises ValueError for fewer than 4 points, because three
    parameters need a degree of freedom.
    """
    if len(losses) < 4:
        raise ValueError("an irreducible term needs at least 4 points")
    candidates = np.linspace(0, min(losses), _GRID, endpoint=False)
    squares = np.array([_squares(fit_power_law(compute_flops, losses, E)) for E in candidates])
    dof = len(losses) - 3
    allowed = candidates[squares <= squares.min() * (1 + t95(dof) ** 2 / dof)]
    return Irreducible(float(candidates[squares.argmin()]), (float(allowed.min()), float(allowed.max())))


def _squares(law: PowerLaw) -> float:
    """Return the residual sum of squares of log L, which is comparable between values of E."""
    return float(np.sum(np.log1p(law.residuals) ** 2))
