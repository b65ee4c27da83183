"""The fit recovers the constants that generated the data, and its intervals show what the data do not determine."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.convergence.power_law import find_irreducible, fit_power_law

C = np.logspace(12, 15, 6)


def made(E: float, A: float, b: float, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    return (E + A * C**-b) * np.exp(noise * np.random.default_rng(seed).standard_normal(len(C)))


def test_a_pure_power_law_is_found_exactly() -> None:
    law = fit_power_law(C, made(0, 20, 0.09))
    assert law.exponent == pytest.approx(0.09) and law.coefficient == pytest.approx(20)
    assert law.r_squared == pytest.approx(1) and max(map(abs, law.residuals)) < 1e-9
    assert law.predict(1e16) == pytest.approx(20 * 1e16**-0.09)


def test_an_irreducible_term_is_found_and_zero_ruled_out() -> None:
    found = find_irreducible(C, made(0.5, 400, 0.2, noise=1e-4))
    assert found.identified and found.best == pytest.approx(0.5, abs=0.02)
    assert found.interval[0] < 0.5 < found.interval[1]


def test_noise_that_hides_the_term_is_admitted() -> None:
    found = find_irreducible(C, made(0.0, 20, 0.09, noise=0.02))
    assert not found.identified and found.interval[0] == 0


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(300):
        low, high = fit_power_law(
            C,
            made(
                0,
                20,
                0.09,
                noise=0.01,
                seed=seed,
            ),
        ).exponent_interval
        hits += low < 0.09 < high
    assert 270 <= hits <= 297  # 285 expected, sigma 3.8


def test_residuals_are_measured_over_predicted() -> None:
    losses = made(0, 20, 0.09)
    losses[2] *= 1.05
    law = fit_power_law(C, losses)
    assert law.residuals[2] == pytest.approx(losses[2] / law.predict(C[2]) - 1)
    assert int(np.argmax(law.residuals)) == 2


@pytest.mark.parametrize(("compute", "losses"), [([1e12, 1e13], [2.0, 1.0]), ([1e12, 1e13, 1e14], [2.0, 1.0, 0.0])])
def test_points_that_cannot_be_fitted(compute: list[float], losses: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 3"):
        fit_power_law(compute, losses)
