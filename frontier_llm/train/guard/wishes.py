"""What people and the scheduler ask of a running job, agreed by all ranks: a signal to any of them, or a file in the run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from frontier_llm import log
from frontier_llm.cluster.run_dir import SAVE_FILE, STOP_FILE
from frontier_llm.cluster.signals import SignalWatcher
from frontier_llm.comm import Axis, all_reduce_


@dataclass(frozen=True)
class Wish:
    """The same on every rank."""

    stop: bool
    save: bool


class Wishes:
    """Asks all ranks at a step boundary."""

    def __init__(self, signals: SignalWatcher, run_dir: Path, world: Axis, device: torch.device) -> None:
        self._signals, self._run_dir, self._world, self._device = signals, run_dir, world, device

    def agreed(self) -> Wish:
        """Collective over the world, one tiny all-reduce."""
        save_file = self._run_dir / SAVE_FILE
        save = self._world.rank == 0 and save_file.exists()
        if save:
            save_file.unlink(missing_ok=True)
        return self._ask(save)

    def stop(self) -> bool:
        """Whether to stop; a wish to save stays for later. Collective over the world."""
        return self._ask(save=False).stop

    def _ask(self, save: bool) -> Wish:
        requested = self._signals.requested
        stop = requested is not None or (self._world.rank == 0 and (self._run_dir / STOP_FILE).exists())
        flags = torch.tensor([float(stop), float(save)], device=self._device)
        stop_any, save_any = all_reduce_(flags, self._world, "max").tolist()
        if stop_any:
            log.info(f"stopping on {requested or 'a wish of another rank or the file STOP'}")
        return Wish(stop_any > 0, save_any > 0)
