"""Hang test: runs many training steps under a watchdog, and reports how many communications may be in flight.

Two or three communicators in flight hang on gfx90a with recent RCCL (ROCm/rccl#2191). Only a test shows whether they
hang on this machine. For each mode (settings of comm.in_flight and overlap) separate processes train a model of one
layer per virtual stage. These processes are killed if no step ends within the time limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frontier_llm.config import RunConfig
from frontier_llm.files import write_atomically
from frontier_llm.units import plural

# mode → settings of the run, from the fastest mode to the safest one
MODES: dict[str, tuple[str, ...]] = {
    "many": ("comm.in_flight=many", "comm.overlap_messages=true", "comm.overlap_gradients=true"),
    "many-waiting": ("comm.in_flight=many", "comm.overlap_messages=false", "comm.overlap_gradients=false"),
    "one": ("comm.in_flight=one",),
}
ABOUT = {
    "many": "several communications in flight, messages and gradients beside compute",
    "many-waiting": "several communicators, without overlap",
    "one": "one communication in flight",
}
START_S = 240.0  # seconds in which all ranks must have connected and built their stages


@dataclass(frozen=True)
class Verdict:
    """Result of the hang test of one mode."""

    mode: str
    steps: int  # steps that ended
    wanted: int  # steps requested
    seconds: float
    fault: str = ""

    @property
    def safe(self) -> bool:
        """True if every step ended."""
        return self.steps == self.wanted and not self.fault

    def describe(self) -> str:
        """Return text such as 'many: safe, 200 steps in 12 s (several communications …)'."""
        if self.safe:
            result = f"safe, {plural(self.steps, 'step')} in {self.seconds:.0f} s"
        else:
            result = f"NOT SAFE: {self.fault}"
        return f"{self.mode}: {result} ({ABOUT[self.mode]})"


def settings_of(config: RunConfig, mode: str) -> list[str]:
    """Return the settings of a hang test: synthetic data, no evaluation, and a small model and batch.

    The model has one layer per virtual stage, and a step has two microbatches per pipeline rank.
    """
    parallel = config.parallel
    stages = parallel.pipeline * parallel.chunks
    replicas = parallel.data or 1
    return [
        f"model.layers={stages}",
        "parallel.stage_layers=null",
        f"batch.global_batch={2 * parallel.pipeline * replicas * config.batch.micro_batch}",
        "data.train=synthetic",
        "data.validation=null",
        "data.tokenizer=null",
        "train.eval_samples=0",
        *MODES[mode],
    ]


def run_steps(config: RunConfig, place: Any, times: int, progress: Path) -> None:
    """Train `times` steps on this rank. Rank 0 writes the number of ended steps to `progress` after each step."""
    import torch

    from frontier_llm.training.join import joined_state
    from frontier_llm.training.step import train_step

    with joined_state(config, place) as state:
        for ended in range(times + 1):
            if state.mesh.world.rank == 0:
                write_atomically(progress, str(ended))
            if ended < times:
                train_step(state)
            if state.device.type == "cuda":
                torch.cuda.synchronize(state.device)


def watch(
    command: Sequence[str],
    environment: Mapping[str, str],
    mode: str,
    times: int,
    limit_s: float,
    folder: Path,
) -> Verdict:
    """Run `command`, which starts the ranks of a mode, until it ends or hangs.

    The run counts as hanging if no step ends within `limit_s` seconds. Before the first step the limit is START_S.
    """
    progress = folder / "progress"
    log = folder / f"{mode}.log"
    progress.unlink(missing_ok=True)
    begin = last = time.monotonic()
    # number of ended steps; -1 until the ranks are connected
    steps = -1
    fault = ""
    with (
        log.open("wb") as output,
        subprocess.Popen(  # noqa: S603 our own interpreter, no shell
            command,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            while process.poll() is None:
                time.sleep(0.05)
                if (ended := _steps(progress)) > steps:
                    steps = ended
                    last = time.monotonic()
                allowed_s = START_S if steps < 0 else limit_s
                if time.monotonic() - last > allowed_s:
                    fault = f"{'the start' if steps < 0 else f'step {steps + 1} of {times}'} hung for {allowed_s:.0f} s"
                    break
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # also kills the ranks, which are in the same process group
    steps = max(_steps(progress), 0)
    if process.returncode and not fault:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        fault = (
            f"ended after {steps} of {times} steps with exit code {process.returncode}: "
            f"{lines[-1] if lines else 'no message'}"
        )
    return Verdict(mode, steps, times, time.monotonic() - begin, fault)


def _steps(progress: Path) -> int:
    return int(progress.read_text(encoding="utf-8")) if progress.is_file() else -1


def in_flight_of(verdicts: Sequence[Verdict]) -> str | None:
    """Return the value of `comm.in_flight` for this machine: "many" if that mode is safe, otherwise "one" if that mode
    is safe, otherwise None.

    "many" must be safe with overlap, because runs overlap messages and gradients.
    """
    safe = {verdict.mode for verdict in verdicts if verdict.safe}
    return next((mode for mode in ("many", "one") if mode in safe), None)
