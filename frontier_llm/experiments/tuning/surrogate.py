"""What the trials say about the layouts that were not tried: Gaussian processes over log(measured / predicted).

They learn where the planner is wrong, not what a step costs: without a trial they are the planner, and after one the
planner times that trial's error. Coordinates are the layouts' choices and the planner's own shares of the step
(`space.features`). Ten trials cannot say how far, how large and how noisy errors are; the likeliest answer is often
that all of them are noise, which would end the search. So every kernel of a grid gives its belief, and each counts by
how likely it makes the trials (Snoek et al., arXiv:1206.2944, section 3.2, on a grid).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from frontier_llm.errors import FrontierError, not_installed
from frontier_llm.experiments.tuning.space import CHOICES, Space, features

# a layout that failed counts as so much slower, against the planner, than the worst that worked: its like come later
FAILED = math.log(1.5)
UNKNOWN = 0.5  # of log time: how sure the planner is before two trials
# the grid: how large errors are that neighbours share, how fast they grow along a coordinate, how far two runs of one
# layout differ (all of log
# time), and how far neighbours are, in distances that two layouts have on average
SIZES = (0.1, 0.2, 0.4, 0.8)
SLOPES = (0.0, 0.1, 0.3, 0.6)
NOISES = (0.01, 0.03, 0.06)
REACHES = (0.5, 1.0, 2.0, 4.0, 8.0)
UNLIKELY = 1e-3  # kernels that much less likely than the likeliest are left out


@dataclass(frozen=True)
class Belief:
    """Of every layout (n) of a space under every kernel (k): expected log seconds of a step, and how sure; and what
    each kernel counts.
    """

    means_kn: np.ndarray
    deviations_kn: np.ndarray
    weights_k: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Of every layout, under all kernels."""
        return np.asarray(self.weights_k @ self.means_kn)

    def expected_gain(self, best_s: float) -> np.ndarray:
        """Expected improvement over the best measured step, as a share of it."""
        try:
            from scipy.special import ndtr
        except ModuleNotFoundError:
            raise FrontierError(not_installed("scipy", "tune")) from None
        gap = math.log(best_s) - self.means_kn
        z = gap / np.maximum(self.deviations_kn, 1e-9)
        gains = gap * ndtr(z) + self.deviations_kn * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return np.asarray(self.weights_k @ gains)


class Surrogate:
    """Learns from trials of one space."""

    def __init__(self, space: Space) -> None:
        self.predicted = np.log([plan.step_s for plan in space.plans])
        self._table = features(space.plans)
        self._space = space

    def learn(self, log_errors: Mapping[int, float], failed: tuple[int, ...] = ()) -> Belief:
        """What to believe after trials: layout number → log(measured / predicted), and the layouts that failed."""
        if not log_errors:
            return self._planner(0.0)
        worst = max(log_errors.values()) + FAILED
        known = {**log_errors, **dict.fromkeys(failed, worst)}
        rows = list(known)
        errors = np.array(list(known.values()))
        center = float(np.median(errors))
        if len(rows) == 1:
            return self._planner(center)
        likelihoods, means, deviations = zip(*self._processes(rows, errors - center), strict=True)
        weights = np.exp(np.array(likelihoods) - max(likelihoods))
        kept = weights > UNLIKELY
        return Belief(
            self.predicted + center + np.array(means)[kept],
            np.array(deviations)[kept],
            weights[kept] / weights[kept].sum(),
        )

    def _planner(self, error: float) -> Belief:
        return Belief(self.predicted[None] + error, np.full((1, len(self.predicted)), UNKNOWN), np.ones(1))

    def _processes(self, rows: list[int], errors: np.ndarray) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
        """Of each kernel: log likelihood of the errors, and mean and deviation of every layout's."""
        table = self._table / math.sqrt(self._table.shape[1])
        apart = np.sqrt(np.square(table[:, None] - table[rows][None]).sum(axis=-1))
        along = table @ table[rows].T
        along_itself = np.square(table).sum(axis=1)
        for reach in REACHES:
            steps = math.sqrt(5) * apart / reach
            shared = (1 + steps + steps**2 / 3) * np.exp(-steps)  # Matérn 5/2
            for size, slope, noise in product(SIZES, SLOPES, NOISES):
                kernel = size**2 * shared + slope**2 * along
                root = np.linalg.cholesky(kernel[rows] + noise**2 * np.eye(len(rows)))
                whitened = np.linalg.solve(root, errors)
                told = np.linalg.solve(root, kernel.T)
                variance = size**2 + slope**2 * along_itself - np.square(told).sum(axis=0)
                likelihood = -0.5 * float(whitened @ whitened) - float(np.log(np.diag(root)).sum())
                yield likelihood, told.T @ whitened, np.sqrt(np.maximum(variance, 0.0))

    def distances(self, layouts: list[int], others: list[int]) -> np.ndarray:
        """Of each layout, to the nearest of the others, by its coordinates."""
        apart = self._table[layouts][:, None] - self._table[others][None]
        return np.sqrt(np.square(apart).sum(axis=-1)).min(axis=1)

    def importance(self, belief: Belief) -> dict[str, float]:
        """By choice: the share of the variance of the expected log time, over the whole space, that its values alone
        explain.
        """
        whole = float(belief.mean.var())
        shares = {}
        for name in CHOICES:
            values = np.array([str(getattr(plan.layout, name)) for plan in self._space.plans])
            groups = [belief.mean[values == value] for value in np.unique(values)]
            if len(groups) > 1 and whole > 0:
                between = sum(
                    len(group) * (float(group.mean()) - float(belief.mean.mean())) ** 2 for group in groups
                ) / len(values)
                shares[name] = between / whole
        return dict(sorted(shares.items(), key=lambda item: -item[1]))
