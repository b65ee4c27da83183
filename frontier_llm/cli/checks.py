"""Checks a run in one process, within seconds, before any rank starts: layout, data, run directory, disk."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from frontier_llm import log
from frontier_llm.config import RunConfig, phase_note, phases_of, saves_between, warmup_note
from frontier_llm.data.position import START, Position
from frontier_llm.errors import ConfigError, FrontierError, Problem, not_installed, suggest
from frontier_llm.machine.env import GPU_FILES
from frontier_llm.run.run_dir import STOP_FILE
from frontier_llm.units import format_bytes, plural


def check(config: RunConfig, world_size: int, saves: bool = True, position: Position = START) -> None:
    """Refuse a run that would fail on the ranks, and log its layout.

    `position` is the run's position in its data. With `saves`, the disk must also have space for checkpoints.
    Raises ConfigError or another FrontierError with all problems.
    """
    from frontier_llm.data.loader import data_problems
    from frontier_llm.data.summary import log_datasets
    from frontier_llm.topology.plan import make_plan, plan_problems
    from frontier_llm.training import observers

    problems = [
        *_package_problems(config),
        *plan_problems(config, world_size),
        *data_problems(config, position),
        *_named_file_problems(config),
    ]
    problems += [*_profile_problems(config, world_size), *_best_problems(config), *_task_problems(config)]
    problems += _run_dir_problems(Path(config.train.run_dir)) or (_space_problems(config, world_size) if saves else [])
    if problems:
        raise ConfigError(problems)
    plan = make_plan(config, world_size)
    if config.train.loss_weights:
        from frontier_llm.model import losses  # imports torch, which takes seconds

        losses.select(config.train.loss_weights)
    observers.check(config)
    if config.optimizer.engine == "deepspeed":
        _check_deepspeed(config, plan.microbatches)
    log.info(f"{config.model.name}: {plan.describe()}, {plural(world_size, 'rank')}")
    if config.train.phases:
        for phase in phases_of(config):
            log.info(phase.describe())
    log_datasets(config, position)
    for note in filter(None, (warmup_note(config), phase_note(config))):
        log.warn(note)


def _package_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield missing packages that the ranks need.

    A missing `tensorboard` is only a problem if the run file sets train.tensorboard. By default, events are left out.
    """
    if importlib.util.find_spec("torch") is None:
        yield not_installed("torch")
    if config.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
        missing = not_installed("tensorboard", "train.tensorboard")
        if "tensorboard" in config.train.model_fields_set:
            yield replace(missing, fix=f"{missing.fix}, or set train.tensorboard=false")
        else:
            log.info(
                "tensorboard is not installed: no events are written, metrics.jsonl has the same numbers (pip "
                "install tensorboard)"
            )
    for name in {"wandb", "mlflow"}.intersection(config.train.observers):
        if importlib.util.find_spec(name) is None:
            yield not_installed(name, "train.observers")


def _profile_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Yield profiled steps and ranks that the run does not have."""
    profile = config.train.profile
    steps = config.train.steps
    if profile is None:
        return
    if profile.range[-1] > steps:
        yield Problem(
            where="train.profile.steps",
            what=f"{profile.steps} ends after the last step of the run, {steps}",
            fix=f"end the range at {steps}",
        )
    if missing := [rank for rank in profile.ranks if rank >= world_size]:
        yield Problem(
            where="train.profile.ranks",
            what=f"the run has no rank {missing[0]}",
            fix=f"name ranks from 0 to {world_size - 1}",
        )


def _best_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if `keep_best` is set and names an unknown held-out set, or no step is evaluated before the
    end."""
    best = config.train.keep_best
    sets = list(config.data.held_out)
    if best is not None and best not in sets:
        yield Problem(
            where="train.keep_best", what=f"{best!r} is not a held-out set of this run", fix=suggest(best, sets)
        )
    elif best is not None and not config.train.eval_interval:
        yield Problem(
            where="train.keep_best",
            what="the run has only one evaluation, at its end, so there is no choice of checkpoints",
            fix="set train.eval_interval=100",
        )


def _task_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of question files: unreadable files, or text without a tokenizer."""
    from frontier_llm.inference.tasks import read_task, requests

    tasks = config.train.eval_tasks
    if tasks and config.data.tokenizer is None:
        fix = "set data.tokenizer to the tokenizer that made the data"
        yield Problem(where="train.eval_tasks", what="questions are text, but the run has no tokenizer", fix=fix)
    for name, task in tasks.items():
        try:
            requests(read_task(name, task.path, task.limit), task.shots)
        except FrontierError as error:
            yield from (
                replace(problem, where=f"train.eval_tasks.{name}: {problem.where}") for problem in error.problems
            )


def check_start(config: RunConfig, world_size: int) -> None:
    """Refuse to start ranks on this computer in vain.

    Raises ConfigError if a STOP file exists, if a GPU is missing, or if the state without activations exceeds the
    memory.
    """
    from frontier_llm.blueprint.layout import DTYPE_BYTES, statistics_bytes
    from frontier_llm.blueprint.optimizers import state_bytes
    from frontier_llm.blueprint.parameters import total_parameters

    stop = Path(config.train.run_dir) / STOP_FILE
    if stop.exists():  # only checked here: in a job, the supervisor handles the file
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
    # weights and gradients
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


def check_resume(config: RunConfig, allowed: Sequence[str]) -> None:
    """Raise an error if the newest checkpoint was made with other mathematics than `config`.

    The keys in `allowed` can differ.
    """
    checkpoints = Path(config.train.run_dir) / "checkpoints"
    if any(checkpoints.glob("step_*")):  # importing torch takes two seconds
        from frontier_llm.checkpoint import inspect

        inspect.check_resume(checkpoints, config, allowed)


def _check_deepspeed(config: RunConfig, microbatches: int) -> None:
    from frontier_llm.config.deepspeed import INSTALL, deepspeed_settings
    from frontier_llm.ops.deepspeed_ops import missing_ops
    from frontier_llm.run.rank_env import environment

    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "deepspeed is not installed",
            f"{INSTALL}, or set optimizer.engine=native",
            "optimizer.engine",
        )
    deepspeed_settings(config, microbatches)
    if problems := list(missing_ops(config, environment())):
        raise ConfigError(problems)


def _named_file_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of the machine file and of the algorithm table of the run."""
    from frontier_llm.config.load import find_file
    from frontier_llm.machine.load import load_machine

    try:
        load_machine(config.machine)
    except FrontierError as error:
        yield from error.problems
    try:
        if config.comm.algorithms not in ("flat", "hierarchical"):
            find_file(config.comm.algorithms, "algorithms")
    except FrontierError as error:
        yield from (replace(problem, where="comm.algorithms") for problem in error.problems)


def _run_dir_problems(run_dir: Path) -> list[Problem]:
    others = run_dir / "config.yaml"
    if others.is_file() and not any((run_dir / name).exists() for name in ("plan.json", "checkpoints")):
        what = f"{others} does not belong to a run, and a run there would overwrite it"
        return [Problem(where="train.run_dir", what=what, fix="rename that file, or choose another directory")]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        file = next((path for path in (run_dir, *run_dir.parents) if path.is_file()), None)
        why = f"{file} is a file" if file else error.strerror
        return [
            Problem(
                where="train.run_dir",
                what=f"{run_dir} cannot be written: {why}",
                fix="choose a directory you can write to",
            )
        ]
    return []


LOG_BYTES = 2**20  # space for logs


def _space_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """Return a problem if the disk has too few bytes or files for logs and the first checkpoints of this start.

    The first checkpoints are those that the start writes before it can delete an old one.
    """
    from frontier_llm.blueprint.optimizers import state_bytes

    train = config.train
    checkpoints = Path(train.run_dir) / "checkpoints"
    existing = len(list(checkpoints.glob("step_????????"))) if checkpoints.is_dir() else 0
    saves = saves_between(train, 0, train.steps)
    count = min(saves, 1 if existing >= train.keep_checkpoints else 2)
    needed_bytes = LOG_BYTES + count * state_bytes(config.model, config.optimizer.name, config.precision.dtype)
    # a log per rank; per checkpoint a shard of each rank, manifest, digest and folder
    needed_files = world_size + count * (world_size + 3)
    where = next(path for path in (checkpoints, *checkpoints.parents) if path.exists())
    disk = os.statvfs(where)
    free_bytes = disk.f_bavail * disk.f_frsize
    free_files = disk.f_favail
    # f_files is 0 on a file system without a table of files
    if needed_bytes <= free_bytes and (needed_files <= free_files or disk.f_files == 0):
        return []
    return [
        Problem(
            where="train.run_dir",
            what=f"logs and the first {plural(count, 'checkpoint')} need {format_bytes(needed_bytes)} and "
            f"{needed_files} files, but {where} has {format_bytes(free_bytes)} and {free_files} files free",
            fix="free space, raise the quota, or choose another train.run_dir",
        )
    ]
