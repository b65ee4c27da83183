"""Watchdog of a rank: a thread that sends heartbeats, detects a stuck rank, and finds the rank that failed first.

Each rank sends (step, section, number of collectives) to the job's store at every step, and at least every 0.25 s. In
very large jobs the period is longer, to limit the load of the store. The module `cause` reads these heartbeats.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from frontier_llm import log
from frontier_llm.checkpoint.lock import Superseded
from frontier_llm.comm import Mesh, dump_flight_record
from frontier_llm.comm.heartbeat_store import HeartbeatStore
from frontier_llm.comm.rendezvous import has_joined
from frontier_llm.config import TrainConfig
from frontier_llm.config.schema import TimeoutConfig
from frontier_llm.errors import FrontierError, RankFailure
from frontier_llm.files import open_below
from frontier_llm.run.failure import SECONDARY, STUCK, Evidence, Failure, forget_failure, write_failure
from frontier_llm.run.rank_env import node_name
from frontier_llm.training.guard.cause import Inquiry, period_s
from frontier_llm.training.guard.suspects import WrongResults

# The watchdog's timeout as a fraction of the timeout of collectives. The watchdog must act first, while it can still
# read the heartbeats of other ranks.
FIRES_AT = 0.9
# Share of the watchdog's timeout after which the stacks of all threads are written. At this time no collective has
# timed out, so the stacks still show the call that hangs.
DUMP_AT = 0.75
# Share of the watchdog's timeout after which faulthandler's C thread writes the stacks, if the watchdog thread cannot
# run. They must be written before the timeout, at which the other ranks exit and the launcher ends this rank.
LATE_AT = 0.9
# Time that rank 0 waits before it exits if its process serves the store (comm.store=authenticated). The other ranks
# read the cause of the failure from the store in this time.
LINGER_S = 1.0
SHORTEST_S = 0.05  # shortest time between two heartbeats, if steps are shorter


class Watchdog:
    """Sends heartbeats of this rank and watches its progress while the body of `guarding` runs."""

    def __init__(self, train: TrainConfig, mesh: Mesh, timeouts: TimeoutConfig) -> None:
        """A rank counts as stuck if it makes no progress for FIRES_AT × the longest timeout.

        Progress is a new step, a collective, a pipeline action, or a call of `moved`.
        """
        longest_s = max([train.timeout_s, *filter(None, timeouts.model_dump().values())])
        self._timeout_s = FIRES_AT * longest_s
        self._period_s = min(period_s(mesh.world.size), self._timeout_s / 10)
        heartbeat_store = HeartbeatStore(period_s=self._period_s) if has_joined() else None
        self._mesh = mesh
        self._run_dir = Path(train.run_dir)
        self._logs = Path(train.run_dir) / "logs"
        self._rank = mesh.world.rank
        self._ledger = mesh.ledger
        self._inquiry = Inquiry(heartbeat_store, mesh.world.rank, mesh.world.size, self._run_dir, self._here)
        self._step = 0
        self._section = "start"
        # number of collectives before this step; number of collectives in the last step
        self._step_began_at = self._per_step = 0
        self._moved_s = time.monotonic()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._stacks_path = self._logs / f"stacks_rank_{self._rank:05}.txt"
        self._run_dir.mkdir(parents=True, exist_ok=True)
        stacks = open_below(self._run_dir, f"logs/{self._stacks_path.name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        # faulthandler can write to this file without the interpreter lock
        self._stacks = os.fdopen(stacks, "w", encoding="utf-8")

    def at(self, step: int, section: str) -> None:
        """Record the main thread's step and section. This call is cheap enough for every step."""
        if step != self._step:
            done = self._collectives()
            self._per_step = done - self._step_began_at
            self._step_began_at = done
            self._wake.set()
        self._step = step
        self._section = section
        self.moved()

    def moved(self) -> None:
        """Record that the main thread makes progress. Call this in a section without collectives."""
        self._moved_s = time.monotonic()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Record that the run is in the section `name` (evaluate, save). The end restores the previous section."""
        before = self._section
        self.at(self._step, name)
        try:
            yield
        finally:
            self.at(self._step, before)

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Watch this rank while the body runs. If the body fails, record the job's first failure.

        Errors that every rank raises, and errors of a run with one process, are raised again. After any other error
        this process exits.
        """
        if self._rank == 0:
            forget_failure(self._run_dir)
        self._inquiry.post(self._heartbeat())
        self._thread.start()
        try:
            yield
        except Exception as error:
            if isinstance(error, WrongResults):
                self._inquiry.accuse(error)
            elif isinstance(error, FrontierError) and not isinstance(error, RankFailure | Superseded):
                own = replace(self._here(str(error)), cause=error.cause, evidence=Evidence.EXCEPTION)
                write_failure(self._run_dir, own)
            if isinstance(error, FrontierError) and not isinstance(error, RankFailure):
                raise  # all ranks raise the same error
            if self._inquiry.alone:
                self._inquiry.explain(error)
                raise
            if time.monotonic() - self._moved_s > DUMP_AT * self._timeout_s:
                # The watchdog thread may not have written the stacks yet: on a busy or paused machine the collective
                # can time out first.
                self._write_stacks()
            dump_flight_record(self._mesh, self._logs, str(error))
            self._leave(self._inquiry.explain(error))
        self._stop.set()
        self._wake.set()
        self._thread.join()
        self._inquiry.close()
        faulthandler.cancel_dump_traceback_later()
        self._close_stacks()

    def _leave(self, failure: Failure) -> None:
        """Log the failure and end this process."""
        with suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
        log.warn(failure.describe() if failure.rank == self._rank else f"{SECONDARY}. {failure.describe()}")
        if self._rank == 0 and self._inquiry.needs_rank_0:
            time.sleep(LINGER_S)
        # Close last, because the watchdog thread may still write, and its error would hide the cause.
        self._close_stacks()
        # os._exit skips the destructors of process groups, which would wait for the dead rank
        os._exit(RankFailure.exit_code)

    def _write_stacks(self) -> None:
        """Write the traceback of the current exception and the stacks of all threads."""
        with suppress(OSError):
            traceback.print_exc(file=self._stacks)
            self._stacks.flush()
            faulthandler.dump_traceback(file=self._stacks, all_threads=True)

    def _close_stacks(self) -> None:
        with suppress(OSError):
            self._stacks.close()
            if self._stacks_path.stat().st_size == 0:
                self._stacks_path.unlink()

    def _collectives(self) -> int:
        return sum(list(self._ledger.calls.values()))

    def _place(self) -> tuple[float, int, int]:
        """Return numbers of which one changes whenever the main thread makes progress."""
        return self._moved_s, self._collectives(), self._ledger.actions

    def _here(self, what: str) -> Failure:
        return Failure(
            what,
            Evidence.SYMPTOM,
            rank=self._rank,
            host=node_name(),
            step=self._step,
            section=self._section,
        )

    def _heartbeat(self) -> dict[str, Any]:
        collectives = self._collectives()
        # Pipeline stages make different numbers of collectives per step. Progress within a step is therefore measured
        # relative to the number of this rank's collectives per step.
        progress = self._step + (collectives - self._step_began_at) / max(self._per_step, 1)
        return {
            "host": node_name(), "pid": os.getpid(), "step": self._step, "section": self._section,
            "collectives": collectives, "progress": round(progress, 3), "call": self._ledger.last(),
        }  # fmt: skip

    def _watch(self) -> None:
        seen: tuple[Any, ...] = ()
        while not self._stop.wait(SHORTEST_S):
            # `_wake` is set at each new step, so that the last heartbeat of a rank shows the step that it reached
            self._wake.wait(self._period_s)
            self._wake.clear()
            heartbeat = self._heartbeat()
            place = self._place()
            if place != seen:
                seen = place
                changed_s = time.monotonic()
                dumped = False
                # The timer runs in C, so it also works if this rank's main thread holds the interpreter lock.
                faulthandler.dump_traceback_later(LATE_AT * self._timeout_s, file=self._stacks)
            self._inquiry.post(heartbeat)
            self._inquiry.answer_alarm()
            idle_s = time.monotonic() - changed_s
            if idle_s > DUMP_AT * self._timeout_s and not dumped:
                dumped = True
                faulthandler.cancel_dump_traceback_later()
                faulthandler.dump_traceback(file=self._stacks, all_threads=True)
            if idle_s > self._timeout_s:
                self._give_up()

    def _give_up(self) -> None:
        """Record the suspect and end this process, because nothing has progressed.

        The stacks have already been written.
        """
        waited = f"nothing has moved for {self._timeout_s:.0f} s"
        try:
            path = dump_flight_record(self._mesh, self._logs, waited)
            failure = self._inquiry.find(waited)
            log.warn(
                f"{waited}; stacks of all threads in {self._stacks_path}, last collectives in "
                f"{path}\n{failure.describe()}"
            )
        finally:  # exit even if the lines above have raised an error, because nothing else ends this process
            os._exit(STUCK)
