"""A series without a machine: every point's throughput is the planner's, and its rows say `simulated`."""

from __future__ import annotations

from collections.abc import Sequence

from frontier_llm.errors import ConfigError
from frontier_llm.scaling.harvest import Row, with_efficiency
from frontier_llm.scaling.predict import predict
from frontier_llm.scaling.series import Point


def simulated_rows(points: Sequence[Point], machine: str) -> list[Row]:
    """One row per node count. Raises ConfigError for a point that would not fit into memory."""
    distinct = {point.nodes: point for point in points}.values()
    predicted = [(point, predict(point.config, point.devices, machine)) for point in distinct]
    if problems := [problem for _, prediction in predicted for problem in prediction.memory_problems()]:
        raise ConfigError(problems)
    rows = []
    for point, prediction in predicted:
        facts = point.describe()
        rows.append(
            Row(
                mode=point.mode,
                model=facts["model"],
                site=point.site,
                kind="simulated",
                status="ok",
                **{name: facts[name] for name in ("nodes", "devices", "tensor", "pipeline", "data", "global_batch")},
                repeats=0,
                steps=0,
                step_time_s=prediction.step_time_s,
                tokens_per_s=prediction.tokens_per_s,
                tokens_per_s_per_device=prediction.tokens_per_s / point.devices,
                ci95_percent=None,
                efficiency=None,
                predicted_tokens_per_s=prediction.tokens_per_s,
                predicted_efficiency=None,
            )
        )
    return with_efficiency(rows)
