"""Selects and checks the device of a rank, and collects its facts, which must be equal on all ranks."""

from __future__ import annotations

import ctypes
import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from frontier_llm import log
from frontier_llm.config import RunConfig
from frontier_llm.config.validate import FLUSHING, fp16_note
from frontier_llm.errors import FrontierError
from frontier_llm.failpoints import hit
from frontier_llm.libraries import libraries_digest
from frontier_llm.machine.env import Vendor
from frontier_llm.machine.load import load_machine
from frontier_llm.machine.precision import problem_on_cpu, problem_on_gpu
from frontier_llm.machine.schema import Device
from frontier_llm.ops.driver import architecture_of_device
from frontier_llm.ops.manifest import manifest_digest
from frontier_llm.run.launchers import RankEnv
from frontier_llm.run.rank_env import node_name
from frontier_llm.topology.engine_rules import in_flight_problem
from frontier_llm.training.installed import torch_facts
from frontier_llm.units import MIB

VENDOR_NAMES: dict[Vendor, str] = {"amd": "AMD", "nvidia": "NVIDIA"}
_BUILDS: dict[Vendor, str] = {"amd": "ROCm", "nvidia": "CUDA"}  # torch build for the GPUs of each vendor
_LOCKS: dict[str, TextIO] = {}  # locks of GPUs that this process holds


class DeviceError(FrontierError):
    """This rank cannot use the device that the run expects."""

    def __init__(self, fact: str, what: str, fix: str) -> None:
        """`fact` describes the fault in words that are equal on every rank and host with the same fault."""
        super().__init__(what, fix)
        self.fact = fact


@dataclass(frozen=True)
class Found:
    """The device and software that `find_device` has found for a rank."""

    device: torch.device | None  # None if the device cannot be used
    facts: dict[str, str]  # Facts by name. Each value must be equal on all ranks.
    error: FrontierError | None = None  # reason that the device cannot be used; None if it can

    @property
    def architecture(self) -> str | None:
        """Architecture of the GPU, such as 'gfx90a'. None for a CPU and for a device that cannot be used."""
        return self.facts["device"] if self.device is not None and self.device.type == "cuda" else None


def find_device(config: RunConfig, place: RankEnv | None, folder: Path | None) -> Found:
    """Return this rank's device, or the reason that it cannot be used.

    `folder` is the job's own folder on this node, for locks.
    """
    device: torch.device | None = None
    error: FrontierError | None = None
    try:
        hit("start.device")
        device = choose_device(config, place, folder)
        fact = "cpu" if device.type == "cpu" else architecture_of_device(device.index)
    except DeviceError as refused:
        error = refused
        fact = refused.fact
    except RuntimeError as failed:  # torch raises RuntimeError for a GPU that is broken or in use
        fact = str(failed).partition("\n")[0]
        fix = "exclude the node and report it to the site (rocm-smi or nvidia-smi there), or set train.device=cpu"
        rank = place.rank if place else 0
        error = FrontierError(f"the GPU of rank {rank} on {node_name()} cannot be used: {fact}", fix, "train.device")
    expected = load_machine(config.machine).device.architecture or ""
    architecture = expected if device is None else fact
    facts = {
        "device": fact,
        "torch": torch_facts().describe(),
        "kernels": manifest_digest(architecture)[:16] or "none",
        "libraries": libraries_digest()[:16],
        "precision": config.precision.dtype,
    }
    return Found(device, facts, error)


def choose_device(config: RunConfig, place: RankEnv | None, folder: Path | None) -> torch.device:
    """Select the CPU or this rank's GPU.

    If one GPU is visible (srun --gpus-per-task=1), use it. Otherwise the local rank is the index of the GPU.
    `train.device: cpu` selects the CPU without any check. Raises DeviceError if the GPU is of another type than the
    machine file names, if the run's engine needs more communications in flight than this GPU may have, or if the
    device does not support the working precision.
    """
    wanted = config.train.device
    if wanted == "cpu":
        return _cpu(config)
    expected = load_machine(config.machine).device
    _check_build(config, expected)
    if not torch.cuda.is_available():
        if wanted == "auto" and expected.vendor == "none":
            return _cpu(config)
        raise DeviceError(
            "no GPU",
            f"{torch_facts().describe()} on {node_name()} sees no GPU, but {_expectation(config, expected)}",
            "check the modules, the container and ROCR_VISIBLE_DEVICES, or set train.device=cpu, which computes on "
            "CPUs without any check",
        )
    visible = torch.cuda.device_count()
    # If the launcher gives each rank its own GPU, only one GPU is visible, and this check does not apply.
    if place is not None and 1 < visible < place.local_world_size:
        raise DeviceError(
            f"{visible} GPUs",
            f"{place.local_world_size} ranks on {place.hostname}, where torch sees {visible} GPUs",
            f"start {visible} ranks per node, or request one GPU per rank from the scheduler",
        )
    index = (place.local_rank if place else 0) % visible
    torch.cuda.set_device(index)
    architecture = architecture_of_device(index)
    if expected.vendor != "none" and expected.architecture not in (None, architecture):
        raise DeviceError(
            architecture,
            f"{torch.cuda.get_device_name(index)} on {node_name()} has the architecture {architecture}, but "
            f"{_expectation(config, expected)}",
            "set machine= to the machine of these nodes, or correct device.architecture in the machine file",
        )
    if place is not None and folder is not None and visible < place.local_world_size:
        _take_gpu(place, folder, torch.cuda.get_device_properties(index))
    _use(index)
    if problem := in_flight_problem(config, architecture):
        raise DeviceError(architecture, problem.what, problem.fix)
    if problem := problem_on_gpu(config):
        raise DeviceError(architecture, problem.what, problem.fix)
    if place is None or place.rank == 0:
        for note in (fp16_note(config.precision, architecture == FLUSHING), _in_flight_note(config, architecture)):
            if note:
                log.warn(note)
    return torch.device("cuda", index)


def _cpu(config: RunConfig) -> torch.device:
    if problem := problem_on_cpu(config):
        raise DeviceError("fp16 on a CPU", problem.what, problem.fix)
    return torch.device("cpu")


def _in_flight_note(config: RunConfig, architecture: str) -> str:
    """Return a warning if the run file sets a mode of communication that is not known to be safe on this GPU.

    Otherwise return ''.
    """
    rule = load_machine(config.machine).in_flight_on(architecture)
    if config.comm.in_flight != "many" or rule.mode == "many":
        return ""
    return (
        f"comm.in_flight=many may hang on {architecture}: {rule.source}. "
        f"Test it (frontier-llm bench comm RUN --hang-test), or set comm.in_flight=auto"
    )


def _check_build(config: RunConfig, expected: Device) -> None:
    """Raise DeviceError if this torch cannot use GPUs of the expected vendor."""
    build = torch_facts()
    if expected.vendor in ("none", build.vendor):
        return
    raise DeviceError(
        "torch of another vendor",
        f"{build.describe()} on {node_name()} cannot use {VENDOR_NAMES[expected.vendor]} GPUs, but "
        f"{_expectation(config, expected)}",
        f"install the {_BUILDS[expected.vendor]} build of torch (docs/first_day.md), or set FRONTIER_LLM_PYTHON to "
        f"the Python that has it; "
        "on another computer, set machine=local; to compute on CPUs without any check, set train.device=cpu",
    )


def _expectation(config: RunConfig, expected: Device) -> str:
    """Return, for example, 'train.device=auto means an AMD GPU (gfx90a) on machine=frontier'."""
    if expected.vendor == "none":
        return f"train.device={config.train.device} needs one"
    architecture = f" ({expected.architecture})" if expected.architecture else ""
    return (
        f"train.device={config.train.device} means an {VENDOR_NAMES[expected.vendor]} GPU{architecture} on "
        f"machine={config.machine}"
    )


def _use(index: int) -> None:
    """Compute once on a GPU, so that a broken GPU fails here. Raises RuntimeError with torch's message."""
    torch.ones(1, device=f"cuda:{index}").add_(1.0).item()


def _take_gpu(place: RankEnv, folder: Path, properties: Any) -> None:
    """Lock this rank's only visible GPU for this process. The PCI bus address identifies the GPU.

    Raises DeviceError if another rank of the job holds the lock.
    """
    where = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    # torch before 2.8 lacks these properties. The communicator then refuses duplicate GPUs later, with another message.
    if None in where:
        return
    path = str(folder / f"gpu-{'-'.join(map(str, where))}.lock")
    if path in _LOCKS:
        return
    lock = open(path, "w", encoding="utf-8")  # noqa: SIM115 held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise DeviceError(
            "one GPU for several ranks",
            f"local rank {place.local_rank} on {place.hostname} sees one GPU (bus {where[1]:#04x}), which another "
            f"rank of this job already uses",
            "give each rank its own GPU (srun --gpus-per-task=1), or all GPUs of the node (unset ROCR_VISIBLE_DEVICES, "
            "CUDA_VISIBLE_DEVICES)",
        ) from error
    _LOCKS[path] = lock


# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = -1
_LARGEST_KEPT_BYTES = 32 * MIB  # largest value that glibc accepts


def keep_freed_memory() -> None:
    """Keep freed blocks of up to 32 MiB in this process. Does nothing if the C library is not glibc.

    By default glibc returns the top of its heap to the system if free memory at the top reaches twice the largest
    block. The end of each backward pass reaches this limit. The next step then has 38,000 page faults, which cost 3 to
    5 % of its CPU time (bench-l8-h384, bf16).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
