"""Checks a run in one process, within seconds, before any rank starts: layout, data, run directory, disk."""

from __future__ import annotations

from pathlib import Path

from frontier_llm import log
from frontier_llm.config import RunConfig, phase_note, phases_of, warmup_note
from frontier_llm.data.position import START, Position
from frontier_llm.errors import ConfigError
from frontier_llm.machine.env import GPU_FILES
from frontier_llm.run.run_dir import STOP_FILE
from frontier_llm.units import format_bytes, plural


def check(config: RunConfig, world_size: int, saves: bool = True, position: Position = START) -> None:
    """Refuse a run that would fail on the ranks, and log its layout.

    `position` is the run's position in its data. With `saves`, the disk must also have space for checkpoints.
    Raises ConfigError or another FrontierError with all problems.
    """
    from frontier_llm.certificate.configuration import configuration_problems
    from frontier_llm.certificate.named_code import code_problems
    from frontier_llm.certificate.restart import package_problems
    from frontier_llm.cluster.disk import free_space, run_dir_problems, space_problems
    from frontier_llm.data.summary import log_datasets
    from frontier_llm.topology.plan import make_plan, plan_problems

    problems = configuration_problems(config, plan_problems(config, world_size), world_size, position)
    directory = Path(config.train.run_dir)
    unwritable = run_dir_problems(directory)
    problems += unwritable
    if saves and not unwritable:
        problems += space_problems(config, free_space(directory / "checkpoints"), world_size)
    problems += package_problems(config)
    if problems:
        raise ConfigError(problems)
    plan = make_plan(config, world_size)
    if problems := list(code_problems(config, plan.microbatches)):
        raise ConfigError(problems)
    log.info(f"{config.model.name}: {plan.describe()}, {plural(world_size, 'rank')}")
    if config.train.phases:
        for phase in phases_of(config):
            log.info(phase.describe())
    log_datasets(config, position)
    for note in filter(None, (warmup_note(config), phase_note(config))):
        log.warn(note)


def require_data(config: RunConfig) -> None:
    """Raise ConfigError with the problems of the run's data and tokenizer, before a command starts ranks."""
    from frontier_llm.data.loader import data_problems

    if problems := data_problems(config):
        raise ConfigError(problems)


def check_start(config: RunConfig, world_size: int) -> None:
    """Check that ranks can start on this computer.

    Raises ConfigError if a STOP file exists, if a GPU is missing, or if the state without activations exceeds the
    memory.
    """
    from frontier_llm.blueprint.layout import DTYPE_BYTES, statistics_bytes
    from frontier_llm.blueprint.optimizers import state_bytes
    from frontier_llm.blueprint.parameters import total_parameters

    stop = Path(config.train.run_dir) / STOP_FILE
    if stop.exists():  # STOP is checked only here; in a job, the supervisor handles the file
        raise ConfigError(
            "exists, so the run would end after its next step",
            f"rm {stop}",
            str(stop),
        )
    has_gpu = any(Path(gpu).exists() for gpu in GPU_FILES.values())
    _check_driver(config)
    if has_gpu:
        return
    parallel = config.parallel
    dtype = config.precision.dtype
    whole = parallel.data_mode == "zero" and parallel.zero < 2  # each replica holds all weights and gradients
    replicas = world_size // parallel.model_ranks if whole else 1
    # bytes of the weights and gradients of one replica
    per_replica = (DTYPE_BYTES[dtype] + statistics_bytes(dtype)) * total_parameters(config.model)
    needed_bytes = replicas * per_replica + state_bytes(config.model, config.optimizer.name, dtype)
    held_bytes = available_bytes()
    if needed_bytes > held_bytes:
        what = (
            f"weights, gradients and optimizer state of {plural(world_size, 'rank')} take {format_bytes(needed_bytes)}"
        )
        fix = "use a smaller model, or find a larger machine: frontier-llm plan --run RUN --machine frontier"
        raise ConfigError(
            f"{what}, but this computer has {format_bytes(held_bytes)} of free memory and no GPU",
            fix,
            "model",
        )


def _check_driver(config: RunConfig) -> None:
    """Raise ConfigError if the run needs a GPU whose driver this computer does not have."""
    from frontier_llm.machine.load import load_machine

    device = config.train.device
    vendor = load_machine(config.machine).device.vendor
    if device == "cpu" or (device == "auto" and vendor == "none"):
        return
    needed = list(GPU_FILES.values()) if vendor == "none" else [GPU_FILES[vendor]]
    if any(Path(file).exists() for file in needed):
        return
    raise ConfigError(
        f"is {device}, which means a GPU on machine={config.machine}, but this computer has none "
        f"({' and '.join(needed)} missing)",
        "set machine=local for this computer, or train.device=cpu, or submit the run to nodes that have the GPU",
        "train.device",
    )


def available_bytes() -> int:
    """Return the memory that is available to programs, as Linux estimates it."""
    line = next(
        line
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        if line.startswith("MemAvailable:")
    )
    return int(line.split()[1]) * 1024
