"""Number of steps and walltime of each point of a series, from its simulated step time and the site's limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from frontier_llm.cluster.sites import Site, format_walltime, longer_jobs
from frontier_llm.errors import ConfigError, Problem
from frontier_llm.experiments.scaling.harvest import WARMUP_STEPS
from frontier_llm.experiments.scaling.series import Point
from frontier_llm.planner.predict import PointPrediction, predict, walltime_minutes
from frontier_llm.units import format_seconds

MOST_STEPS = 20  # default limit of a point's steps
FEWEST_STEPS = WARMUP_STEPS + 5  # minimum for any point: with fewer measured steps the efficiency is not reliable


def with_walltime(
    points: Sequence[Point],
    site: Site,
    partition: str | None = None,
    minutes: int | None = None,
    steps: int | None = None,
) -> list[tuple[Point, int | None]]:
    """Return every point with its number of steps and its minutes of walltime (None: the site has no limit).

    `minutes` and `steps` are the user's values. Without `steps`, a point runs the steps that fit, at most MOST_STEPS.
    Raises ConfigError if `steps` is less than FEWEST_STEPS. Raises ConfigError with each point that does not fit and
    the number of steps that would fit.
    """
    refuse_few(steps)
    timed: list[tuple[Point, int | None]] = []
    problems: dict[int, Problem] = {}
    for point in points:
        limit = minutes or site.max_minutes(point.nodes, partition)
        if limit is None:
            timed.append((_with_steps(point, steps or MOST_STEPS), None))
            continue
        predicted = predict(point.config, point.devices)
        room = predicted.steps_within(60 * limit)
        wanted = steps or min(room, MOST_STEPS)
        if wanted > room or wanted < FEWEST_STEPS:
            problems[point.nodes] = _problem(
                point, site, partition, predicted=predicted, limit=limit, wanted=wanted, room=room
            )
        needed = walltime_minutes(predicted.job_s(wanted))
        timed.append((_with_steps(point, max(wanted, 1)), minutes or min(limit, needed)))
    if problems:
        raise ConfigError(problems.values())
    return timed


def refuse_few(steps: int | None) -> None:
    """Raise ConfigError if `steps` is too small for a reliable measurement."""
    if steps is not None and steps < FEWEST_STEPS:
        what = f"{steps} steps leave {max(0, steps - WARMUP_STEPS)} to measure: the first {WARMUP_STEPS} are warm-up"
        raise ConfigError(what, f"set train.steps={FEWEST_STEPS} or more", "train.steps")


def steps_of(point: Point, steps: int | None) -> Point:
    """Return the point with the user's number of steps, or with FEWEST_STEPS.

    Inside one allocation every node waits for the largest point, so the default is small.
    """
    refuse_few(steps)
    return _with_steps(point, steps or FEWEST_STEPS)


def _with_steps(point: Point, steps: int) -> Point:
    config = point.config
    return replace(point, config=config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})}))


def _problem(
    point: Point,
    site: Site,
    partition: str | None,
    predicted: PointPrediction,
    limit: int,
    wanted: int,
    room: int,
) -> Problem:
    """Return the problem of a point that does not fit into its walltime, with a fix that fits."""
    if room >= FEWEST_STEPS:
        fix = f"set train.steps={room}"
    else:
        enough = math.ceil(predicted.job_s(FEWEST_STEPS) / 60)
        smaller = f"omit the point with {point.nodes} nodes, or use a smaller batch"
        fix = "; or ".join([smaller, *longer_jobs(site, point.nodes, enough, partition)])
    step = format_seconds(predicted.step_time_s)
    return Problem(
        f"{point.nodes} nodes",
        f"a step of {point.config.batch.global_batch} samples takes about {step} (simulated); "
        f"{max(wanted, FEWEST_STEPS)} of them do not fit into {format_walltime(limit)}",
        fix,
    )
