"""Which rank is slow? Each step every rank tells how long it computed; the ones that keep exceeding their like are named.

A rank that waits for a slow one loses as much time as the slow one itself, so step times say nothing. What differs is *busy*
time: the step less what the ledger says was blocked. Ranks are compared with those of the same pipeline stage (stages differ by
design) and, because a layout may have no such peers, with their own past.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch

from frontier_llm.comm.axis import Mesh
from frontier_llm.comm.collectives import all_gather
from frontier_llm.comm.values import all_gather_json
from frontier_llm.topology import Grid

WINDOW_STEPS = 12  # a rank is named when it lagged in LATE_STEPS of the last so many
LATE_STEPS = 9
BASELINE_STEPS = 64  # own past
MIN_PEERS = 4  # ranks of a stage that are enough to compare them with each other
MIN_SHARE = 0.10  # of the usual busy time: less is not worth an operator's attention
SPREADS = 6.0  # times the usual spread of busy times (median absolute deviation)


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than it should be."""

    global_rank: int
    excess_s: float  # median over the window, per step
    usual_s: float
    host: str = ""

    def __str__(self) -> str:
        slower = f"{self.excess_s * 1e3:.0f} ms longer per step than the usual {self.usual_s * 1e3:.0f} ms ({self.slowdown:.1f} times)"
        return f"global rank {self.global_rank}{f' on {self.host}' if self.host else ''} computes {slower}"

    @property
    def slowdown(self) -> float:
        """Its busy time over the usual one."""
        return 1 + self.excess_s / self.usual_s


def _spread(values: list[float], center: float) -> float:
    return median(abs(value - center) for value in values)


class StragglerDetector:
    """Fed once per step with the busy seconds of all ranks; the same on every rank, so any of them may report."""

    def __init__(self, stages: list[int]) -> None:
        """`stages[global_rank]` is its pipeline rank."""
        by_stage: dict[int, list[int]] = {}
        for rank, stage in enumerate(stages):
            by_stage.setdefault(stage, []).append(rank)
        self._crowds = [members for members in by_stage.values() if len(members) >= MIN_PEERS]
        few = [rank for members in by_stage.values() if len(members) < MIN_PEERS for rank in members]
        self._past: dict[int, deque[float]] = {rank: deque(maxlen=BASELINE_STEPS) for rank in few}
        self._late: list[deque[float]] = [deque(maxlen=WINDOW_STEPS) for _ in stages]  # excess of late steps, else 0
        self._named: set[int] = set()

    def step(self, busy_s: list[float]) -> list[Straggler]:
        """Ranks that have become stragglers with this step; one that recovers may be named again later."""
        found = []
        for rank, (usual, spread) in self._usual(busy_s).items():
            excess = busy_s[rank] - usual
            late = excess > max(SPREADS * spread, MIN_SHARE * usual)
            self._late[rank].append(excess if late else 0.0)
            lags = [lag for lag in self._late[rank] if lag]
            if len(lags) < LATE_STEPS // 2:
                self._named.discard(rank)
            elif len(lags) >= LATE_STEPS and rank not in self._named:
                self._named.add(rank)
                found.append(Straggler(rank, median(lags), usual))
        return found

    def _usual(self, busy_s: list[float]) -> dict[int, tuple[float, float]]:
        """(expected busy seconds, spread) by rank: of its stage where that has ranks enough, else from its own past."""
        usual = {}
        for members in self._crowds:
            values = [busy_s[rank] for rank in members]
            center = median(values)
            usual.update(dict.fromkeys(members, (center, max(_spread(values, center), 0.01 * center))))
        pace = self._pace(busy_s)
        for rank, past in self._past.items():
            if len(past) < WINDOW_STEPS:
                usual[rank] = busy_s[rank], 0.0  # nothing to compare with yet
            else:
                center = median(past)
                usual[rank] = center * pace, max(_spread(list(past), center), 0.01 * center) * pace
            if busy_s[rank] <= usual[rank][0] * (1 + MIN_SHARE):
                past.append(busy_s[rank] / pace)  # a straggler must not become the measure of itself
        return usual

    def _pace(self, busy_s: list[float]) -> float:
        """How this step compares with past ones on most ranks: a long batch or a busy machine makes no rank a straggler."""
        if any(len(past) < WINDOW_STEPS for past in self._past.values()) or not self._past:
            return 1.0
        ratios = sorted(busy_s[rank] / median(past) for rank, past in self._past.items())
        return ratios[(len(ratios) - 1) // 2]


class StragglerWatch:
    """The detector of a mesh: one all-gather of 8 bytes per rank and step. On a single rank there is no one to compare with.

    On a GPU the host's blocked time is that of queueing, not of waiting: there it sees slow hosts, not slow devices.
    """

    def __init__(self, mesh: Mesh, grid: Grid, device: torch.device, host: str) -> None:
        self._mesh, self._device, self._host = mesh, device, host
        self._detector = StragglerDetector([grid.coordinates(rank)["pp"] for rank in range(grid.world_size)])

    @contextmanager
    def step(self) -> Iterator[list[Straggler]]:
        """Around a training step; the list is filled at its end. Collective over the world."""
        found: list[Straggler] = []
        blocked_s, begin_s = self._blocked_s(), time.perf_counter()
        yield found
        busy_s = time.perf_counter() - begin_s - (self._blocked_s() - blocked_s)
        if self._mesh.world.size > 1:
            mine = torch.tensor([busy_s], dtype=torch.float64, device=self._device)
            named = self._detector.step(all_gather(mine, self._mesh.world).tolist())
            if named:  # on all ranks or on none
                hosts = all_gather_json(self._host, self._mesh.world, self._device)
                found += [replace(straggler, host=hosts[straggler.global_rank]) for straggler in named]

    def _blocked_s(self) -> float:
        return sum(self._mesh.ledger.blocked_s.values())
