"""What the trials say about the layouts that were not tried: a Gaussian process over log(measured / predicted).

It learns where the planner is wrong, not what a step costs: without a trial it is the planner, and after one the planner times that trial's
error. scikit-learn's, with the layouts' choices and the planner's own shares of the step as coordinates (`space.features`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from frontier_llm.errors import FrontierError, not_installed
from frontier_llm.tuning.space import CHOICES, Space, features

# a layout that failed counts as so much slower, against the planner, than the worst that worked: its like come later
FAILED = math.log(1.5)
NOISE = 0.02  # of log time: two runs of one layout, as a start for the fit


@dataclass(frozen=True)
class Belief:
    """Of every layout of a space: expected log seconds of a step, and how sure."""

    mean: np.ndarray
    deviation: np.ndarray

    def expected_gain(self, best_s: float) -> np.ndarray:
        """Expected improvement over the best measured step, as a share of it."""
        gap = math.log(best_s) - self.mean
        z = gap / np.maximum(self.deviation, 1e-9)
        below = 0.5 * (1 + np.array([math.erf(one / math.sqrt(2)) for one in z]))
        return gap * below + self.deviation * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)


class Surrogate:
    """Learns from trials of one space."""

    def __init__(self, space: Space) -> None:
        self.predicted = np.log([plan.step_s for plan in space.plans])
        self._table = features(space.plans)
        self._space = space

    def learn(self, log_errors: Mapping[int, float], failed: tuple[int, ...] = ()) -> Belief:
        """What to believe after trials: layout number → log(measured / predicted), and the layouts that failed."""
        if not log_errors:
            return Belief(self.predicted, np.full(len(self.predicted), 0.5))
        worst = max(log_errors.values()) + FAILED
        known = {**log_errors, **dict.fromkeys(failed, worst)}
        rows, errors = list(known), np.array(list(known.values()))
        if len(rows) == 1:
            return Belief(self.predicted + errors[0], np.full(len(self.predicted), 0.5))
        process = _process(self._table.shape[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a constant that ends at its bound, with few trials
            process.fit(self._table[rows], errors - np.median(errors))
            mean, deviation = process.predict(self._table, return_std=True)
        return Belief(self.predicted + np.median(errors) + mean, deviation)

    def distances(self, layouts: list[int], others: list[int]) -> np.ndarray:
        """Of each layout, to the nearest of the others, by its coordinates."""
        apart = self._table[layouts][:, None] - self._table[others][None]
        return np.sqrt(np.square(apart).sum(axis=-1)).min(axis=1)

    def importance(self, belief: Belief) -> dict[str, float]:
        """By choice: the share of the variance of the expected log time, over the whole space, that its values alone explain."""
        whole = float(belief.mean.var())
        shares = {}
        for name in CHOICES:
            values = np.array([str(getattr(plan.layout, name)) for plan in self._space.plans])
            groups = [belief.mean[values == value] for value in np.unique(values)]
            if len(groups) > 1 and whole > 0:
                between = sum(len(group) * (float(group.mean()) - float(belief.mean.mean())) ** 2 for group in groups) / len(values)
                shares[name] = between / whole
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _process(dimensions: int):  # type: ignore[no-untyped-def]
    """An untrained process; one length for all coordinates, because a handful of trials cannot tell a dozen lengths apart."""
    try:
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern, WhiteKernel
    except ModuleNotFoundError:
        raise FrontierError(not_installed("scikit-learn", "tune")) from None
    scale = math.sqrt(dimensions)
    kernel = (
        ConstantKernel(0.05, (1e-4, 10)) * Matern(scale, (0.3 * scale, 30 * scale), nu=2.5)
        + ConstantKernel(0.01, (1e-5, 1)) * DotProduct(0, "fixed")
        + WhiteKernel(NOISE**2, (1e-5, 1e-1))
    )
    return GaussianProcessRegressor(kernel, n_restarts_optimizer=1, random_state=0)
