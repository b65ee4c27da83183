"""Writes the metrics of a run: one JSON line and one log line per logged step. Observers receive the same values."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from frontier_llm import log
from frontier_llm.blueprint.work import model_flops_per_token
from frontier_llm.config import RunConfig, RunPhase, phase_at, phases_of
from frontier_llm.data.position import Position
from frontier_llm.machine.load import load_machine
from frontier_llm.run import stage_memory
from frontier_llm.run.run_dir import open_lines
from frontier_llm.run.stage_memory import StageMemory
from frontier_llm.training.build import TrainState
from frontier_llm.training.clock import PhaseClock
from frontier_llm.training.memory import peak_resident_bytes
from frontier_llm.training.observers import Observer
from frontier_llm.training.step import StepResult
from frontier_llm.units import GIB, TERA, format_seconds, strict_json


@dataclass(frozen=True)
class Throughput:
    """Average speed of the steps since the last logged step."""

    step_time_s: float
    tokens_per_s: float  # tokens per second of all ranks together
    model_tflops: float  # TFLOP/s per device; counts the model's FLOPs without recomputation
    mfu: float | None  # model_tflops divided by the device's peak; None if the peak is not known


class Metrics:
    """Writes metrics.jsonl on global rank 0. Lines are only appended. Each line has the number of the run's start.

    A line of kind `start` or `rewind` makes earlier lines about later steps invalid. `run.run_dir.rows` drops these
    earlier lines. Observers receive the `start` or `rewind` line, too. This line also records the parallel layout of
    the later steps, because each start may use another layout.
    """

    def __init__(
        self,
        config: RunConfig,
        world_size: int,
        clock: PhaseClock,
        incarnation: int,
        done_steps: int,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Continue metrics.jsonl after `done_steps` steps. `config` is the configuration of the complete run."""
        self._train = config.train
        self._phases = phases_of(config)
        self._world_size = world_size
        self._clock = clock
        self._incarnation = incarnation
        self._layout = layout_of(config, world_size)
        self._peak_tflops = peak_tflops(config)
        self._follow(phase_at(self._phases, done_steps))
        run_dir = Path(config.train.run_dir)
        self._observers = observers
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lines = open_lines(run_dir / "metrics.jsonl")
        self._write("start", done_steps, {"layout": self._layout})
        # time of the last logged step; start time of `_first_step`
        self._since = self._started = time.perf_counter()
        self._steps_since = 0
        self._first_step = done_steps
        self._last_step = done_steps

    def _follow(self, phase: RunPhase) -> None:
        """Use the batch size, sequence length and FLOPs of `phase` from now on. No line covers steps of two phases."""
        self._phase = phase
        self._flops_per_token = model_flops_per_token(phase.config.model)

    def _throughput(self, steps: int, elapsed_s: float) -> Throughput:
        tokens = steps * self._phase.tokens_per_step
        tflops = tokens / elapsed_s * self._flops_per_token / self._world_size / TERA
        return Throughput(
            elapsed_s / steps,
            tokens / elapsed_s,
            tflops,
            tflops / self._peak_tflops if self._peak_tflops else None,
        )

    def enter(self, state: TrainState) -> None:
        """Measure `state` from now on, after it has entered a phase with a new pipeline engine and data feed."""
        self._follow(phase_at(self._phases, state.current_step))
        self._clock.attach(state)

    def data(self, state: TrainState) -> None:
        """Record the position in the data at which the run continues. The command `data show` reads it."""
        position = state.position.model_dump(mode="json")
        self._write("data", state.current_step, {"position": position, "global_batch": state.config.batch.global_batch})

    def phase(self, state: TrainState) -> None:
        """Record that another phase of the run has begun."""
        config = state.config
        values = {
            "number": self._phase.number,
            "sequence_length": config.model.sequence_length,
            "global_batch": config.batch.global_batch,
        }
        self.event("phase", state.current_step, values)

    def step(self, step: int, result: StepResult, skipped_steps: int, position: Position) -> None:
        """Count the finished step `step` (counted from 0), and record it every log_interval steps.

        `position` is the position in the data after the step.
        """
        self._steps_since += 1
        self._last_step = step + 1
        train = self._train
        if (step + 1) % train.log_interval and step + 1 not in (train.steps, self._phase.end):
            return
        now = time.perf_counter()
        speed = self._throughput(self._steps_since, now - self._since)
        phases_s = {name: seconds / self._steps_since for name, seconds in self._clock.take().items()}
        self._since = now
        self._steps_since = 0
        # empty fields are left out: further_losses, or routing of a model without experts
        fields = {name: value for name, value in asdict(result).items() if name != "requests" and value != {}}
        values = {
            **fields,
            **asdict(speed),
            "consumed_samples": position.samples,
            "consumed_tokens": position.tokens,
            "skipped_steps": skipped_steps,
            "memory_gib": memory_gib(),
            "phases_s": phases_s,  # seconds per step that this rank spent in each phase
        }
        self._write("step", step + 1, values)
        per_step_s = (now - self._started) / (step + 1 - self._first_step)
        self._print(step + 1, result, speed, eta_s=(train.steps - step - 1) * per_step_s)

    def event(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Record an event other than a training step: an evaluation, a save, or a resume."""
        self._write(kind, step, values)
        if self._steps_since == 0:  # restart the clock, so that the next step's time does not include the event
            self._since = time.perf_counter()
            self._clock.take()

    def memory(self, step: int, measured_steps: int, stages: Sequence[StageMemory]) -> None:
        """Record and log the memory of each stage beside its prediction, after `measured_steps` steps."""
        for line in stage_memory.describe(stages, measured_steps):
            log.info(line)
        self.event(stage_memory.KIND, step, stage_memory.as_row(stages))

    def go_back(self, step: int) -> None:
        """Record that the run has returned to the state after `step` steps."""
        self._write("rewind", step, {"layout": self._layout})
        self._since = self._started = time.perf_counter()
        self._steps_since = 0
        self._first_step = step
        self._clock.take()

    def communication(self) -> None:
        """Record the statistics of this rank's communication so far."""
        moved = self._clock.communication()
        if moved["operations"]:
            self._write("communication", self._last_step, {"rank": 0, **moved})

    def close(self) -> None:
        """Record the communication, flush and close."""
        self.communication()
        self._lines.close()

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        row = {"kind": kind, "step": step, "incarnation": self._incarnation, "time": round(time.time(), 3), **values}
        try:
            # The file is unbuffered, so each line is one write. If the process is killed, no partial line remains.
            self._lines.write((strict_json(row, indent=None) + "\n").encode())
        except OSError as error:  # a full disk does not end the run, just as a failed save does not
            log.warn(f"a line of metrics.jsonl is lost: {error.strerror}")
        for observer in self._observers:
            try:
                observer.record(kind, step, values)
            except OSError as error:
                log.warn(
                    f"{type(observer).__name__} did not record the {kind} of step {step}: {error.strerror or error}"
                )

    def _print(self, step: int, result: StepResult, speed: Throughput, eta_s: float) -> None:
        share = f" ({speed.mfu:.1%} of peak)" if speed.mfu is not None else ""
        why = "a spike" if result.spike else "loss or gradient not finite"
        skipped = f"  SKIPPED: {why}" if result.skipped else ""
        eta = f"  ETA {format_seconds(math.ceil(eta_s))}" if eta_s else ""
        log.info(
            f"step {step}/{self._train.steps}  loss {result.loss:.4f}  grad norm {result.gradient_norm:.3f}  "
            f"lr {result.learning_rate:.2e}  {speed.tokens_per_s:,.0f} tokens/s  "
            f"{speed.model_tflops:.3f} TFLOP/s per device{share}{eta}{skipped}"
        )


def layout_of(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the parallel layout of the run on `world_size` ranks. The names are those of the configuration keys."""
    parallel = config.parallel
    data = world_size // parallel.model_ranks
    return {**parallel.model_dump(mode="json"), "data": data, "micro_batch": config.batch.micro_batch}


def metrics_of(config: RunConfig, state: TrainState, incarnation: int, observers: Sequence[Observer]) -> Metrics:
    """Return a `Metrics` that continues at the state's current step. Its clock starts with this call."""
    clock = PhaseClock(state.mesh.ledger)
    clock.attach(state)
    return Metrics(config, state.mesh.world.size, clock, incarnation, state.current_step, observers)


def peak_tflops(config: RunConfig) -> float | None:
    """Return the peak TFLOP/s of one device, for MFU: the run file's value, otherwise the machine file's value.

    Returns None if the machine file's value is only an estimate, as on a laptop.
    """
    if config.train.peak_tflops is not None:
        return config.train.peak_tflops
    peak = load_machine(config.machine).device.peak_tflops
    return None if peak.tag == "estimated" else peak.value


def memory_gib() -> float:
    """Return the peak memory of this rank in GiB: device memory on a GPU, otherwise memory of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    return peak_resident_bytes() / GIB
