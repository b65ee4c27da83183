"""Which rank is slow? Every so many steps all ranks tell how long they have computed; those that exceed their like are
named.

A rank that waits for a slow one loses as much time as the slow one itself, so step times say nothing. What differs is
*busy* time: the step without what was stood still for. Ranks are compared with those of the same pipeline stage (stages
differ by design) and, because a layout may have no such peers, with their own past. The median of samples that lie
apart is compared: a hiccup of a step or two is not seen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch

from frontier_llm.comm.axis import Mesh, all_gather
from frontier_llm.comm.composed import all_gather_json
from frontier_llm.comm.ledger import Ledger, Span, mark
from frontier_llm.topology.grid import Grid

SAMPLES = 8  # steps of an interval whose busy time is measured, as far apart as they can be
LATE_INTERVALS = 2  # in a row, and a rank is named: a busy spell of a machine may fill one
# own intervals to compare with, at least and at most
MIN_PAST = 3
MAX_PAST = 16
MIN_PEERS = 4  # ranks of a stage that are enough to compare them with each other
MIN_SHARE = 0.10  # of the usual busy time: less is not worth an operator's attention
SPREADS = 6.0  # times the usual spread of busy times (median absolute deviation)


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than it should be."""

    global_rank: int
    excess_s: float  # per step
    usual_s: float
    host: str = ""

    def __str__(self) -> str:
        slower = (
            f"{self.excess_s * 1e3:.0f} ms longer per step than the usual {self.usual_s * 1e3:.0f} ms "
            f"({self.slowdown:.1f} times)"
        )
        return f"global rank {self.global_rank}{f' on {self.host}' if self.host else ''} computes {slower}"

    @property
    def slowdown(self) -> float:
        """Its busy time over the usual one."""
        return 1 + self.excess_s / self.usual_s


def _spread(values: list[float]) -> float:
    """Median absolute deviation, at least a hundredth of the median."""
    center = median(values)
    return max(median(abs(value - center) for value in values), 0.01 * center)


class StragglerDetector:
    """Fed once per interval with the busy seconds of all ranks; the same on every rank, so any of them may report."""

    def __init__(self, stages: list[int]) -> None:
        """`stages[global_rank]` is its pipeline rank."""
        by_stage: dict[int, list[int]] = {}
        for rank, stage in enumerate(stages):
            by_stage.setdefault(stage, []).append(rank)
        self._crowds = [members for members in by_stage.values() if len(members) >= MIN_PEERS]
        few = [rank for members in by_stage.values() if len(members) < MIN_PEERS for rank in members]
        self._past: dict[int, deque[float]] = {rank: deque(maxlen=MAX_PAST) for rank in few}
        self._late: dict[int, int] = {}  # intervals in a row

    def compare(self, busy_s: list[float]) -> list[Straggler]:
        """Ranks that have become stragglers with this interval; one that recovers may be named again later."""
        late = {}
        named = []
        for rank, (usual, spread) in self._usual(busy_s).items():
            if (excess := busy_s[rank] - usual) > max(SPREADS * spread, MIN_SHARE * usual):
                late[rank] = self._late.get(rank, 0) + 1
                named += [Straggler(rank, excess, usual)] if late[rank] == LATE_INTERVALS else []
        self._late = late
        return named

    def _usual(self, busy_s: list[float]) -> dict[int, tuple[float, float]]:
        """(expected busy seconds, spread) by rank: of its stage where that has ranks enough, else from its own past."""
        usual = {}
        for members in self._crowds:
            values = [busy_s[rank] for rank in members]
            usual.update(dict.fromkeys(members, (median(values), _spread(values))))
        pace = self._pace(busy_s)
        for rank, past in self._past.items():
            if len(past) < MIN_PAST:
                usual[rank] = busy_s[rank], 0.0  # nothing to compare with yet
            else:
                usual[rank] = median(past) * pace, _spread(list(past)) * pace
            if busy_s[rank] <= usual[rank][0] * (1 + MIN_SHARE):
                past.append(busy_s[rank] / pace)  # a straggler must not become the measure of itself
        return usual

    def _pace(self, busy_s: list[float]) -> float:
        """How this interval compares with past ones on most ranks: long batches or a busy machine make no rank a
        straggler.
        """
        if any(len(past) < MIN_PAST for past in self._past.values()) or not self._past:
            return 1.0
        ratios = sorted(busy_s[rank] / median(past) for rank, past in self._past.items())
        return ratios[(len(ratios) - 1) // 2]


class BusyTime:
    """How long this rank itself was busy in the steps that were measured.

    On the CPU that is a step's time less what the ledger says was blocked. A GPU's host does not stand still while its
    device waits for a peer: there events on the compute stream tell both, and are read when `take` is called.
    """

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger = ledger
        self._on_gpu = device.type == "cuda"
        self._seconds: list[float] = []
        self._spans: list[tuple[Span, list[Span]]] = []  # on a GPU: a step, and what its stream has stood still for

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around a step."""
        if self._on_gpu:
            waits = self._ledger.waits = list[Span]()
            begin = mark()
            try:
                yield
            finally:
                self._ledger.waits = None
            self._spans.append(((begin, mark()), waits))
        else:
            blocked_s = sum(self._ledger.blocked_s.values())
            begin_s = time.perf_counter()
            yield
            self._seconds.append(time.perf_counter() - begin_s - sum(self._ledger.blocked_s.values()) + blocked_s)

    def take(self) -> float:
        """Median seconds of the steps since the last call. Waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
            self._seconds = [_elapsed_s(step) - sum(map(_elapsed_s, waits)) for step, waits in self._spans]
            self._spans = []
        busy_s = median(self._seconds)
        self._seconds = []
        return busy_s


def _elapsed_s(span: Span) -> float:
    milliseconds: float = span[0].elapsed_time(span[1])
    return milliseconds * 1e-3


class StragglerWatch:
    """The detector of a mesh: one all-gather of 8 bytes per rank in every `interval`-th step, nothing in the others.

    On a single rank there is no one to compare with.
    """

    def __init__(self, mesh: Mesh, grid: Grid, device: torch.device, host: str, interval: int) -> None:
        """`interval` in steps; 0 = never."""
        self._mesh = mesh
        self._device = device
        self._host = host
        self._interval = interval if mesh.world.size > 1 else 0
        self._detector = StragglerDetector([grid.coordinates(rank)["pp"] for rank in range(grid.world_size)])
        self._busy = BusyTime(mesh.ledger, device)
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[list[Straggler]]:
        """Around a training step; in the last one of an interval the list is filled at its end, collectively over
        the world.
        """
        stragglers: list[Straggler] = []
        if not self._interval:
            yield stragglers
            return
        self._steps = self._steps % self._interval + 1
        if self._steps % max(1, self._interval // SAMPLES):
            yield stragglers
        else:
            with self._busy.measured():
                yield stragglers
        if self._steps == self._interval:
            mine = torch.tensor([self._busy.take()], dtype=torch.float64, device=self._device)
            named = self._detector.compare(all_gather(mine, self._mesh.world).tolist())
            if named:  # on all ranks or on none
                hosts = all_gather_json(self._host, self._mesh.world, self._device)
                stragglers += [replace(straggler, host=hosts[straggler.global_rank]) for straggler in named]
