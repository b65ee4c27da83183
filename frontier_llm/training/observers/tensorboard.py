"""Observer that writes events for TensorBoard to the run directory's `events/`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from frontier_llm import log
from frontier_llm.config import RunConfig
from frontier_llm.files import folder_below
from frontier_llm.training.observers import Observer, scalars


class Events(Observer):
    """Writes scalars for TensorBoard. Writes nothing if the package is not installed, which `cli.checks.check`
    reports.
    """

    def __init__(self, config: RunConfig) -> None:
        self._directory = Path(config.train.run_dir) / "events" if find_spec("tensorboard") else None
        self._writer: Any = None

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write the scalars of a line. After a start or rewind, a new writer purges the events of later steps."""
        if kind in ("start", "rewind") and self._directory is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.close()
            folder_below(self._directory.parent, self._directory.name)
            self._writer = SummaryWriter(str(self._directory), purge_step=step + 1)
        if self._writer is None or "layout" in values:  # a layout has no scalars to plot
            return
        try:
            for name, number in scalars(kind, values).items():
                self._writer.add_scalar(name, number, step)
        except OSError as error:  # raised by TensorBoard's own writer thread, which has ended
            log.warn(f"TensorBoard's events end at step {step}: {error.strerror}; metrics.jsonl is still written")
            self._writer = None

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            with suppress(OSError):  # the disk may have filled up since the last event
                self._writer.close()
            self._writer = None
