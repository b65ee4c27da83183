"""Counts kernel launches, waits of the host and copies of a run's step, as evidence for its certificate."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from frontier_llm.certificate.axis_types.small import wide_copy
from frontier_llm.certificate.axis_types.trace import Site, innermost, is_own, package_path, text_of, visible
from frontier_llm.certificate.device_step.run import (
    DeviceStep,
    Launch,
    MixedDevices,
    NotCountable,
    UnloadedKernels,
    run_device_step,
)
from frontier_llm.config import RunConfig
from frontier_llm.errors import Problem, in_one_line
from frontier_llm.machine.load import load_machine
from frontier_llm.ops.kernel_table import ARCHITECTURES
from frontier_llm.ops.prebuilt import Kernels

NOT_COUNTED = "launches, waits and copies were not counted"


@dataclass(frozen=True)
class DeviceCounts:
    """Evidence and problems of the step on the meta device, and its counts by line for programs."""

    evidence: tuple[str, ...]
    problems: tuple[Problem, ...] = ()
    by_line: Mapping[str, Any] = field(default_factory=dict)


def count_device_step(config: RunConfig, world_size: int) -> DeviceCounts:
    """Run the step of the first rank of each pipeline stage and return its counts.

    Refuses mixed devices, and arguments that torch.distributed refuses.
    """
    architecture = load_machine(config.machine).device.architecture
    if architecture not in ARCHITECTURES:
        return DeviceCounts((f"{NOT_COUNTED}: machine={config.machine} names no GPU with kernels of this project",))
    if dist.is_initialized():
        return DeviceCounts((f"{NOT_COUNTED}: this process already has a process group",))
    kernels = UnloadedKernels(architecture)
    copy = wide_copy(config, world_size, 1)
    try:
        steps = [run_device_step(copy, stage, kernels) for stage in range(copy.parallel.pipeline)]
        layer = launches_of_a_layer(config, world_size, kernels)
    except NotCountable as error:
        return DeviceCounts((f"{NOT_COUNTED}: {error}",))
    except MixedDevices as error:
        fix = "create the tensor on the device of the rank, or move it there once, before the step"
        return DeviceCounts((), (Problem(error.line, str(error), fix),))
    except Exception as error:  # for example a plugin that reads values of tensors, which meta tensors do not have
        return _failed(error)
    microbatches = copy.batch.global_batch // (copy.batch.micro_batch * (copy.parallel.data or 1))
    waits, copies = _waits(steps), _copies(steps)
    evidence = [_layer_words(layer)]
    evidence += [f"the host waits for the device {_often(wait, microbatches)}" for wait in waits.items()]
    evidence += [f"copy {_often(copied, microbatches)}" for copied in copies.items()]
    by_line = {
        "launches_of_a_layer": _by_line(layer),
        "waits": {place: count for (_, place), count in waits.items()},
        "copies": {place: count for (_, place), count in copies.items()},
    }
    return DeviceCounts(tuple(evidence), by_line=by_line)


def launches_of_a_layer(config: RunConfig, world_size: int, kernels: Kernels) -> Counter[Launch]:
    """Return the launches of a microbatch that one more layer adds, on the last pipeline stage.

    Gradients of different ranks are summed after the last microbatch, so they do not count. Raises as
    `run_device_step`.
    """
    config = config.model_copy(update={"comm": config.comm.model_copy(update={"overlap_gradients": False})})
    counts = []
    for layers in (2, 3):
        copy = wide_copy(config, world_size, layers)
        step = run_device_step(copy, copy.parallel.pipeline - 1, kernels)
        counts.append(step.launches)
    microbatches = copy.batch.global_batch // (copy.batch.micro_batch * (copy.parallel.data or 1))
    added = (counts[1] - counts[0]).items()
    runs = microbatches * copy.parallel.chunks
    return Counter({launch: count // runs for launch, count in added if launch.phase and count >= runs})


def _layer_words(layer: Counter[Launch]) -> str:
    parts = []
    for phase in ("forward", "backward"):
        ours, others = (
            sum(count for launch, count in layer.items() if launch.phase == phase and launch.is_ours == is_ours)
            for is_ours in (True, False)
        )
        parts.append(f"{phase} {ours} kernels of this project and {others} operations of torch")
    return f"a layer launches for each microbatch: {', '.join(parts)}"


def _by_line(layer: Counter[Launch]) -> dict[str, dict[str, int]]:
    lines: dict[str, Counter[str]] = {}
    for launch, count in layer.items():
        lines.setdefault(launch.line, Counter())["ours" if launch.is_ours else "torch"] += count
    return {line: dict(counts) for line, counts in lines.items()}


def _waits(steps: Iterable[DeviceStep]) -> dict[tuple[str, str], int]:
    """Return (phase, place) → waits on the stage that has the most."""
    return _most(Counter((wait.phase, f"at {wait.line}") for wait in step.waits) for step in steps)


def _copies(steps: Iterable[DeviceStep]) -> dict[tuple[str, str], int]:
    def count(step: DeviceStep) -> Counter[tuple[str, str]]:
        counts: Counter[tuple[str, str]] = Counter()
        for copy, number in step.copies.items():
            direction = "to the device" if copy.to_device else "to the host"
            counts[copy.phase, f"{direction}{'' if copy.waits else ', without a wait,'} at {copy.line}"] += number
        return counts

    return _most(map(count, steps))


def _most(counts: Iterable[Counter[tuple[str, str]]]) -> dict[tuple[str, str], int]:
    largest: Counter[tuple[str, str]] = Counter()
    for count in counts:
        largest |= count
    return dict(sorted(largest.items()))


def _often(found: tuple[tuple[str, str], int], microbatches: int) -> str:
    (phase, place), count = found
    if phase:
        return f"{place}: {count / microbatches:g} in the {phase} of each microbatch"
    return f"{place}: {count} in each step"


def _failed(error: Exception) -> DeviceCounts:
    """Refuse arguments that torch.distributed refuses. Any other error only means that the step was not counted."""
    frames: Site = tuple((frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__))[::-1]
    message = in_one_line(error)
    own = innermost(frames)
    if own is not None and package_path(own[0].co_filename).startswith("comm/"):
        line = text_of(visible(tuple(filter(is_own, frames))) or own)
        return DeviceCounts((), (Problem(line, f"torch.distributed refuses the call: {message}"),))
    return DeviceCounts((f"{NOT_COUNTED}: {text_of(own)}: {message}",))
