"""Detects stragglers, which are ranks that compute more slowly than comparable ranks.

Step times do not show which rank is slow, because all other ranks wait for it. Busy times show the slow rank. The
*busy* time of a rank is the time of a step without the time spent waiting for communication. At regular intervals of
steps, all ranks exchange their busy times. Ranks of the same pipeline stage are compared with each other, because
stages differ by design. If a stage has too few ranks, each rank is compared with its own past. The busy time of an
interval is the median over some of its steps, so a delay of one or two steps is ignored.
"""

from __future__ import annotations

import math
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

SAMPLES = 8  # Number of steps per interval whose busy time is measured, evenly spaced.
# Number of slow intervals in a row before a rank is reported. Another program on the node can slow one interval.
LATE_INTERVALS = 2
# Smallest and largest number of past intervals for the comparison of a rank with its own past.
MIN_PAST = 3
MAX_PAST = 16
MIN_PEERS = 4  # Smallest number of ranks in a stage for a comparison with each other.
# A rank is slow if its busy time exceeds the usual busy time by more than all three limits. MIN_SHARE is a fraction of
# the usual busy time; a smaller excess is not reported. SPREADS is a multiple of the usual spread (median absolute
# deviation).
MIN_SHARE = 0.10
MIN_EXCESS_S = 0.02  # Seconds per step. Other programs on the node can cause a smaller excess.
FIRST_STEPS = 2  # Steps of the first interval. The time of its second step determines the length of later intervals.
SPREADS = 6.0


@dataclass(frozen=True)
class Straggler:
    """A rank whose busy time is much longer than usual."""

    global_rank: int
    excess_s: float  # busy time per step above `usual_s`
    usual_s: float  # expected busy time per step
    host: str = ""

    def __str__(self) -> str:
        slower = (
            f"{self.excess_s * 1e3:.0f} ms longer per step than the usual {self.usual_s * 1e3:.0f} ms "
            f"({self.slowdown:.1f} times)"
        )
        return f"global rank {self.global_rank}{f' on {self.host}' if self.host else ''} computes {slower}"

    @property
    def slowdown(self) -> float:
        """Busy time divided by the usual busy time."""
        return 1 + self.excess_s / self.usual_s


def _spread(values: list[float]) -> float:
    """Return the median absolute deviation, at least 1 % of the median."""
    center = median(values)
    return max(median(abs(value - center) for value in values), 0.01 * center)


class StragglerDetector:
    """Finds stragglers from the busy times of all ranks, once per interval.

    Every rank receives the same times and finds the same stragglers, so any rank can report them.
    """

    def __init__(self, stages: list[int]) -> None:
        """`stages[global_rank]` is the pipeline rank of a global rank."""
        by_stage: dict[int, list[int]] = {}
        for rank, stage in enumerate(stages):
            by_stage.setdefault(stage, []).append(rank)
        self._crowds = [members for members in by_stage.values() if len(members) >= MIN_PEERS]
        few = [rank for members in by_stage.values() if len(members) < MIN_PEERS for rank in members]
        self._past: dict[int, deque[float]] = {rank: deque(maxlen=MAX_PAST) for rank in few}
        self._late: dict[int, int] = {}  # number of slow intervals in a row, by rank

    def compare(self, busy_s: list[float]) -> list[Straggler]:
        """Return the ranks that have become stragglers with this interval.

        A rank that recovers can be returned again later.
        """
        late = {}
        named = []
        for rank, (usual, spread) in self._usual(busy_s).items():
            if (excess := busy_s[rank] - usual) > max(SPREADS * spread, MIN_SHARE * usual, MIN_EXCESS_S):
                late[rank] = self._late.get(rank, 0) + 1
                named += [Straggler(rank, excess, usual)] if late[rank] == LATE_INTERVALS else []
        self._late = late
        return named

    def _usual(self, busy_s: list[float]) -> dict[int, tuple[float, float]]:
        """Return (expected busy seconds, spread) by rank.

        Both come from the ranks of the same stage if the stage has enough ranks, otherwise from the rank's own past.
        """
        usual = {}
        for members in self._crowds:
            values = [busy_s[rank] for rank in members]
            usual.update(dict.fromkeys(members, (median(values), _spread(values))))
        pace = self._pace(busy_s)
        for rank, past in self._past.items():
            if len(past) < MIN_PAST:
                usual[rank] = busy_s[rank], 0.0  # too few past intervals: the present busy time counts as usual
            else:
                usual[rank] = median(past) * pace, _spread(list(past)) * pace
            if busy_s[rank] <= usual[rank][0] * (1 + MIN_SHARE):
                # Slow intervals are not recorded. Otherwise a slow rank's usual time would grow, and the rank would no
                # longer count as slow.
                past.append(busy_s[rank] / pace)
        return usual

    def _pace(self, busy_s: list[float]) -> float:
        """Return the median over ranks of the ratio of this interval's busy time to past busy times.

        Expected times are multiplied by this ratio. Otherwise every rank could count as a straggler if all ranks are
        slow, for example because of longer batches or a busy machine.
        """
        if any(len(past) < MIN_PAST for past in self._past.values()) or not self._past:
            return 1.0
        ratios = sorted(busy_s[rank] / median(past) for rank, past in self._past.items())
        return ratios[(len(ratios) - 1) // 2]


class BusyTime:
    """Measures the busy time of this rank in chosen steps.

    On a CPU the busy time is the step's time minus the blocked time in the ledger. On a GPU the host does not wait
    while the device waits for a peer. Events on the compute stream therefore measure both times, and `take` reads them.
    """

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger = ledger
        self._on_gpu = device.type == "cuda"
        self._seconds: list[float] = []
        # on a GPU: the span of each step, and the spans in which the stream waited for communication
        self._spans: list[tuple[Span, list[Span]]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the body, which is one step."""
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
        """Return the median busy seconds of the steps measured since the last call. Waits for the device."""
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
    """Runs a `StragglerDetector` during training.

    At the end of an interval, 16 bytes per rank are gathered. Other steps add no communication. With one rank nothing
    is measured. An interval ends after a number of steps or a number of seconds, whichever comes first. All ranks
    compute the interval's number of steps from rank 0's step time, which is gathered together with the busy times.
    """

    def __init__(
        self,
        mesh: Mesh,
        grid: Grid,
        device: torch.device,
        host: str,
        interval: int,
        longest_s: float = math.inf,
    ) -> None:
        """`interval` is the largest number of steps, `longest_s` the largest number of seconds of an interval.

        With `interval` 0 there is no comparison.
        """
        self._mesh = mesh
        self._device = device
        self._host = host
        self._most = interval if mesh.world.size > 1 else 0
        self._longest_s = longest_s
        self._interval = self._most if math.isinf(longest_s) else min(self._most, FIRST_STEPS)
        self._step_s: list[float] = []  # step times of the interval, without the first step after a start
        self._is_first = True
        self._detector = StragglerDetector([grid.coordinates(rank)["pp"] for rank in range(grid.world_size)])
        self._busy = BusyTime(mesh.ledger, device)
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[list[Straggler]]:
        """Run a training step in the body.

        After an interval's last step, new stragglers are appended to the yielded list. The last step of an interval is
        collective over the world.
        """
        stragglers: list[Straggler] = []
        if not self._interval:
            yield stragglers
            return
        begin_s = time.perf_counter()
        self._steps += 1
        if self._steps % max(1, self._interval // SAMPLES):
            yield stragglers
        else:
            with self._busy.measured():
                yield stragglers
        if not self._is_first:
            self._step_s.append(time.perf_counter() - begin_s)
        self._is_first = False
        if self._steps == self._interval:
            step_s = median(self._step_s) if self._step_s else 0.0
            mine = torch.tensor([self._busy.take(), step_s], dtype=torch.float64, device=self._device)
            gathered = all_gather(mine, self._mesh.world).tolist()
            busy_s = gathered[0::2]
            self._begin_interval(step_s=gathered[1])
            named = self._detector.compare(busy_s)
            if named:  # `named` is equal on all ranks, so all ranks take part in the collective
                hosts = all_gather_json(self._host, self._mesh.world, self._device)
                stragglers += [replace(straggler, host=hosts[straggler.global_rank]) for straggler in named]

    def _begin_interval(self, step_s: float) -> None:
        """Begin an interval. `step_s` is rank 0's time per step, or 0 if it has not been measured yet."""
        self._steps = 0
        self._step_s = []
        if step_s > 0 and not math.isinf(self._longest_s):
            self._interval = max(1, min(self._most, int(self._longest_s / step_s)))
