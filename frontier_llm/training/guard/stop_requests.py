"""Stop and save requests of users and the scheduler: a signal to any rank, or a file in the run directory.

The all-reduce at the end of each step (`training.step.sum_over_world`) sends the requests of each rank to all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from frontier_llm import log
from frontier_llm.comm import Axis, all_reduce_
from frontier_llm.run.run_dir import SAVE_FILE, STOP_FILE
from frontier_llm.run.signals import SignalWatcher


@dataclass(frozen=True)
class Requests:
    """Stop and save requests that one rank has received, or that all ranks together have received."""

    stop: bool = False
    save: bool = False


class RequestCollector:
    """Collects the requests that this rank receives."""

    def __init__(self, signals: SignalWatcher, run_dir: Path, world: Axis, device: torch.device) -> None:
        self._signals = signals
        self._run_dir = run_dir
        self._world = world
        self._device = device

    def own(self) -> Requests:
        """Return the requests that this rank has received.

        Rank 0 also checks the files STOP and SAVE. It deletes SAVE, so that the file requests one save only.
        """
        save = self._is_there(SAVE_FILE)
        if save:
            save_file = self._run_dir / SAVE_FILE
            try:
                save_file.unlink(missing_ok=True)
            except OSError as error:
                log.warn(f"{save_file} requests no save, because it cannot be deleted: {error.strerror}")
                save = False
        return Requests(self._stop(), save)

    def stop(self) -> bool:
        """Return True if any rank has received a stop request. Collective over the world.

        To be called outside of a step: `train_step` collects the requests within a step.
        """
        asked = torch.full((), float(self._stop()), device=self._device)
        return self.stop_requested(Requests(stop=all_reduce_(asked, self._world).item() > 0))

    def stop_requested(self, requests: Requests) -> bool:
        """Return True if `requests`, the requests of all ranks together, contains a stop request, and log it."""
        if requests.stop:
            log.info(f"stopping on {self._signals.requested or 'a stop request of another rank or the file STOP'}")
        return requests.stop

    def _stop(self) -> bool:
        return self._signals.requested is not None or self._is_there(STOP_FILE)

    def _is_there(self, name: str) -> bool:
        """Return True on rank 0 if the file exists.

        An error of the file system, such as a stale NFS handle, counts as a missing file. The next step looks again.
        """
        if self._world.rank != 0:
            return False
        try:
            return (self._run_dir / name).exists()
        except OSError:
            return False
