"""Converts durations such as "20B tokens" or "2 epochs" to optimizer steps, before the run file is validated.

A step of a phase processes global batch × sequence length tokens. One epoch has as many tokens as all datasets of
data.train together; the weights of the blend have no effect. Fractions of a step are rounded up.

A step that the run has already trained is counted with the tokens that were trained in it. A later step is counted with
the tokens per step of the configuration. A run whose batch has changed therefore still ends after the number of tokens
in its run file. When a run resumes from a checkpoint, `resolved` converts the durations again.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from frontier_llm.config.fields import TokenSteps, whole
from frontier_llm.config.token_files import stored_tokens
from frontier_llm.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from frontier_llm.config.schema import RunConfig

_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d{1,2})?)([kmbt]?) ?(steps?|tokens?|epochs?)", re.IGNORECASE)
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# Keys whose durations are counted from the run's first step.
_FROM_START = (("train", "steps"), ("optimizer", "warmup_steps"), ("optimizer", "decay_steps"))
_INTERVALS = (
    ("train", "eval_interval"),
    ("train", "save_interval"),
    ("train", "keep_every"),
    ("train", "log_interval"),
)
ENDLESS = 10**12  # steps


Stretches = Sequence[tuple[int, int]]  # (steps, tokens per step), in the order in which they are trained


def is_duration(key: str) -> bool:
    """Return whether the value of this key may be a number of tokens or epochs."""
    section, _, name = key.partition(".")
    return (section, name) in (*_FROM_START, *_INTERVALS) or re.fullmatch(r"train\.phases\.\d+\.steps", key) is not None


def without_durations(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Leave out errors of values such as "20B tokens". They stay text only if another value is wrong, such as the
    batch.
    """
    causes = []
    for error in errors:
        is_written = isinstance(error["input"], str) and _DURATION.fullmatch(_plain(error["input"])) is not None
        if not (is_written and is_duration(".".join(map(str, error["loc"])))):
            causes.append(error)
    return causes or errors


def resolved(config: RunConfig, done: Stretches) -> RunConfig:
    """Return the configuration with durations in tokens converted again. `done` are the steps that the run has
    trained.
    """
    from frontier_llm.config.schema import RunConfig

    durations = [config.train.steps, config.optimizer.warmup_steps, config.optimizer.decay_steps]
    if not done or not any(
        isinstance(value, TokenSteps) for value in [*durations, *(phase.steps for phase in config.train.phases)]
    ):
        return config
    return RunConfig.model_validate(as_content(config, exclude_unset=True), context=done)


def as_content(config: RunConfig, exclude_unset: bool = False) -> dict[str, Any]:
    """Return the keys of a run file for this configuration, with durations as they were written.

    `train.steps` is left out if it is the sum of phases and a phase is given in tokens or epochs: with another batch,
    the sum is another.
    """
    content = config.model_dump(mode="json", exclude_unset=exclude_unset)
    steps = [phase.steps for phase in config.train.phases]
    if any(isinstance(length, TokenSteps) for length in steps) and config.train.steps == sum(steps):
        content["train"].pop("steps", None)
    return content


def in_steps(content: Any, done: Stretches = ()) -> Any:
    """Return a run file's content with a number of steps in place of each duration.

    `done` are the steps that the run has trained. If train.steps is missing, it becomes the sum of the phases. A value
    that is not a duration stays unchanged, and the schema checks it.

    Raises ConfigError for epochs of data that do not exist. Raises it also for an interval in tokens if the phases'
    steps differ in size.
    """
    if not isinstance(content, Mapping) or not isinstance(train := content.get("train", {}), Mapping):
        return content
    phases = train.get("phases") or ()
    if not isinstance(phases, (list, tuple)):
        return content
    sizes = [_tokens_per_step(content, phase) for phase in phases or [{}]]
    if None in sizes:  # The schema reports the missing key.
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
    """Return the steps of each phase. A value that is neither a number of steps nor a duration stays unchanged."""
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
    """Return the stretches without their first `steps` steps."""
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
    """Convert the durations that are counted from the run's first step to steps.

    `planned` are the stretches of its phases. `stretches` are the steps that the run has done, followed by the rest of
    the plan.
    """
    for section, key in _FROM_START:
        # with wsd, decay_steps is the length of the decay and not the step at which it ends
        from_end = key == "decay_steps" and _value(content, "optimizer", "schedule") == "wsd"
        content = _resolved(
            content,
            section,
            key,
            _of_end(stretches, whole(_value(content, "train", "steps"))) if from_end else stretches,
        )
    for section, key in _INTERVALS:
        value = whole(_value(content, section, key))
        if len({size for _, size in planned}) > 1 and isinstance(value, str) and "step" not in value:
            raise ConfigError(
                f"is given as {value!r}, but the phases have steps of different sizes",
                "give it in steps",
                f"{section}.{key}",
            )
        content = _resolved(content, section, key, planned)
    return content


def _of_end(stretches: list[tuple[int, int]], end: Any) -> list[tuple[int, int]]:
    """Return the stretches of the first `end` steps, the last stretch first."""
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
    """Return the number of steps until `stretches` contain the tokens of a duration. A value that is neither a
    duration nor a whole number is returned unchanged.
    """
    match = _DURATION.fullmatch(_plain(value)) if isinstance(value, str) else None
    if match is None:
        return whole(value)
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
    """Return the number of tokens in the datasets of a blend, ignoring weights."""
    if data is None or data == "synthetic":
        raise ConfigError("is given in epochs, but synthetic data has no epochs", "give it in steps or tokens", where)
    sources = data if isinstance(data, (list, tuple)) else [data]
    total = 0
    for path in [source if isinstance(source, str) else _get(source, "path") for source in sources]:
        try:
            total += stored_tokens(os.path.expanduser(str(path)))
        except (OSError, ValueError, KeyError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a Megatron dataset"
            raise ConfigError(
                f"is given in epochs, but the dataset {path} cannot be read: {reason}",
                "create the dataset first, or give it in steps or tokens",
                where,
            ) from error
    return total


def _tokens_per_step(content: Any, phase: Any) -> int | None:
    sizes = [
        whole(_value(phase, *key) or _value(content, *key))
        for key in (("batch", "global_batch"), ("model", "sequence_length"))
    ]
    if all(isinstance(size, int) and size > 0 for size in sizes):
        return sizes[0] * sizes[1]
    return None


def _plain(text: str) -> str:
    return text.strip().replace("_", "")


def _get(section: Any, key: str) -> Any:
    """Return a value of a mapping, or of a section that is already validated."""
    if isinstance(section, Mapping):
        return section.get(key)
    return getattr(section, key, None)


def _value(content: Any, section: str, key: str) -> Any:
    return _get(_get(content, section), key)


def _with(content: Mapping[str, Any], section: str, key: str, value: Any) -> Mapping[str, Any]:
    old = content.get(section)
    return {**content, section: {**(old if isinstance(old, Mapping) else {}), key: value}}
