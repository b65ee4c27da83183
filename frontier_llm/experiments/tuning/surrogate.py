"""Predicts step times of untried layouts with a Gaussian process that is fitted to log(measured / predicted).

The process learns the planner's error, not the step time. Without trials, the result for a layout is the planner's
prediction. After one trial, the result is about the planner's prediction times this trial's ratio measured / predicted.
Coordinates are the layouts' choices and the planner's parts of the step (`space.features`). The kernel is fixed,
because ten trials do not determine its parameters. docs/benchmarks/tuning.md compares kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from frontier_llm.experiments.tuning.space import CHOICES, Space, features

# a failed layout counts as if its measured / predicted were 1.5 times the worst measured ratio, so that the search
# tries similar layouts later
FAILED = math.log(1.5)
# parameters of the kernel, in log seconds: SIZE is the standard deviation of errors that similar layouts share, NOISE
# that of repeated runs of one layout
SIZE = 0.5
NOISE = 0.03
REACH = 2.0  # length scale of the kernel, in mean distances between two layouts


@dataclass(frozen=True)
class Belief:
    """Expected logarithm of the step time in seconds for each of n layouts, and its standard deviation."""

    mean: np.ndarray
    deviation: np.ndarray

    def expected_gain(self, best_s: float) -> np.ndarray:
        """Return the expected improvement over the best measured step, as a share of that step."""
        from scipy.special import ndtr  # imported here, because an exhaustive search runs without scipy

        gap = math.log(best_s) - self.mean
        z = gap / np.maximum(self.deviation, 1e-9)
        density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return np.asarray(gap * ndtr(z) + self.deviation * density)


class Surrogate:
    """Gaussian process over the layouts of one space."""

    def __init__(self, space: Space) -> None:
        self.predicted = np.log([plan.step_s for plan in space.plans])
        self._table = features(space.plans)
        self._space = space

    def learn(self, log_errors: Mapping[int, float], failed: tuple[int, ...] = ()) -> Belief:
        """Return the expected step times after trials.

        `log_errors` maps a layout's number to log(measured / predicted). `failed` lists the layouts that failed.
        """
        if not log_errors:
            return self._planner(0.0)
        worst = max(log_errors.values()) + FAILED
        known = {**log_errors, **dict.fromkeys(failed, worst)}
        tried = list(known)
        errors = np.array(list(known.values()))
        center = float(np.median(errors))
        if len(tried) == 1:
            return self._planner(center)
        shared = self._kernel(tried)
        root = np.linalg.cholesky(shared[tried] + NOISE**2 * np.eye(len(tried)))
        whitened = np.linalg.solve(root, errors - center)
        told = np.linalg.solve(root, shared.T)
        variance = SIZE**2 - np.square(told).sum(axis=0)
        return Belief(self.predicted + center + told.T @ whitened, np.sqrt(np.maximum(variance, 0.0)))

    def _planner(self, error: float) -> Belief:
        return Belief(self.predicted + error, np.full(len(self.predicted), SIZE))

    def _kernel(self, tried: list[int]) -> np.ndarray:
        """Return the Matérn 5/2 kernel between every layout and the tried layouts."""
        table = self._table / math.sqrt(self._table.shape[1])
        apart = np.sqrt(np.square(table[:, None] - table[tried][None]).sum(axis=-1))
        steps = math.sqrt(5) * apart / REACH
        return np.asarray(SIZE**2 * (1 + steps + steps**2 / 3) * np.exp(-steps))

    def distances(self, layouts: list[int], others: list[int]) -> np.ndarray:
        """Return the distance of each layout to the nearest of `others`."""
        apart = self._table[layouts][:, None] - self._table[others][None]
        return np.sqrt(np.square(apart).sum(axis=-1)).min(axis=1)

    def importance(self, belief: Belief) -> dict[str, float]:
        """Return the importance of each layout field (such as tp or schedule), largest first.

        The importance of a field is the fraction of the variance of the expected log times that this field alone
        explains.
        """
        mean = float(belief.mean.mean())
        whole = float(belief.mean.var())
        shares = {}
        for name in CHOICES:
            values = np.array([str(getattr(plan.layout, name)) for plan in self._space.plans])
            groups = [belief.mean[values == value] for value in np.unique(values)]
            if len(groups) > 1 and whole > 0:
                between = sum(len(group) * (float(group.mean()) - mean) ** 2 for group in groups)
                shares[name] = between / len(values) / whole
        return dict(sorted(shares.items(), key=lambda item: -item[1]))
