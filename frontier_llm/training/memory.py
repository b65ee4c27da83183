"""Measures the memory of each pipeline stage in the first steps, beside the prediction that the caller computes."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from frontier_llm import log
from frontier_llm.comm import maximum
from frontier_llm.config import RunConfig
from frontier_llm.machine.load import load_machine
from frontier_llm.run.stage_memory import StageMemory
from frontier_llm.training.build import TrainState

# The first step allocates the tensors that later steps reuse, and RCCL allocates buffers at its first large messages.
# The third step uses the memory of all later steps.
MEASURED_STEPS = 3

# Function of (configuration of a phase, number of ranks). It returns the predicted bytes of a device of each stage. The
# caller passes the function, so that ranks do not import the planner.
StageBytes = Callable[[RunConfig, int], Sequence[float]]


class MemoryCheck:
    """Measures the memory of all stages once, after the first steps of a start or a phase."""

    def __init__(self, state: TrainState, predict: StageBytes | None) -> None:
        """Begin to measure peaks. `state` has entered its phase. Only rank 0 calls `predict`."""
        self._predict = predict
        self._begin = state.current_step
        self._end = min(state.current_step + MEASURED_STEPS, state.phases[-1].end)
        if state.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(state.device)

    @property
    def steps(self) -> int:
        """Number of steps that are measured."""
        return self._end - self._begin

    def after_step(self, state: TrainState) -> tuple[StageMemory, ...]:
        """Return the memory of each stage after the last measured step, otherwise ().

        The last measured step is collective over the world. Only rank 0 has the prediction.
        """
        if state.current_step != self._end:
            return ()
        pp = state.mesh.pp
        own = rank_bytes(state.device)
        width = len(own)
        table = [0] * (pp.size * width)
        table[pp.rank * width : (pp.rank + 1) * width] = own
        table = maximum(table, state.mesh.world, state.device)
        predicted = self._predicted(state) if state.mesh.world.rank == 0 else None
        on_gpu = state.device.type == "cuda"
        stages = []
        for stage in range(pp.size):
            used, allocated, reserved = table[stage * width : (stage + 1) * width]
            measured = StageMemory(
                stage=stage,
                used_bytes=used,
                predicted_bytes=None if predicted is None else round(predicted[stage]),
                allocated_bytes=allocated if on_gpu else None,
                reserved_bytes=reserved if on_gpu else None,
            )
            stages.append(measured)
        return tuple(stages)

    def _predicted(self, state: TrainState) -> Sequence[float] | None:
        """Return the predicted bytes of each stage, or None without a prediction. Its errors do not end a run."""
        if self._predict is None:
            return None
        if state.device.type == "cpu" and load_machine(state.config.machine).device.vendor != "none":
            return None  # the prediction is for the GPUs of the machine file
        try:
            return self._predict(state.config, state.mesh.world.size)
        except Exception as error:
            log.info(f"the memory of this layout is not predicted: {error}")
            return None


def rank_bytes(device: torch.device) -> list[int]:
    """Return the bytes of this rank: used, allocated by tensors (peak), reserved by torch's allocator (peak).

    On a CPU only the used bytes are known, and the two other values are 0.
    """
    if device.type != "cuda":
        return [peak_resident_bytes(), 0, 0]
    free, total = torch.cuda.mem_get_info(device)
    statistics = torch.cuda.memory_stats(device)
    return [total - free, statistics["allocated_bytes.all.peak"], statistics["reserved_bytes.all.peak"]]


def peak_resident_bytes() -> int:
    """Return the peak of this process's resident memory."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Used on a system without /proc. The value can include the memory of the process that started this process.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
