"""Predicted cost and results of a scaling series before it runs, from the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from frontier_llm.cluster.sites import format_walltime
from frontier_llm.errors import ConfigError
from frontier_llm.experiments.scaling.harvest import POINT_FACTS, Row, with_efficiency
from frontier_llm.experiments.scaling.series import Point
from frontier_llm.planner.predict import START_S, PointPrediction, predict
from frontier_llm.tables import aligned
from frontier_llm.units import GIB, format_seconds


@dataclass(frozen=True)
class Forecast:
    """Predicted cost and result of one point of a scaling series."""

    point: Point
    minutes: int | None  # walltime of the point's own job; None if all points share a job
    predicted: PointPrediction
    efficiency: float  # tokens/s per device relative to the smallest point

    @property
    def hours(self) -> float:
        """Predicted hours of the point's start and steps."""
        return (START_S + self.point.config.train.steps * self.predicted.step_time_s) / 3600

    @property
    def node_hours(self) -> float:
        """Predicted node-hours."""
        return self.hours * self.point.nodes

    @property
    def limit_s(self) -> float:
        """Time limit in seconds of a point that runs inside an allocation."""
        return self.predicted.job_s(self.point.config.train.steps)

    def describe(self) -> dict[str, Any]:
        """Return the keys that --json adds to the point."""
        return {
            "minutes": self.minutes,
            "predicted_step_s": self.predicted.step_time_s,
            "predicted_tokens_per_s": self.predicted.tokens_per_s,
            "predicted_efficiency": self.efficiency,
            "predicted_node_hours": self.node_hours,
            "peak_gib": self.predicted.peak_bytes / GIB,
            "limit_gib": self.predicted.limit_bytes / GIB,
        }


def forecasts(timed: Sequence[tuple[Point, int | None]]) -> list[Forecast]:
    """Return the forecast of every point. Efficiencies are relative to the smallest point.

    Raises ConfigError with all points that do not fit into memory.
    """
    by_nodes = {point.nodes: predict(point.config, point.devices) for point, _ in timed}
    problems = [
        replace(problem, where=f"{nodes} nodes: {problem.where}")
        for nodes, predicted in by_nodes.items()
        for problem in predicted.memory_problems()
    ]
    if problems:
        raise ConfigError(problems)
    rates = {point.nodes: by_nodes[point.nodes].tokens_per_s / point.devices for point, _ in timed}
    base = rates[min(rates)]
    return [Forecast(point, minutes, by_nodes[point.nodes], rates[point.nodes] / base) for point, minutes in timed]


def simulated_rows(points: Sequence[Point]) -> list[Row]:
    """Return result rows of a series that was not run: the throughputs are the planner's predictions.

    There is one row per node count, with kind "simulated". Raises ConfigError if a point does not fit into memory.
    """
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


def as_text(rows: Sequence[Forecast], jobs: Sequence[str | None]) -> str:
    """Return a table of the points with their predictions and their jobs."""
    head = (
        ">nodes",
        ">devices",
        ">batch",
        ">steps",
        ">repeat",
        ">step",
        ">tokens/s",
        ">efficiency",
        ">GiB",
        ">node-hours",
        ">walltime",
        "job",
    )
    return aligned(head, (_cells(row, job) for row, job in zip(rows, jobs, strict=True)))


def _cells(row: Forecast, job: str | None) -> tuple[object, ...]:
    point = row.point
    predicted = row.predicted
    walltime = format_walltime(row.minutes) if row.minutes else "-"
    return (
        point.nodes,
        point.devices,
        point.config.batch.global_batch,
        point.config.train.steps,
        point.repeat,
        format_seconds(predicted.step_time_s),
        f"{predicted.tokens_per_s:,.0f}",
        f"{row.efficiency:.1%}",
        f"{predicted.peak_bytes / GIB:.1f} of {predicted.limit_bytes / GIB:.0f}",
        f"{row.node_hours:,.1f}",
        walltime,
        job or "-",
    )
