"""Lock of a run directory: only the newest start (incarnation) of the run may write into the directory.

`incarnations/00000003.json` names the process of the third start of the run. The file with the highest number names the
holder of the lock. A new start takes the lock by creating a file with a higher number by link(2), which is atomic on
local file systems, Lustre and NFS, and needs no flock. A process that finds a number higher than its own has lost the
lock and must not write any more. This can happen because Slurm may declare a node dead although its processes still
run.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from frontier_llm import log
from frontier_llm.errors import CheckpointError
from frontier_llm.files import folder_below, write_atomically, write_durably
from frontier_llm.run.holder import (
    STALE_AFTER_S,
    Holder,
    how_to_free,
    incarnations,
    is_ahead,
    is_running,
    read_holder,
    start_after,
    watched_dead,
)
from frontier_llm.run.run_dir import MOVE_BACK, MOVED
from frontier_llm.run.threads import Heartbeat

HEARTBEAT_S = 5.0


class Superseded(CheckpointError):
    """A newer start of the run has taken the lock. This process must end."""

    exit_code = 3


class RunLock:
    """Lock of a run directory. Rank 0 holds it while the run executes."""

    def __init__(self, directory: Path, holder: Holder, incarnation: int = 0) -> None:
        """Take the lock under the next number, or under `incarnation` if that is higher.

        `incarnation` is the supervisor's number of this start. Lock and supervisor use the same numbers. If another
        live process holds the lock, CheckpointError names this process.
        """
        self._folder = directory / "incarnations"
        self._holder = holder
        self._counted = incarnation
        directory.mkdir(parents=True, exist_ok=True)
        folder_below(directory, self._folder.name)
        self.incarnation = self._acquire()
        self._heartbeat = Heartbeat(self._path(self.incarnation), HEARTBEAT_S)

    def _path(self, incarnation: int) -> Path:
        return self._folder / f"{incarnation:08}.json"

    def _newest(self) -> int:
        return max(incarnations(self._folder), default=0)

    def _acquire(self) -> int:
        building = self._folder / f"new.{self._holder.host}.{self._holder.pid}"
        building.unlink(missing_ok=True)
        write_durably(building, self._holder.to_bytes())
        try:
            while True:
                newest = self._newest()
                if newest:
                    self._check_dead(self._path(newest), building)
                mine = start_after(self._folder, newest, self._counted)
                try:
                    os.link(building, self._path(mine))
                except FileExistsError:
                    continue  # another start created the file first; check that holder.
                # Keep the newest two files. They show which start replaced which earlier start.
                for older in incarnations(self._folder):
                    if older < newest:
                        self._path(older).unlink(missing_ok=True)
                return mine
        finally:
            building.unlink(missing_ok=True)

    def _check_dead(self, path: Path, building: Path) -> None:
        """Raise CheckpointError if the process named in the file `path` is alive, or may be alive."""
        holder = read_holder(path)
        if holder is None or holder.released:
            return
        mine = self._holder
        if mine.job and holder.job == mine.job and mine.restart > holder.restart:
            log.info(f"taking over from {holder.describe()}: the scheduler restarted the job")
            return
        os.utime(building)
        # Both times come from the file system's clock, so the clocks of the nodes do not matter.
        silent_s = building.stat().st_mtime - path.stat().st_mtime
        if holder.host == mine.host:
            dead = not is_running(holder.pid, holder.process_start) or holder.pid == mine.pid
            when = "its process is gone" if dead else "its process is alive"
        elif is_ahead(silent_s):
            when = f"its last heartbeat is {-silent_s:,.0f} s in the future"
            log.warn(f"{holder.describe()}: {when}; watching for its heartbeat for {STALE_AFTER_S:.0f} s")
            dead = watched_dead(path)
            when += f", and {'no' if dead else 'a'} new heartbeat was seen"
        else:
            dead = silent_s > STALE_AFTER_S
            when = f"its last heartbeat is {silent_s:.0f} s old"
        if not dead:
            fix = f"wait until that process ends, or set another train.run_dir; {how_to_free(path)}"
            if holder.host != mine.host and not is_ahead(silent_s):
                fix += f", or start again in {max(1.0, STALE_AFTER_S - silent_s):.0f} s"
            raise CheckpointError(f"is in use by {holder.describe()}; {when}", fix, str(self._folder.parent))
        log.info(f"taking over from {holder.describe()}: {when}")

    def check(self) -> None:
        """Raise Superseded if a newer start has taken the lock, and CheckpointError if the folder does not exist.

        Call this method directly before every change of the directory.
        """
        if not self._folder.is_dir():
            raise CheckpointError(MOVED, MOVE_BACK, str(self._folder.parent))
        newest = self._newest()
        if newest > self.incarnation or not self._path(self.incarnation).exists():
            holder = read_holder(self._path(newest)) if newest > self.incarnation else None
            who = holder.describe() if holder else "another start of the run"
            raise Superseded(
                f"incarnation {self.incarnation} has been replaced by {who} and must not write any more",
                "end this process; the newer start continues the run",
                str(self._folder.parent),
            )

    def release(self) -> None:
        """Release the lock, so that the next start need not check whether this process is alive."""
        self._heartbeat.stop()
        path = self._path(self.incarnation)
        if not path.exists() or self._newest() > self.incarnation:
            return
        write_atomically(path, replace(self._holder, released=True).to_bytes())
