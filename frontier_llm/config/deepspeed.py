"""Merges the user's DeepSpeed JSON with the run file.

Settings that follow from the run file are added. A JSON that contradicts the run file is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frontier_llm.config.schema import RunConfig
from frontier_llm.errors import ConfigError, Problem
from frontier_llm.units import strict_json

# Without build isolation, DeepSpeed is built against the installed torch and does not replace it.
INSTALL = "pip install --no-build-isolation deepspeed==0.19.8"

# Keys of DeepSpeed features that this program implements itself, or that would change the training result → key of the
# run file to use instead, or "none".
_ELSEWHERE = {
    "optimizer": "optimizer.* (this program's own kernels)",
    "scheduler": "optimizer.schedule",
    "bfloat16": "precision.dtype",
    "amp": "precision.dtype",
    "torch_autocast": "precision.dtype",
    "data_types": "precision.dtype (gradients accumulate in fp32)",
    "tensor_parallel": "parallel.tensor",
    "pipeline": "parallel.pipeline",
    "sequence_parallel_size": "parallel.sequence_parallel",
    "data_parallel_size": "parallel.data",
    "expert_parallel": "none (the engine deepspeed trains no experts)",
    "activation_checkpointing": "train.recompute",
    "gradient_allreduce_op": "none (the loss is divided by the global number of tokens)",
    "prescale_gradients": "none (the loss is divided by the global number of tokens)",
    "gradient_predivide_factor": "none (the loss is divided by the global number of tokens)",
    "sparse_gradients": "none (gradients are dense)",
    "checkpoint": "train.save_interval (every engine writes this program's own checkpoints)",
    "elasticity": "none (a run resumes on any number of ranks)",
    "compile": "none (kernels are built ahead of time)",
    "hybrid_engine": "none",
    "compression_training": "none",
    "data_efficiency": "data.*",
    "curriculum_learning": "data.*",
    "zero_optimization.zenflow": "none (asynchronous updates change the losses)",
    "zero_optimization.elastic_checkpoint": "train.save_interval",
    "zero_optimization.round_robin_gradients": "none (with it DeepSpeed reports wrong positions in the state)",
    "zero_optimization.mics_shard_size": "none (the optimizer state is split over all of dp)",
}


def deepspeed_settings(config: RunConfig, microbatches: int) -> dict[str, Any]:
    """Return the settings to configure DeepSpeed with.

    Raises ConfigError naming every key of the JSON that contradicts the run file.
    """
    given = given_settings(config)
    ours = _ours(config, microbatches)
    where = config.optimizer.deepspeed_config or ""
    problems = [
        Problem(
            where=f"{where}: {key}",
            what="cannot be set in the DeepSpeed file",
            fix=f"remove it; replacement: {_ELSEWHERE[key]}",
        )
        for key, value in _leaves(given)
        if key in _ELSEWHERE and not _is_off(value)
    ]
    problems += [
        Problem(
            where=f"{where}: {key}",
            what=(
                f"is {strict_json(value, indent=None)}, but the run file requires "
                f"{strict_json(ours[key][0], indent=None)}"
            ),
            fix=(
                f"remove it, or set it to {strict_json(ours[key][0], indent=None)}; that value follows from "
                f"{ours[key][1]}"
            ),
        )
        for key, value in _leaves(given)
        if key in ours and value not in ("auto", ours[key][0])
    ]
    problems += [
        Problem(
            where=f"{where}: {key}", what="is nvme, but checkpoints need the state in memory", fix='use "device": "cpu"'
        )
        for key, value in _leaves(given)
        if isinstance(value, dict) and value.get("device") == "nvme"
    ]
    if problems:
        raise ConfigError(problems)
    merged = _without_auto({key: value for key, value in given.items() if key not in _ELSEWHERE})
    for key, (value, _) in ours.items():
        section, _, name = key.rpartition(".")
        (merged.setdefault(section, {}) if section else merged)[name] = value
    merged.setdefault("communication_data_type", "fp32")
    # The step itself clips for every engine, because it needs the norm to decide whether to skip an update.
    merged["gradient_clipping"] = 0.0
    return merged


def _without_auto(given: dict[str, Any]) -> dict[str, Any]:
    """Drop the values "auto". DeepSpeed's default applies, or the caller fills the value in."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in given.items()
        if value != "auto"
    }


def _ours(config: RunConfig, microbatches: int) -> dict[str, tuple[Any, str]]:
    """Map each DeepSpeed key that the run file decides to (value, key of the run file)."""
    return {
        "train_batch_size": (config.batch.global_batch, "batch.global_batch"),
        "train_micro_batch_size_per_gpu": (config.batch.micro_batch, "batch.micro_batch"),
        "gradient_accumulation_steps": (microbatches, "batch.global_batch / (micro_batch x dp)"),
        "zero_optimization.stage": (config.parallel.zero, "parallel.zero"),
        "gradient_clipping": (config.optimizer.clip_norm, "optimizer.clip_norm"),
        "bf16.enabled": (config.precision.dtype == "bf16", "precision.dtype"),
        "fp16.enabled": (False, "precision.dtype"),
        "zero_optimization.overlap_comm": (
            False,
            "parallel.zero=1 (DeepSpeed receives the gradients once, after the last backward)",
        ),
    }


def given_settings(config: RunConfig) -> dict[str, Any]:
    """Return the user's DeepSpeed JSON unchanged. Raises ConfigError if it cannot be read."""
    return _read(config.optimizer.deepspeed_config)


def _read(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}",
            "give the path of a DeepSpeed JSON file",
            f"optimizer.deepspeed_config: {path}",
        ) from error
    except ValueError as error:
        raise ConfigError(f"is not JSON: {error}", "correct it, or remove optimizer.deepspeed_config", path) from error
    if not isinstance(content, dict) or not isinstance(content.get("zero_optimization", {}), dict):
        raise ConfigError(
            "is not a DeepSpeed configuration: a JSON object of settings is expected",
            "correct it, or remove optimizer.deepspeed_config",
            path,
        )
    return content


def _leaves(given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the top-level items, and each item of a section as "section.name"."""
    for key, value in given.items():
        yield key, value
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())


def _is_off(value: Any) -> bool:
    """Return True for a value that leaves a feature disabled."""
    return value in ("auto", False) or (isinstance(value, dict) and value.get("enabled") in ("auto", False))
