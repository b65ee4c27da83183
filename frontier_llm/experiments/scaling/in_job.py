"""Runs a complete scaling series inside one Slurm allocation.

The smallest point, to which efficiencies are relative, runs first and alone. The other points run one after another on
more and more nodes, or side by side on disjoint sets of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from frontier_llm import log
from frontier_llm.errors import FrontierError
from frontier_llm.experiments.scaling.forecast import Forecast
from frontier_llm.experiments.scaling.launch import AllocationRanks, RunEnd, ShortRun, judge
from frontier_llm.experiments.scaling.series import announce
from frontier_llm.units import plural

MOST_STARTS = 3  # highest number of starts of a point if its nodes fail


def waves(points: Sequence[Forecast], nodes: int, *, side_by_side: bool) -> list[list[Forecast]]:
    """Return the order of the points as groups. The points of a group run at the same time.

    The first run of the smallest point is alone, because every efficiency is relative to it.
    """
    if not side_by_side:
        return [[point] for point in points]
    rows: list[list[Forecast]] = [[point] for point in points[:1]]
    for point in points[1:]:
        wave = next(
            (wave for wave in rows[1:] if sum(one.point.nodes for one in wave) + point.point.nodes <= nodes),
            None,
        )
        if wave is None:
            rows.append([point])
        else:
            wave.append(point)
    return rows


def run_series(
    points: Sequence[Forecast],
    launcher: AllocationRanks,
    words_of: Callable[[Forecast], tuple[str, ...]],
    *,
    side_by_side: bool = False,
) -> None:
    """Run every point. If a point cannot run, its point.json remains and the series continues."""
    for row in points:
        announce(row.point)
    for wave in waves(points, launcher.nodes, side_by_side=side_by_side):
        if (left_s := launcher.time_left_s()) < min(row.limit_s for row in wave):
            log.warn(
                f"only {left_s:.0f} s of walltime are left; "
                f"not run: {', '.join(row.point.directory.name for row in wave)}"
            )
            continue
        limits_s = [min(row.limit_s, left_s) for row in wave]
        with ThreadPoolExecutor(len(wave)) as pool:
            list(pool.map(lambda row, limit_s: _run(row, launcher, words_of(row), limit_s), wave, limits_s))


def _run(row: Forecast, launcher: AllocationRanks, words: tuple[str, ...], limit_s: float) -> None:
    """Run one point, and repeat it if its nodes failed."""
    name = row.point.directory.name
    run = ShortRun(words)
    for start in range(1, MOST_STARTS + 1):
        try:
            with launcher.borrow(row.point.nodes) as nodes:
                log.info(f"{name}: start {start} on {plural(len(nodes), 'node')}, at most {limit_s:.0f} s")
                end: RunEnd = launcher.start_on(nodes, run, limit_s)
        except FrontierError as error:
            log.warn(f"{name}: {error}")
            return
        status, detail = judge(run.directory, end)
        log.info(f"{name}: {status} {detail[:120]}".rstrip())
        if status != "node failure":
            return
