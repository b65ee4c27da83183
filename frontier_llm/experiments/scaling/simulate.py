"""A series without a machine: every point's throughput is the planner's, and its rows say `simulated`."""

from __future__ import annotations

from collections.abc import Sequence

from frontier_llm.experiments.scaling.forecast import forecasts
from frontier_llm.experiments.scaling.harvest import POINT_FACTS, Row, with_efficiency
from frontier_llm.experiments.scaling.series import Point


def simulated_rows(points: Sequence[Point]) -> list[Row]:
    """One row per node count. Raises ConfigError for a point that would not fit into memory."""
    distinct = {point.nodes: point for point in points}.values()
    rows = []
    for priced in forecasts([(point, None) for point in distinct]):
        prediction = priced.predicted
        facts = priced.point.describe()
        rows.append(
            Row(
                **{name: facts[name] for name in POINT_FACTS},
                kind="simulated",
                status="ok",
                repeats=0,
                steps=0,
                step_time_s=prediction.step_time_s,
                tokens_per_s=prediction.tokens_per_s,
                tokens_per_s_per_device=prediction.tokens_per_s / facts["devices"],
                predicted_tokens_per_s=prediction.tokens_per_s,
            )
        )
    return with_efficiency(rows)
