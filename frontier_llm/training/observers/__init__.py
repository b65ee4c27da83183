"""Observers of a run: TensorBoard, Weights & Biases, MLflow, the profiler, and observers that a plugin registers.

    class Plateau(observers.Observer):
        def record(self, kind, step, values):
            ...
    observers.register("plateau", Plateau)               # train.observers: [plateau]

`metrics.jsonl` is not written by an observer. Every run writes it, and the commands `status`, `report` and `scaling`
read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError, Problem, suggest

if TYPE_CHECKING:  # only for types: both modules import `metrics`, which imports this package
    from frontier_llm.training.build import TrainState
    from frontier_llm.training.step import StepResult


class Observer:
    """Base class of observers, which receive the metrics and steps of one rank. Methods do nothing by default.

    An exception in an observer ends the run, except for OSError in `record`.
    """

    def __init__(self, config: RunConfig) -> None:
        """Called before the first step."""

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Receive a line of metrics.jsonl. Called on rank 0 only.

        A line of kind `start` or `rewind` makes earlier lines about steps after `step` invalid.
        """

    def before_step(self, state: TrainState) -> None:
        """Called before the step with number `state.current_step`, counted from 0."""

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Called after each step, when `state.current_step` steps are done.

        Weights and gradients may be read, but must not be changed.
        """

    def close(self) -> None:
        """Called at the end of the run, also after an error."""


_MAKERS: dict[str, tuple[Callable[[RunConfig], Observer], bool]] = {}


def register(name: str, make: Callable[[RunConfig], Observer], *, every_rank: bool = False) -> None:
    """Register an observer. `train.observers: [name]` then creates it on rank 0, or with `every_rank` on all ranks."""
    _MAKERS[name] = make, every_rank


def problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each name in `train.observers` that is not registered.

    The problem suggests a similar name.
    """
    for name in config.train.observers:
        if name not in _MAKERS:
            yield Problem("train.observers", f"{name!r} is not a registered observer", suggest(name, _MAKERS))


def make(config: RunConfig, rank: int) -> list[Observer]:
    """Create this rank's observers: TensorBoard and the profiler if enabled, then `train.observers` in its order."""
    if unknown := list(problems(config)):
        raise ConfigError(unknown)
    wanted = (
        ("tensorboard",) * config.train.tensorboard
        + ("profiler",) * (config.train.profile is not None)
        + config.train.observers
    )
    makers = [_MAKERS[name] for name in dict.fromkeys(wanted)]
    return [maker(config) for maker, every_rank in makers if every_rank or rank == 0]


def scalars(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a line of metrics.jsonl by names such as 'step/loss' and 'step/phases_s/forward'."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        for part, number in (value if isinstance(value, dict) else {"": value}).items():
            if isinstance(number, int | float):
                numbers["/".join(filter(None, (kind, name, part)))] = number
    return numbers


def _imported(module: str, name: str) -> Callable[[RunConfig], Observer]:
    """Return a function that creates the observer `name` of `module`.

    The module is imported only if a run uses the observer, because its package may not be installed.
    """
    return lambda config: getattr(import_module(f"{__name__}.{module}"), name)(config)


register("tensorboard", _imported("trackers", "Events"))
register("wandb", _imported("trackers", "WeightsAndBiases"))
register("mlflow", _imported("trackers", "MlflowRun"))
register("profiler", _imported("profiler", "Profiler"), every_rank=True)
