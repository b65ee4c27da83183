"""Observers of a run: TensorBoard, Weights & Biases, MLflow, the profiler, and observers that a plugin registers.

    class Plateau(observers.Observer):
        def record(self, kind, step, values):
            ...
    observers.register("plateau", Plateau)               # train.observers: [plateau]

`metrics.jsonl` is the run's own record and not an observer. It is always written, and `status`, `report` and `scaling`
read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError, suggest

if TYPE_CHECKING:  # both import metrics, which sends its lines to observers
    from frontier_llm.training.build import TrainState
    from frontier_llm.training.step import StepResult


class Observer:
    """Base class of observers of one process of a run. Methods that a subclass leaves out do nothing.

    An exception of an observer ends the run, except for OSError in `record`.
    """

    def __init__(self, config: RunConfig) -> None:
        """Called before the first step."""

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Receive a line of metrics.jsonl, on rank 0.

        A `start` or `rewind` invalidates earlier lines about steps after `step`.
        """

    def before_step(self, state: TrainState) -> None:
        """Called before the step with number `state.current_step`, counted from 0."""

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Called after a step, when `state.current_step` steps are done. Weights and gradients may be read, not
        changed.
        """

    def close(self) -> None:
        """Called at the end of the run, also after an error."""


_MAKERS: dict[str, tuple[Callable[[RunConfig], Observer], bool]] = {}


def register(name: str, make: Callable[[RunConfig], Observer], *, every_rank: bool = False) -> None:
    """Register an observer, so that `train.observers: [name]` creates it on rank 0 or on every rank."""
    _MAKERS[name] = make, every_rank


def check(config: RunConfig) -> None:
    """Raise ConfigError with the nearest name if a name of `train.observers` is not registered."""
    for name in config.train.observers:
        if name not in _MAKERS:
            raise ConfigError(f"{name!r} is not a registered observer", suggest(name, _MAKERS), "train.observers")


def make(config: RunConfig, rank: int) -> list[Observer]:
    """Return this rank's observers of the run: TensorBoard and the profiler if enabled, then the run file's, in its
    order.
    """
    check(config)
    wanted = (
        ("tensorboard",) * config.train.tensorboard
        + ("profiler",) * (config.train.profile is not None)
        + config.train.observers
    )
    makers = [_MAKERS[name] for name in dict.fromkeys(wanted)]
    return [maker(config) for maker, every_rank in makers if every_rank or rank == 0]


def scalars(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line under names such as 'step/loss' and 'step/phases_s/forward'."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        for part, number in (value if isinstance(value, dict) else {"": value}).items():
            if isinstance(number, int | float):
                numbers["/".join(filter(None, (kind, name, part)))] = number
    return numbers


def _imported(module: str, name: str) -> Callable[[RunConfig], Observer]:
    """Return a maker that imports its observer only if a run uses it, because its package is not a requirement."""
    return lambda config: getattr(import_module(f"{__name__}.{module}"), name)(config)


register("tensorboard", _imported("trackers", "Events"))
register("wandb", _imported("trackers", "WeightsAndBiases"))
register("mlflow", _imported("trackers", "MlflowRun"))
register("profiler", _imported("profiler", "Profiler"), every_rank=True)
