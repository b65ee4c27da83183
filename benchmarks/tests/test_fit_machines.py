"""The fit of other people's clusters finds the constants that made the data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner.fit_machines import fit, soften, starting_point
from frontier_llm.planner.published.datasets import shipped
from frontier_llm.planner.published.predict import cluster_rates, predict


def test_the_fit_recovers_constants_that_made_the_data() -> None:
    rows = [row for row in shipped() if row.dataset == "Megatron SC'21 table 1"]
    keys = ("gemm_efficiency", "fabric_latency_s")
    start = starting_point("selene", cluster_rates("selene", "megatron-lm"), keys)
    truth = replace(start, gemm_efficiency=0.6, fabric_latency_s=60e-6)
    made = [replace(row, seconds=one.seconds) for row, one in zip(rows, predict(rows, truth), strict=True)]
    best = fit(made, start, keys)
    assert best.gemm_efficiency == pytest.approx(0.6, rel=0.01)
    assert max(abs(one.error) for one in predict(made, best)) < 0.01


def test_stalled_runs_count_by_their_size_and_not_by_its_square() -> None:
    assert soften(np.array([0.01])) == pytest.approx([0.01])
    assert float(soften(np.array([1.0]))[0]) < 0.3
