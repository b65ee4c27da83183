"""Durations as people write them, "20B tokens" or "2 epochs", become optimizer steps before anything else reads the run file.

A step of a phase takes its global batch times its sequence length in tokens; an epoch is every token of data.train once, whatever the
weights of a blend. What does not come out even is rounded up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from frontier_llm.errors import ConfigError
from frontier_llm.token_files import stored_tokens

_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d{1,2})?)([kmbt]?) ?(steps?|tokens?|epochs?)", re.IGNORECASE)
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_FROM_START = (("train", "steps"), ("optimizer", "warmup_steps"), ("optimizer", "decay_steps"))  # counted from the run's first step
_INTERVALS = (("train", "eval_interval"), ("train", "save_interval"), ("train", "keep_every"), ("train", "log_interval"))
ENDLESS = 10**12  # steps


def in_steps(content: Any) -> Any:
    """A run's mapping with whole steps in place of durations, and train.steps as the sum of its phases where it says nothing.

    What is no duration stays as it is, for the schema to judge. Raises ConfigError for an epoch of data that are not there, and for an
    interval in tokens where steps differ in size.
    """
    if not isinstance(content, Mapping) or not isinstance(train := content.get("train", {}), Mapping):
        return content
    phases = train.get("phases") or ()
    if not isinstance(phases, (list, tuple)):
        return content
    sizes = [_tokens_per_step(content, phase) for phase in phases or [{}]]
    if None in sizes:  # the schema says what is missing
        return content
    tokens_per_step, lengths = [size for size in sizes if size is not None], [ENDLESS]
    if phases:
        lengths = [_phase_length(content, number, size) for number, size in enumerate(tokens_per_step)]
        written = [
            {**phase, "steps": length} if isinstance(phase, Mapping) else phase for phase, length in zip(phases, lengths, strict=True)
        ]
        content = _with(content, "train", "phases", written)
        if not all(isinstance(length, int) and length > 0 for length in lengths):
            return content
        if "steps" not in train:
            content = _with(content, "train", "steps", sum(lengths))
    return _of_run(content, list(zip([*lengths[:-1], ENDLESS], tokens_per_step, strict=True)))


def _phase_length(content: Mapping[str, Any], number: int, tokens_per_step: int) -> Any:
    phase = content["train"]["phases"][number]
    data = _value(phase, "data", "train") or _value(content, "data", "train")
    return _steps(f"train.phases.{number}.steps", _get(phase, "steps"), [(ENDLESS, tokens_per_step)], data)


def _of_run(content: Mapping[str, Any], stretches: list[tuple[int, int]]) -> Mapping[str, Any]:
    """Steps for what counts over the run, whose stretches are (steps, tokens per step)."""
    for section, key in _FROM_START:
        from_end = key == "decay_steps" and _value(content, "optimizer", "schedule") == "wsd"  # a length, not a place
        content = _resolved(content, section, key, _of_end(stretches, _value(content, "train", "steps")) if from_end else stretches)
    for section, key in _INTERVALS:
        value = _value(content, section, key)
        if len({size for _, size in stretches}) > 1 and isinstance(value, str) and "step" not in value:
            raise ConfigError(f"{value!r}, but the steps of the run's phases differ in size", "give it in steps", f"{section}.{key}")
        content = _resolved(content, section, key, stretches)
    return content


def _of_end(stretches: list[tuple[int, int]], end: Any) -> list[tuple[int, int]]:
    """The stretches of a run of `end` steps, from its end."""
    if not isinstance(end, int):
        return stretches
    lengths, first = [], 0
    for length, size in stretches:
        lengths.append((max(0, min(length, end - first)), size))
        first += length
    return [*reversed(lengths)]


def _resolved(content: Mapping[str, Any], section: str, key: str, stretches: Iterable[tuple[int, int]]) -> Mapping[str, Any]:
    value = _value(content, section, key)
    steps = _steps(f"{section}.{key}", value, stretches, _value(content, "data", "train"))
    return content if steps is value else _with(content, section, key, steps)


def _steps(where: str, value: Any, stretches: Iterable[tuple[int, int]], data: Any) -> Any:
    """Steps that a duration takes over stretches of (steps, tokens per step); the value itself where it is none."""
    match = _DURATION.fullmatch(_plain(value)) if isinstance(value, str) else None
    if match is None:
        return value
    number, unit = float(match[1]) * _COUNTS[match[2].lower()], match[3].lower().rstrip("s")
    if unit == "step":
        return math.ceil(number)
    left, steps = number if unit == "token" else number * _epoch(where, data), 0
    for length, size in stretches:
        needed = math.ceil(left / size)
        if needed <= length:
            return steps + needed
        steps, left = steps + length, left - length * size
    return steps


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
            raise ConfigError(f"counts epochs of {path}: {reason}", "make the data first, or give it in steps or tokens", where) from error
    return total


def _tokens_per_step(content: Any, phase: Any) -> int | None:
    sizes = [_value(phase, *key) or _value(content, *key) for key in (("batch", "global_batch"), ("model", "sequence_length"))]
    return sizes[0] * sizes[1] if all(isinstance(size, int) and size > 0 for size in sizes) else None


def _plain(text: str) -> str:
    return text.strip().replace("_", "")


def _get(section: Any, key: str) -> Any:
    """Of a mapping, or of a section that has been validated."""
    return section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)


def _value(content: Any, section: str, key: str) -> Any:
    return _get(_get(content, section), key)


def _with(content: Mapping[str, Any], section: str, key: str, value: Any) -> Mapping[str, Any]:
    old = content.get(section)
    return {**content, section: {**(old if isinstance(old, Mapping) else {}), key: value}}
