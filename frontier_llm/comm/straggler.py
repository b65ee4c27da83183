"""Which rank is slow? Each step every rank tells how long it computed; the ones that keep exceeding their like are named.

A rank that waits for a slow one loses as much time as the slow one itself, so step times say nothing. What differs is *busy*
time: the step less what the ledger says was blocked. Ranks are compared with those of the same pipeline stage (stages differ by
design) and, because a layout may have no such peers, with their own past.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

import torch

from frontier_llm.comm.axis import Mesh
from frontier_llm.comm.collectives import all_gather
from frontier_llm.topology import Grid

WINDOW_STEPS = 12  # a rank is named when it lagged in LATE_STEPS of the last so many
LATE_STEPS = 9
BASELINE_STEPS = 64  # own past
MIN_SHARE = 0.10  # of the usual busy time: less is not worth an operator's attention
SPREADS = 6.0  # times the usual spread of busy times (median absolute deviation)


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than it should be."""

    global_rank: int
    excess_s: float  # median over the window, per step
    usual_s: float

    def __str__(self) -> str:
        return f"global rank {self.global_rank} computes {self.excess_s * 1e3:.0f} ms longer per step than the usual {self.usual_s * 1e3:.0f} ms"


def _spread(values: list[float], center: float) -> float:
    return median(abs(value - center) for value in values)


class StragglerDetector:
    """Fed once per step with the busy seconds of all ranks; the same on every rank, so any of them may report."""

    def __init__(self, stages: list[int]) -> None:
        """`stages[global_rank]` is its pipeline rank."""
        self._peers: list[list[int]] = [[rank for rank, other in enumerate(stages) if other == stage] for stage in stages]
        self._past: list[deque[float]] = [deque(maxlen=BASELINE_STEPS) for _ in stages]
        self._late: list[deque[float]] = [deque(maxlen=WINDOW_STEPS) for _ in stages]  # excess of late steps, else 0
        self._named: set[int] = set()

    def step(self, busy_s: list[float]) -> list[Straggler]:
        """Ranks that have become stragglers with this step; one that recovers may be named again later."""
        found = []
        for rank, mine in enumerate(busy_s):
            usual, spread = self._usual(rank, busy_s)
            late = mine - usual > max(SPREADS * spread, MIN_SHARE * usual)
            self._late[rank].append(mine - usual if late else 0.0)
            if not late:
                self._past[rank].append(mine)  # a straggler must not become the measure of itself
            lags = [excess for excess in self._late[rank] if excess]
            if len(lags) < LATE_STEPS // 2:
                self._named.discard(rank)
            elif len(lags) >= LATE_STEPS and rank not in self._named:
                self._named.add(rank)
                found.append(Straggler(rank, median(lags), usual))
        return found

    def _usual(self, rank: int, busy_s: list[float]) -> tuple[float, float]:
        """(expected busy seconds, spread): from its peers where there are three or more of them, else from its own past."""
        peers = [busy_s[other] for other in self._peers[rank] if other != rank]
        if len(peers) >= 3:
            return (center := median(peers)), max(_spread(peers, center), 0.01 * center)
        past = list(self._past[rank])
        if len(past) < WINDOW_STEPS:
            return busy_s[rank], 0.0  # nothing to compare with yet
        return (center := median(past)), max(_spread(past, center), 0.01 * center)


class StragglerWatch:
    """The detector of a mesh: one all-gather of 8 bytes per rank and step."""

    def __init__(self, mesh: Mesh, grid: Grid) -> None:
        self._world = mesh.world
        self._detector = StragglerDetector([grid.coordinates(rank)["pp"] for rank in range(grid.world_size)])

    def step(self, step_s: float, blocked_s: float, device: torch.device) -> list[Straggler]:
        """After a step that took `step_s`, of which this rank stood still for `blocked_s`. Collective over the world."""
        mine = torch.tensor([max(step_s - blocked_s, 0.0)], dtype=torch.float64, device=device)
        return self._detector.step(all_gather(mine, self._world).tolist())
