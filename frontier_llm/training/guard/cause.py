"""Finds the rank that failed first, from the heartbeats of all ranks, and writes a failure record
(frontier_llm/run/failure.py).

If one rank dies or stops, the other ranks see only a collective that fails or never ends. A rank that sends no more
heartbeats counts as dead or stopped. If all ranks send heartbeats, the rank with the least progress counts as the
cause, because the other ranks wait for this rank.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from frontier_llm import log
from frontier_llm.comm.heartbeat_store import HeartbeatStore
from frontier_llm.errors import RankFailure
from frontier_llm.machine.env import STORE_CHECKS_PER_S
from frontier_llm.run import run_dir
from frontier_llm.run.failure import (
    Evidence,
    Failure,
    cause_of,
    lost_a_peer,
    read_failure,
    speaks_of_hardware,
    write_failure,
)
from frontier_llm.run.threads import in_daemon
from frontier_llm.training.guard.suspects import WrongResults

# Time between two heartbeats of a rank within a step; each new step sends one too. In very large jobs `period_s`
# returns a longer time, to limit the load of the store.
PERIOD_S = 0.25
SILENT_PERIODS = 3  # If a single rank sends no heartbeat for this number of periods, the rank is treated as dead.
# Time after which several ranks without heartbeats are treated as dead. This time is longer than SILENT_PERIODS
# periods, because several live ranks on a busy machine can be late at the same time.
PATIENCE_S = 2.5
ANSWER_S = 8.0  # Time that a rank waits for rank 0 to find the cause.
STORE_S = 3.0  # Time that a rank waits for the store, whose process or node may be stopped.
POLL_S = 0.25  # shortest time between two reads of the store by a rank that waits for rank 0's answer
T = TypeVar("T")
_FIRST = "first failure"
_ALARM = "alarm"
_STAND_IN = "stand-in for rank 0"


def period_s(world_size: int) -> float:
    """Return the period of a rank's heartbeats in seconds."""
    return max(PERIOD_S, world_size / STORE_CHECKS_PER_S)


class Inquiry:
    """One rank's access to the heartbeats of all ranks, and to the common record of the first failure."""

    def __init__(
        self,
        heartbeat_store: HeartbeatStore | None,
        rank: int,
        world_size: int,
        run_dir: Path,
        own: Callable[[str], Failure],
    ) -> None:
        """`heartbeat_store` is None in a run of one process.

        `own(what)` returns a Failure with `what` and this rank's current position in the run.
        """
        self._heartbeat_store = heartbeat_store
        self._rank = rank
        self._world_size = world_size
        self._run_dir = run_dir
        self._own = own

    @property
    def alone(self) -> bool:
        """True if there are no heartbeats to read: the run has one process, or the store is gone."""
        return self._heartbeat_store is None

    @property
    def needs_rank_0(self) -> bool:
        """True if the store ends with rank 0's process."""
        return self._heartbeat_store is not None and not self._heartbeat_store.outlives_rank_0

    def close(self) -> None:
        """Stop the heartbeats."""
        if self._heartbeat_store is not None:
            self._heartbeat_store.close()

    def post(self, heartbeat: dict[str, Any]) -> None:
        """Update this rank's heartbeat."""
        if self._heartbeat_store is not None:
            try:
                self._heartbeat_store.post(self._rank, heartbeat)
            except RuntimeError as error:
                if self._heartbeat_store.outlives_rank_0:
                    log.warn(f"from now on, the rank that fails first cannot be determined: {error}")
                self._heartbeat_store = None  # the main thread's collectives will report the failure

    def answer_alarm(self) -> None:
        """On rank 0, find the cause if another rank has reported a failed collective. Does nothing on other ranks.

        Rank 0 does not wait for a failure of its own collectives, which may come much later.
        """
        if self._rank == 0 and self._heartbeat_store is not None:
            try:
                alarm = self._heartbeat_store.claimed(_ALARM)
                if alarm is not None and self._heartbeat_store.claimed(_FIRST) is None:
                    self._investigate(self._heartbeat_store, alarm)
            except RuntimeError:
                self._heartbeat_store = None

    def explain(self, error: BaseException) -> Failure:
        """Record and return the first failure of the job, after `error` was raised in this rank's main thread.

        Takes at most a few seconds.
        """
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, RankFailure) or (isinstance(error, RuntimeError) and lost_a_peer(what)):
            return self.find(what)
        message = tuple("".join(traceback.format_exception(error)).splitlines())
        suspect = speaks_of_hardware(what)
        failure = self._claim(
            replace(
                self._own(what),
                evidence=Evidence.EXCEPTION,
                cause=cause_of(what),
                message=message,
                host_suspect=suspect,
            )
        )
        write_failure(self._run_dir, failure)
        return failure

    def find(self, symptom: str) -> Failure:
        """Find the rank that caused a collective to fail or hang.

        Rank 0 compares the heartbeats of all ranks. The other ranks request this from rank 0 and wait for the result.
        If rank 0 sends no heartbeats or does not answer, another rank compares them instead. That rank needs a store
        that outlives rank 0, such as a TCPStore.

        The failure is written to failure.json, unless this rank knows only its own symptom.
        """
        try:
            if self._heartbeat_store is None:
                failure = self._own(symptom)
                if self._world_size == 1:
                    failure = replace(failure, evidence=Evidence.NOTICES)
            else:
                if self._rank == 0:
                    failure = self._investigate(self._heartbeat_store, symptom)
                else:
                    failure = self._ask(self._heartbeat_store, symptom)
        except RuntimeError:
            failure = read_failure(self._run_dir) or self._store_is_gone(symptom)
        if failure.evidence is not Evidence.SYMPTOM:
            write_failure(self._run_dir, failure)
        return failure

    def _store_is_gone(self, symptom: str) -> Failure:
        """Return the failure for a store that does not respond. Rank 0's node served the store."""
        if self._rank == 0:
            return self._own(f"{symptom}; the store's process on this node has ended or is stopped")
        here = self._own("its node, or the process there that serves the store, has ended or is stopped")
        return replace(here, evidence=Evidence.NOTICES, rank=0, host="")

    def accuse(self, error: WrongResults) -> None:
        """Record the ranks with wrong results, and exclude their hosts.

        All ranks call this method with the same error, and rank 0 writes the record. The other ranks wait for the
        record, because a launcher ends all ranks when the first rank exits.
        """
        if self._rank == 0:
            first = error.suspects[0]
            hosts = error.hosts_to_exclude
            failure = replace(
                self._own(error.problems[0].what),
                cause=error.cause,
                evidence=Evidence.COMPARISON,
                rank=first.rank,
                host=first.host,
                host_suspect=True,
                suspects=error.suspects,
                excluded_hosts=tuple(hosts),
            )
            write_failure(self._run_dir, failure)
            try:
                run_dir.distrust(self._run_dir, hosts)
                log.warn(
                    f"hosts that are no longer used: {', '.join(hosts)}"
                    if hosts
                    else "no host is excluded, because more than half of all hosts are suspects"
                )
            except OSError as failed:
                log.warn(f"cannot record that {', '.join(hosts)} must no longer be used: {failed.strerror}")
            self._claim(failure)
        elif self._heartbeat_store is not None:
            with suppress(RuntimeError):  # if rank 0 has ended, its store does not answer
                self._answer(self._heartbeat_store)

    def _claim(self, failure: Failure) -> Failure:
        """Write `failure` to the store as the job's first failure, unless a rank has written one before. Return the
        failure in the store.
        """
        if self._heartbeat_store is None:
            return failure
        heartbeat_store = self._heartbeat_store
        try:
            return Failure.from_json(_within(STORE_S, lambda: heartbeat_store.claim(_FIRST, failure.to_json())))
        except RuntimeError:
            return failure

    def _ask(self, heartbeat_store: HeartbeatStore, symptom: str) -> Failure:
        _within(STORE_S, lambda: heartbeat_store.claim(_ALARM, f"rank {self._rank}: {symptom}"))
        found = self._answer(heartbeat_store, give_up_if_silent=True)
        if found is None and heartbeat_store.outlives_rank_0:
            found = self._stand_in(heartbeat_store, symptom)
        return found or self._own(symptom)

    def _stand_in(self, heartbeat_store: HeartbeatStore, symptom: str) -> Failure | None:
        """Find the cause without rank 0, which does not answer.

        The first rank that claims this role compares the heartbeats, and the other ranks wait for its result.
        """
        chosen = _within(STORE_S, lambda: heartbeat_store.claim(_STAND_IN, str(self._rank)))
        if chosen == str(self._rank):
            return self._investigate(heartbeat_store, symptom)
        return self._answer(heartbeat_store)

    def _answer(self, heartbeat_store: HeartbeatStore, give_up_if_silent: bool = False) -> Failure | None:
        """Return the first failure as soon as a rank has claimed it.

        Returns None after ANSWER_S. With `give_up_if_silent`, also returns None if rank 0 sends no heartbeats.
        """
        pause_s = max(POLL_S, period_s(self._world_size))
        last: dict[str, Any] | None = None
        now_s = last_changed_s = time.monotonic()
        deadline_s = now_s + ANSWER_S
        while now_s < deadline_s:
            claimed = _within(STORE_S, lambda: heartbeat_store.claimed(_FIRST))
            if claimed is not None:
                return Failure.from_json(claimed)
            if give_up_if_silent and heartbeat_store.outlives_rank_0:
                heartbeat = _within(STORE_S, lambda: heartbeat_store.read(0))
                if heartbeat != last:
                    last = heartbeat
                    last_changed_s = now_s
                elif now_s - last_changed_s > SILENT_PERIODS * pause_s:
                    return None
            time.sleep(pause_s)
            now_s = time.monotonic()
        return None

    def _investigate(self, heartbeat_store: HeartbeatStore, symptom: str) -> Failure:
        heartbeats = {rank: heartbeat_store.read(rank) for rank in range(self._world_size)}
        silent = [rank for rank in range(self._world_size) if rank != self._rank]
        pause_s = period_s(self._world_size)
        began_s = time.monotonic()
        patience_s = max(PATIENCE_S, 2.5 * pause_s)
        while (waited_s := time.monotonic() - began_s) < patience_s and (
            len(silent) > 1 or waited_s < SILENT_PERIODS * pause_s
        ):
            time.sleep(pause_s)
            claimed = heartbeat_store.claimed(_FIRST)
            if claimed is not None:
                return Failure.from_json(claimed)
            heard = {rank: heartbeat_store.read(rank) for rank in silent}
            silent = [rank for rank in silent if heard[rank] == heartbeats[rank]]  # heartbeats are numbered
            heartbeats |= heard
        known = {rank: heartbeat for rank, heartbeat in heartbeats.items() if heartbeat is not None}
        if silent:
            rank = silent[0]
            how = "it died or was stopped: it sends no heartbeats"
        else:
            rank = min(known, key=lambda number: (known[number]["progress"], number))
            how = (
                f"all ranks send heartbeats, and this one is furthest behind ({known[rank]['collectives']} "
                f"collectives, the last: {known[rank]['call']})"
            )
        heartbeat = known.get(rank, {"host": "", "step": None, "section": ""})
        place = {name: heartbeat[name] for name in ("host", "step", "section")}
        return self._claim(
            Failure(f"{how}; seen as: {symptom}", Evidence.NOTICES, rank=rank, host_suspect=True, **place)
        )


def _within(limit_s: float, work: Callable[[], T]) -> T:
    """Return work(). Raises RuntimeError after `limit_s`, because a request to a stopped store process never ends."""
    try:
        return in_daemon(work, "store").result(limit_s)
    except TimeoutError:
        raise RuntimeError("the store does not respond") from None
