"""Durations as people write them, "20B tokens" or "2 epochs", become optimizer steps before anything else reads the run
file.

A step of a phase takes its global batch times its sequence length in tokens; an epoch is every token of data.train
once, whatever the weights of a blend. What does not come out even is rounded up.

A run that has done steps counts those as they were, and the steps to come as the configuration says. So a run whose
batch has changed ends after the tokens that its run file names. `resolved` counts anew where a checkpoint is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from frontier_llm.config.fields import TokenSteps
from frontier_llm.config.token_files import stored_tokens
from frontier_llm.errors import ConfigError

if TYPE_CHECKING:
    from frontier_llm.config.schema import RunConfig

_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d{1,2})?)([kmbt]?) ?(steps?|tokens?|epochs?)", re.IGNORECASE)
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# counted from the run's first step
_FROM_START = (("train", "steps"), ("optimizer", "warmup_steps"), ("optimizer", "decay_steps"))
_INTERVALS = (
    ("train", "eval_interval"),
    ("train", "save_interval"),
    ("train", "keep_every"),
    ("train", "log_interval"),
)
ENDLESS = 10**12  # steps


Stretches = Sequence[tuple[int, int]]  # (steps, tokens per step), in the order in which they are trained


def resolved(config: RunConfig, done: Stretches) -> RunConfig:
    """A configuration whose durations in tokens are counted from the steps that a run has done."""
    from frontier_llm.config.schema import RunConfig

    durations = [config.train.steps, config.optimizer.warmup_steps, config.optimizer.decay_steps]
    if not done or not any(
        isinstance(value, TokenSteps) for value in [*durations, *(phase.steps for phase in config.train.phases)]
    ):
        return config
    content = config.model_dump(mode="json", exclude_unset=True)
    if config.train.phases and config.train.steps == sum(phase.steps for phase in config.train.phases):
        content["train"].pop("steps", None)  # it follows from the phases
    return RunConfig.model_validate(content, context=done)


def in_steps(content: Any, done: Stretches = ()) -> Any:
    """A run's mapping with whole steps in place of durations, and train.steps as the sum of its phases where it says
    nothing.

    `done`: the steps that the run has trained. What is no duration stays as it is, for the schema to judge. Raises
    ConfigError for an epoch of data that are not there, and for an interval in tokens where steps differ in size.
    """
    if not isinstance(content, Mapping) or not isinstance(train := content.get("train", {}), Mapping):
        return content
    phases = train.get("phases") or ()
    if not isinstance(phases, (list, tuple)):
        return content
    sizes = [_tokens_per_step(content, phase) for phase in phases or [{}]]
    if None in sizes:  # the schema says what is missing
        return content
    tokens_per_step = [size for size in sizes if size is not None]
    lengths = [ENDLESS]
    if phases:
        lengths = _phase_lengths(content, tokens_per_step, done)
        written = [
            {**phase, "steps": length} if isinstance(phase, Mapping) else phase
            for phase, length in zip(phases, lengths, strict=True)
        ]
        content = _with(content, "train", "phases", written)
        if not all(isinstance(length, int) and length > 0 for length in lengths):
            return content
        if "steps" not in train:
            content = _with(content, "train", "steps", sum(lengths))
    planned = list(zip([*lengths[:-1], ENDLESS], tokens_per_step, strict=True))
    return _of_run(content, planned, [*done, *_after(planned, sum(steps for steps, _ in done))])


def _phase_lengths(content: Mapping[str, Any], tokens_per_step: Sequence[int], done: Stretches) -> list[Any]:
    """Steps of each phase; what is neither a number of steps nor a duration stays as it is."""
    lengths: list[Any] = []
    for number, (phase, size) in enumerate(zip(content["train"]["phases"], tokens_per_step, strict=True)):
        data = _value(phase, "data", "train") or _value(content, "data", "train")
        first = sum(length for length in lengths if isinstance(length, int))
        length = _steps(
            f"train.phases.{number}.steps",
            _get(phase, "steps"),
            [*_after(done, first), (ENDLESS, size)],
            data,
        )
        lengths.append(length)
    return lengths


def _after(stretches: Stretches, steps: int) -> list[tuple[int, int]]:
    """The stretches without their first `steps` steps."""
    left = []
    for length, size in stretches:
        passed = min(length, steps)
        steps -= passed
        if length > passed:
            left.append((length - passed, size))
    return left


def _of_run(
    content: Mapping[str, Any],
    planned: list[tuple[int, int]],
    stretches: list[tuple[int, int]],
) -> Mapping[str, Any]:
    """Steps for what counts over the run. `planned`: the stretches of its phases; `stretches`: those that it has
    done, and the rest.
    """
    for section, key in _FROM_START:
        from_end = key == "decay_steps" and _value(content, "optimizer", "schedule") == "wsd"  # a length, not a place
        content = _resolved(
            content,
            section,
            key,
            _of_end(stretches, _value(content, "train", "steps")) if from_end else stretches,
        )
    for section, key in _INTERVALS:
        value = _value(content, section, key)
        if len({size for _, size in planned}) > 1 and isinstance(value, str) and "step" not in value:
            raise ConfigError(
                f"{value!r}, but the steps of the run's phases differ in size",
                "give it in steps",
                f"{section}.{key}",
            )
        content = _resolved(content, section, key, planned)
    return content


def _of_end(stretches: list[tuple[int, int]], end: Any) -> list[tuple[int, int]]:
    """The stretches of a run of `end` steps, from its end."""
    if not isinstance(end, int):
        return stretches
    lengths = []
    first = 0
    for length, size in stretches:
        lengths.append((max(0, min(length, end - first)), size))
        first += length
    return [*reversed(lengths)]


def _resolved(
    content: Mapping[str, Any],
    section: str,
    key: str,
    stretches: Iterable[tuple[int, int]],
) -> Mapping[str, Any]:
    value = _value(content, section, key)
    steps = _steps(f"{section}.{key}", value, stretches, _value(content, "data", "train"))
    if (section, key) in _INTERVALS and isinstance(steps, TokenSteps):
        steps = int(steps)
    return content if steps is value else _with(content, section, key, steps)


def _steps(where: str, value: Any, stretches: Iterable[tuple[int, int]], data: Any) -> Any:
    """Steps that a duration takes over stretches of (steps, tokens per step); the value itself where it is none."""
    match = _DURATION.fullmatch(_plain(value)) if isinstance(value, str) else None
    if match is None:
        return value
    number = float(match[1]) * _COUNTS[match[2].lower()]
    unit = match[3].lower().rstrip("s")
    if unit == "step":
        return math.ceil(number)
    tokens = math.ceil(number if unit == "token" else number * _epoch(where, data))
    left = tokens
    steps = 0
    for length, size in stretches:
        needed = -(-left // size)
        if needed <= length:
            return TokenSteps(steps + needed, tokens)
        steps = steps + length
        left = left - length * size
    return TokenSteps(steps, tokens)


def _epoch(where: str, data: Any) -> int:
    """Tokens of a blend, each once."""
    if data is None or data == "synthetic":
        raise ConfigError("counts epochs, and synthetic data has none", "give it in steps or tokens", where)
    sources = data if isinstance(data, (list, tuple)) else [data]
    total = 0
    for path in [source if isinstance(source, str) else _get(source, "path") for source in sources]:
        try:
            total += stored_tokens(str(path))
        except (OSError, ValueError, KeyError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is no Megatron dataset"
            raise ConfigError(
                f"counts epochs of {path}: {reason}",
                "make the data first, or give it in steps or tokens",
                where,
            ) from error
    return total


def _tokens_per_step(content: Any, phase: Any) -> int | None:
    sizes = [
        _value(phase, *key) or _value(content, *key)
        for key in (("batch", "global_batch"), ("model", "sequence_length"))
    ]
    if all(isinstance(size, int) and size > 0 for size in sizes):
        return sizes[0] * sizes[1]
    return None


def _plain(text: str) -> str:
    return text.strip().replace("_", "")


def _get(section: Any, key: str) -> Any:
    """Of a mapping, or of a section that has been validated."""
    if isinstance(section, Mapping):
        return section.get(key)
    return getattr(section, key, None)


def _value(content: Any, section: str, key: str) -> Any:
    return _get(_get(content, section), key)


def _with(content: Mapping[str, Any], section: str, key: str, value: Any) -> Mapping[str, Any]:
    old = content.get(section)
    return {**content, section: {**(old if isinstance(old, Mapping) else {}), key: value}}
