"""Collects the results of scaling series in one table: a row per series and node count, including failed points.

The results are read from run directories. Repeats of a point are combined to a mean with a confidence interval.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from frontier_llm.config import RunConfig, build
from frontier_llm.errors import DataError, FrontierError
from frontier_llm.experiments.scaling.series import POINT_FILE
from frontier_llm.planner.predict import predict
from frontier_llm.run import run_dir
from frontier_llm.tables import aligned
from frontier_llm.units import strict_json

# fields of a row that are copied from its point
POINT_FACTS = ("mode", "model", "site", "nodes", "devices", "tensor", "pipeline", "data", "global_batch")
WARMUP_STEPS = 3  # the first steps include the setup of allocators, caches and connections

# Two-sided 95 % quantiles of Student's t for 1, 2, 3 … degrees of freedom. The last entry is the quantile of the normal
# distribution. The square of an entry is the 95 % quantile of F(1, dof).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 1.96,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Result of a series at one number of nodes, as a mean over repeats."""

    mode: str
    model: str
    site: str
    kind: str  # measured | simulated
    status: str  # ok | incomplete: … | failed: …
    nodes: int
    devices: int
    tensor: int
    pipeline: int
    data: int
    global_batch: int
    repeats: int  # repeats with a measurement
    steps: int  # measured steps over all repeats
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    ci95_percent: float | None = None  # half width over repeats, relative to tokens_per_s; None with a single repeat
    efficiency: float | None = None  # tokens/s per device, relative to the series' smallest measured point
    predicted_tokens_per_s: float | None = None
    predicted_efficiency: float | None = None


@dataclass(frozen=True)
class Sample:
    """Result of one repeat of one point."""

    point: dict[str, Any]
    status: str
    times_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second from the median step after warm-up, so that a slow step (a save) has no effect."""
        if not self.times_s:
            return None
        return float(self.point["global_batch"] * self.point["sequence_length"] / statistics.median(self.times_s))


def read_sample(directory: Path) -> Sample:
    """Return the result in the run directory of one repeat, whether it succeeded, failed or is incomplete.

    Raises DataError if point.json is damaged.
    """
    try:
        point = json.loads((directory / POINT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", "run the point again", str(directory / POINT_FILE)) from error
    rows = run_dir.steps(directory)
    if len(rows) >= point["steps"]:
        return Sample(point, "ok", tuple(step_times_s(directory)))
    last = run_dir.last_attempt(directory)
    if last and last.failed:
        return Sample(point, f"failed: {last.detail or last.cause}", ())
    return Sample(point, f"incomplete: {len(rows)} of {point['steps']} steps", ())


def is_measured(directory: Path) -> bool:
    """Return whether one repeat has finished the steps in its point.json. False if no point.json can be read."""
    try:
        sample = read_sample(directory)
    except DataError:
        return False
    return sample.status == "ok" or run_dir.end(directory, sample.point["steps"], save_final=False) == "finished"


def step_times_s(directory: Path) -> list[float]:
    """Return the step times in seconds after warm-up, or only the last step time if the run has no more steps than the
    warm-up.
    """
    times = [float(row["step_time_s"]) for row in run_dir.steps(directory) if "step_time_s" in row]
    return times[min(WARMUP_STEPS, max(0, len(times) - 1)) :]


def harvest(root: Path) -> list[Row]:
    """Return the rows of all points below `root`. Raises DataError if there are none."""
    samples = [read_sample(path.parent) for path in sorted(root.glob(f"**/{POINT_FILE}"))]
    if not samples:
        raise DataError(
            "contains no runs of a scaling series",
            "run a series with: frontier-llm scaling weak|strong … --output DIR",
            str(root.absolute()),
        )
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    for sample in samples:
        point = sample.point
        groups.setdefault(
            (point["mode"], point["model"], point["site"], point["nodes"], point["global_batch"]), []
        ).append(sample)
    return with_efficiency([summarise(groups[key]) for key in sorted(groups)])


def summarise(samples: Sequence[Sample]) -> Row:
    """Combine the repeats of one point to a row. The status reports a failed repeat even if others succeeded."""
    point = samples[0].point
    rates = [rate for sample in samples if (rate := sample.tokens_per_s) is not None]
    mean = statistics.fmean(rates) if rates else None
    failures = [sample.status for sample in samples if sample.status != "ok"]
    status = failures[0] if failures else "ok"
    if failures and len(samples) > 1:
        status += f" ({len(failures)} of {len(samples)} repeats)"
    config = build(RunConfig, point["config"])
    try:
        predicted: float | None = predict(config, point["devices"]).tokens_per_s
    except FrontierError:  # raised if no machine file describes this site; the row then has no prediction
        predicted = None
    return Row(
        **{name: point[name] for name in POINT_FACTS},
        kind="measured",
        status=status,
        repeats=len(rates),
        steps=sum(len(sample.times_s) for sample in samples),
        step_time_s=point["global_batch"] * point["sequence_length"] / mean if mean else None,
        tokens_per_s=mean,
        tokens_per_s_per_device=mean / point["devices"] if mean else None,
        ci95_percent=100 * half_width(rates) / mean if mean and len(rates) > 1 else None,
        predicted_tokens_per_s=predicted,
    )


def t95(degrees_of_freedom: int) -> float:
    """Return the half width of a two-sided 95 % interval in standard errors (Student's t)."""
    return _T95[min(degrees_of_freedom, len(_T95)) - 1]


def half_width(values: Sequence[float]) -> float:
    """Return the half width of the 95 % confidence interval of the mean of two or more values (Student's t)."""
    return t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with efficiencies: rate per device, relative to the series' smallest point that has a rate."""

    def relative(row: Row, rate: Callable[[Row], float | None]) -> float | None:
        peers = (
            peer
            for peer in rows
            if (peer.mode, peer.model, peer.site, peer.kind) == (row.mode, row.model, row.site, row.kind)
        )
        base = next((value for peer in sorted(peers, key=lambda peer: peer.devices) if (value := rate(peer))), None)
        own = rate(row)
        return own / base if own and base else None

    def predicted(row: Row) -> float | None:
        return row.predicted_tokens_per_s and row.predicted_tokens_per_s / row.devices

    return [
        replace(
            row,
            efficiency=relative(row, lambda row: row.tokens_per_s_per_device),
            predicted_efficiency=relative(row, predicted),
        )
        for row in rows
    ]


def by_series(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return the rows by (mode, model)."""
    series: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        series.setdefault((row.mode, row.model), []).append(row)
    return series


def as_csv(rows: Sequence[Row]) -> str:
    """Return the table as CSV with one header line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def as_json(rows: Sequence[Row]) -> str:
    """Return the table as a JSON array."""
    return strict_json([asdict(row) for row in rows]) + "\n"


def as_text(rows: Sequence[Row]) -> str:
    """Return the table for a terminal."""
    head = ("series", ">nodes", ">devices", ">batch", ">tokens/s", ">±95%", ">efficiency", ">predicted", "status")
    return aligned(head, map(_cells, rows))


def _cells(row: Row) -> tuple[object, ...]:
    name = f"{row.mode} {row.model}" + (" SIMULATED" if row.kind == "simulated" else "")
    return (
        name,
        row.nodes,
        row.devices,
        row.global_batch,
        f"{row.tokens_per_s:,.0f}" if row.tokens_per_s else "-",
        _known(row.ci95_percent, ".1f"),
        _known(row.efficiency, ".1%"),
        _known(row.predicted_efficiency, ".1%"),
        row.status,
    )


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
