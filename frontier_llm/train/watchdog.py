"""Who failed first? A thread in each rank that posts its progress, sees when nothing moves any more, and names the culprit.

A peer that died or froze shows on the others only as a collective that fails or never ends. So each rank posts (step, section,
collectives done) to the rendezvous' store at every step and at least every second; after a failure the rank that posts no longer is the dead or stopped one, and when
all still post, the one whose count is furthest behind is the one that the others wait for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from frontier_llm import log
from frontier_llm.comm import Ledger
from frontier_llm.comm.board import Board
from frontier_llm.errors import FrontierError, RankFailure

PERIOD_S = 1.0
EXIT_STUCK = 70  # the watchdog ended this process; sysexits' EX_SOFTWARE
ANSWER_S = 8.0  # how long a rank waits for rank 0 to find the cause
DUMP_AT = 0.75  # share of the timeout after which stacks are written: before any collective gives up and unwinds them
SHORTEST_S = 0.05  # between two posts, however short the steps are
_FIRST, _ALARM = "first failure", "alarm"


@dataclass(frozen=True)
class Cause:
    """What ended the run first."""

    rank: int
    host: str
    step: int
    section: str
    what: str

    def describe(self) -> str:
        """'rank 2 on n0 failed first, at step 17 (train): …'."""
        return f"rank {self.rank} on {self.host} failed first, at step {self.step} ({self.section}): {self.what}"


class Watchdog:
    """Watches this rank's progress from `start` to `stop`."""

    def __init__(self, board: Board | None, rank: int, world_size: int, ledger: Ledger, run_dir: Path, timeout_s: float) -> None:
        """`board` is None in a run of one process. `timeout_s`: nothing moving for so long means stuck."""
        self._board, self._rank, self._world_size, self._ledger = board, rank, world_size, ledger
        self._run_dir, self._timeout_s = run_dir, timeout_s
        self._step, self._section, self._posts = 0, "start", 0
        self._step_began_at = self._per_step = 0  # collectives
        self._moved_s = time.monotonic()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._period_s = min(PERIOD_S, timeout_s / 10)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._stacks_path = run_dir / "logs" / f"stacks_rank_{rank:05}.txt"
        self._stacks_path.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = self._stacks_path.open("w", encoding="utf-8")  # faulthandler writes to it even without the interpreter lock

    def start(self) -> None:
        """Begin to watch."""
        self._post(self._notice())
        self._thread.start()

    def stop(self) -> None:
        """The run has ended in order."""
        self._stop.set()
        self._wake.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._close_stacks()

    def _close_stacks(self) -> None:
        self._stacks.close()
        if self._stacks_path.stat().st_size == 0:
            self._stacks_path.unlink()

    def at(self, step: int, section: str) -> None:
        """Note where the main thread is; cheap."""
        if step != self._step:
            done = self._collectives()
            self._step_began_at, self._per_step = done, done - self._step_began_at
            self._wake.set()
        self._step, self._section = step, section
        self._moved_s = time.monotonic()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Note a part of the run (evaluate, save) and return to the one before."""
        before = self._section
        self.at(self._step, name)
        try:
            yield
        finally:
            self.at(self._step, before)

    def _collectives(self) -> int:
        return sum(list(self._ledger.calls.values()))

    def _notice(self) -> dict[str, Any]:
        self._posts += 1
        collectives = self._collectives()
        # stages of a pipeline make different numbers of calls, so progress is counted in shares of the own step
        progress = self._step + (collectives - self._step_began_at) / max(self._per_step, 1)
        return {
            "host": socket.gethostname(), "pid": os.getpid(), "step": self._step, "section": self._section,
            "collectives": collectives, "progress": round(progress, 3), "posts": self._posts,
        }  # fmt: skip

    def _watch(self) -> None:
        seen: tuple[Any, ...] = ()
        while not self._stop.wait(SHORTEST_S):
            self._wake.wait(self._period_s)  # a new step is posted at once, so that a rank's last notice says how far it got
            self._wake.clear()
            notice = self._notice()
            place = (self._moved_s, notice["collectives"])
            if place != seen:
                seen, changed_s, dumped = place, time.monotonic(), False
                # fires in C, so also when this rank's main thread holds the interpreter lock for ever
                faulthandler.dump_traceback_later(self._timeout_s + 2 * PERIOD_S, file=self._stacks)
            self._post(notice)
            self._answer_alarm()
            idle_s = time.monotonic() - changed_s
            if idle_s > DUMP_AT * self._timeout_s and not dumped:
                dumped = True
                faulthandler.dump_traceback(file=self._stacks, all_threads=True)
            if idle_s > self._timeout_s:
                self._give_up()

    def _post(self, notice: dict[str, Any]) -> None:
        if self._board is not None:
            try:
                self._board.post(self._rank, notice)
            except RuntimeError:
                self._board = None  # rank 0 is gone; the collectives will say so to the main thread

    def _answer_alarm(self) -> None:
        """Rank 0: find the cause for a rank whose collective failed, perhaps long before ours do."""
        if self._rank == 0 and self._board is not None:
            try:
                alarm = self._board.claimed(_ALARM)
                if alarm is not None and self._board.claimed(_FIRST) is None:
                    self._investigate(self._board, alarm)
            except RuntimeError:
                self._board = None

    def _give_up(self) -> None:
        """Nothing has moved for `timeout_s`: the suspect named, this process ended; the stacks are on disk already."""
        self._stacks.flush()
        waited = f"nothing has moved for {self._timeout_s:.0f} s"
        cause = self.find_cause(waited)
        self.record(cause)
        log.warn(f"{waited}; stacks of all threads in {self._stacks_path}\n{cause.describe()}")
        os._exit(EXIT_STUCK)

    # --- after a failure ---

    def explain(self, error: BaseException) -> Cause:
        """Who failed first, given what the main thread of this rank ran into; at most a few seconds."""
        own = f"{type(error).__name__}: {error}"
        secondary = isinstance(error, RankFailure) or _is_communication(error)
        cause = self.find_cause(own) if secondary else self._claim(self._own_cause(own))
        self.record(cause)
        return cause

    def _own_cause(self, what: str) -> Cause:
        return Cause(self._rank, socket.gethostname(), self._step, self._section, what)

    def _claim(self, cause: Cause) -> Cause:
        """The first cause that any rank has claimed."""
        if self._board is None:
            return cause
        try:
            return Cause(**json.loads(self._board.claim(_FIRST, json.dumps(vars(cause)))))
        except RuntimeError:
            return cause

    def find_cause(self, symptom: str) -> Cause:
        """Who is to blame for a collective that failed or hangs. Rank 0 looks at everybody's notices, the others ask it to."""
        try:
            if self._board is None:
                return self._own_cause(symptom)
            return self._investigate(self._board, symptom) if self._rank == 0 else self._ask(self._board, symptom)
        except RuntimeError:
            what = "its process, which holds the rendezvous, is gone or stopped"
            return self._recorded() or Cause(0, "the host of rank 0", self._step, self._section, what)

    def _recorded(self) -> Cause | None:
        """What rank 0 has found out before it left."""
        try:
            content = json.loads((self._run_dir / "failure.json").read_text(encoding="utf-8"))
            return Cause(**{field.name: content[field.name] for field in fields(Cause)})
        except (OSError, ValueError, KeyError):
            return None

    def _ask(self, board: Board, symptom: str) -> Cause:
        board.claim(_ALARM, f"rank {self._rank}: {symptom}")
        deadline_s = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline_s:
            claimed = board.claimed(_FIRST)
            if claimed is not None:
                return Cause(**json.loads(claimed))
            time.sleep(0.25)
        return self._own_cause(symptom)

    def _investigate(self, board: Board, symptom: str) -> Cause:
        before = self._read_all(board)
        time.sleep(2.5 * PERIOD_S)
        claimed = board.claimed(_FIRST)
        if claimed is not None:
            return Cause(**json.loads(claimed))
        after = self._read_all(board)
        silent = [
            rank for rank in range(1, self._world_size) if rank not in after or before.get(rank, {}).get("posts") == after[rank]["posts"]
        ]
        if silent:
            rank, how = silent[0], "it died or was stopped: it gives no sign of life"
        else:
            rank = min(after, key=lambda number: (after[number]["progress"], number))
            how = f"all live, and it is furthest behind ({after[rank]['collectives']} collectives)"
        notice = after.get(rank, {"host": "an unknown host", "step": 0, "section": "start"})
        return self._claim(Cause(rank, notice["host"], notice["step"], notice["section"], f"{how}; seen as: {symptom}"))

    def _read_all(self, board: Board) -> dict[int, dict[str, Any]]:
        notices = ((rank, board.read(rank)) for rank in range(self._world_size))
        return {rank: notice for rank, notice in notices if notice is not None}

    def record(self, cause: Cause) -> None:
        """failure.json of the run directory; the first writer wins, as it has the first cause."""
        content = json.dumps({**vars(cause), "time": time.strftime("%Y-%m-%d %H:%M:%S"), "written_by_rank": self._rank}, indent=1)
        try:
            with (self._run_dir / "failure.json").open("x", encoding="utf-8") as file:
                file.write(content + "\n")
        except FileExistsError:
            return

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Watch the body; when it fails, say who failed first before the error goes on."""
        if self._rank == 0:
            (self._run_dir / "failure.json").unlink(missing_ok=True)  # of an earlier start
        self.start()
        try:
            yield
        except Exception as error:
            if isinstance(error, FrontierError) and not isinstance(error, RankFailure):
                raise  # all ranks know it alike
            if self._board is None:
                raise
            cause = self.explain(error)
            traceback.print_exc()
            log.warn(cause.describe() if cause.rank == self._rank else f"secondary failure. {cause.describe()}")
            sys.stderr.flush()
            self._close_stacks()
            if self._rank == 0:
                time.sleep(PERIOD_S)  # the others read the answer from the store, which goes with this process
            os._exit(RankFailure.exit_code)  # nothing here may wait for the dead one, not even the groups' destructors
        self.stop()


def _is_communication(error: BaseException) -> bool:
    """torch reports a lost peer as a plain RuntimeError or DistBackendError."""
    text = str(error).lower()
    words = ("gloo", "nccl", "peer", "connection", "timed out", "process group", "socket", "broken pipe")
    return isinstance(error, RuntimeError) and any(word in text for word in words)
