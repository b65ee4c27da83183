"""Who watches a run from inside: TensorBoard, Weights & Biases, MLflow, the profiler, and whatever a plugin registers.

    class Plateau(observers.Observer):
        def record(self, kind, step, values):
            ...
    observers.register("plateau", Plateau)               # train.observers: [plateau]

`metrics.jsonl` is the run's own record and no observer: it is always written, and `status`, `report` and `scaling` read
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError, suggest

if TYPE_CHECKING:  # both import metrics, which hands its lines on to observers
    from frontier_llm.training.build import TrainState
    from frontier_llm.training.step import StepResult


class Observer:
    """Watches one process of a run; a method that is left out does nothing. What it raises ends the run, but for
    OSError in `record`.
    """

    def __init__(self, config: RunConfig) -> None:
        """Made before the first step."""

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Rank 0: a line of metrics.jsonl. A `start` or `rewind` takes back what was told of steps after `step`."""

    def before_step(self, state: TrainState) -> None:
        """The next step is `state.current_step`, counted from 0."""

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """`state.current_step` steps are done. Weights and gradients may be read, not changed."""

    def close(self) -> None:
        """The run ends here, whatever the reason."""


_MAKERS: dict[str, tuple[Callable[[RunConfig], Observer], bool]] = {}


def register(name: str, make: Callable[[RunConfig], Observer], *, every_rank: bool = False) -> None:
    """Make `train.observers: [name]` mean this one, on rank 0 or on every rank."""
    _MAKERS[name] = make, every_rank


def check(config: RunConfig) -> None:
    """Raise ConfigError with the nearest name for one that nobody registered."""
    for name in config.train.observers:
        if name not in _MAKERS:
            raise ConfigError(f"{name!r} is no observer that was registered", suggest(name, _MAKERS), "train.observers")


def make(config: RunConfig, rank: int) -> list[Observer]:
    """This rank's observers of the run, in the run file's order."""
    check(config)
    wanted = (
        ("tensorboard",) * config.train.tensorboard
        + ("profiler",) * (config.train.profile is not None)
        + config.train.observers
    )
    makers = [_MAKERS[name] for name in dict.fromkeys(wanted)]
    return [maker(config) for maker, every_rank in makers if every_rank or rank == 0]


def scalars(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line under names such as 'step/loss' and 'step/phases_s/forward'."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        for part, number in (value if isinstance(value, dict) else {"": value}).items():
            if isinstance(number, int | float):
                numbers["/".join(filter(None, (kind, name, part)))] = number
    return numbers


def _imported(module: str, name: str) -> Callable[[RunConfig], Observer]:
    """A maker that imports its observer when a run asks for it: none of their packages is a requirement."""
    return lambda config: getattr(import_module(f"{__name__}.{module}"), name)(config)


register("tensorboard", _imported("tensorboard", "Events"))
register("wandb", _imported("weights_and_biases", "WeightsAndBiases"))
register("mlflow", _imported("mlflow_runs", "MlflowRun"))
register("profiler", _imported("profiler", "Profiler"), every_rank=True)
