"""Working precision of a run: resolution of `precision.dtype: auto`, and refusal of types that a device lacks.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from frontier_llm import log
from frontier_llm.blueprint.layout import context_way
from frontier_llm.config import RunConfig, load_run
from frontier_llm.errors import FrontierError, Problem
from frontier_llm.machine.env import GPU_FILES
from frontier_llm.machine.load import load_machine
from frontier_llm.machine.processor import chosen_set, cpu_facts, has_bf16_instructions
from frontier_llm.run.complete import BrokenManifest, manifest_bytes, step_name
from frontier_llm.run.run_dir import latest_step

AUTO = "auto"
LARGEST_HEAD_DIM = 256  # of flash-attn, torch's flash kernels and the prebuilt attention


def load_resolved(name_or_path: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run as `load_run` does, and resolve its working precision. Commands read their runs by this function."""
    return resolve_precision(load_run(name_or_path, overrides))


def resolve_precision(config: RunConfig) -> RunConfig:
    """Return the run with `precision.dtype: auto` replaced by a type, and log the type with its reason.

    A run that has a checkpoint keeps the checkpoint's type, also on another CPU. Otherwise the type is bf16 on a GPU
    and on a CPU with bf16 instructions, and fp32 on other CPUs. The choice uses no measured time, so that all ranks and
    every resume choose the same type.
    """
    if config.precision.dtype != AUTO:
        return config
    dtype, reason = _choice(config)
    log.info(f"precision.dtype=auto: {dtype}, because {reason}")
    precision = config.precision.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"precision": precision})


def _choice(config: RunConfig) -> tuple[str, str]:
    """Return the type and its reason."""
    run_dir = Path(config.train.run_dir)
    recorded = recorded_dtype(run_dir)
    if recorded is not None:
        return recorded, f"the newest checkpoint in {run_dir} was trained in this precision"
    if _uses_gpu(config):
        return "bf16", "the device is a GPU"
    if has_bf16_instructions():
        return "bf16", "this CPU has bf16 instructions"
    model, _ = cpu_facts()
    return "fp32", f"this CPU ({model}, {chosen_set().name}) has no bf16 instructions"


def recorded_dtype(run_dir: Path) -> str | None:
    """Return the type of the newest complete checkpoint of a run. None without a readable checkpoint."""
    step = latest_step(run_dir)
    if not step:
        return None
    try:
        content = json.loads(manifest_bytes(run_dir / "checkpoints" / step_name(step)))
        dtype = content["config"]["precision"]["dtype"]
    except (BrokenManifest, ValueError, TypeError, KeyError, RecursionError):
        return None  # the fault is reported when the checkpoint is loaded
    return dtype if isinstance(dtype, str) and dtype != AUTO else None


def problem_on_cpu(config: RunConfig) -> Problem | None:
    """Return the problem of a run in fp16 on a CPU, unless `ops.allow_fallback` accepts slow ops."""
    if config.precision.dtype != "fp16" or config.ops.allow_fallback:
        return None
    return Problem(
        "precision.dtype",
        "fp16 on a CPU: a matrix product takes 6 to 140 times as long as in fp32, because only torch's own loops "
        "compute it",
        "set precision.dtype=fp32, or auto, which is bf16 if this CPU has bf16 instructions; or use a GPU; "
        "ops.allow_fallback=true allows slow fp16, for example to test a few steps",
    )


def is_deterministic(config: RunConfig) -> bool:
    """Return True if two runs must have equal bits. `ops.deterministic: auto` follows guard.recompute_interval."""
    asked = config.ops.deterministic
    return config.guard.recompute_interval > 0 if asked == "auto" else asked


def problem_on_gpu(config: RunConfig) -> Problem | None:
    """Return the problem of a run on a GPU whose attention only the reference can compute, in this working precision
    and with this head dim.

    `ops.attention` and `ops.allow_fallback` can accept the reference. The rules follow from the declarations of the
    back-ends (`ops/providers.py`). A test compares them with `ops.select.choose`.
    """
    model = config.model
    parallel = config.parallel
    dtype = config.precision.dtype
    if config.ops.attention != "auto" or config.ops.allow_fallback or dtype == "fp64":
        return None
    way = context_way(model, parallel.tensor, parallel.context, parallel.context_attention)
    in_parts = parallel.context > 1 and way != "heads"
    large_heads = model.dim_per_head > LARGEST_HEAD_DIM
    kind = f"head dim {model.dim_per_head}" if large_heads else dtype
    if dtype == "fp32" or large_heads:
        needs = {
            "a soft cap of attention's scores (model.score_softcap)": model.score_softcap is not None,
            f"attention over parts of a sequence (parallel.context with {way})": in_parts,
            "equal bits in two runs (ops.deterministic)": is_deterministic(config),
        }
    else:
        window = model.sliding_window is not None and model.score_softcap is None
        needs = {f"a sliding window with parallel.context and {way}": window and in_parts}
    lacking = [need for need, is_needed in needs.items() if is_needed]
    if not lacking:
        return None
    if large_heads:
        where, fix = "model.head_dim", f"set model.head_dim={LARGEST_HEAD_DIM} or lower"
    elif dtype == "fp32":
        where, fix = "precision.dtype", "set precision.dtype=bf16"
    else:
        where, fix = "parallel.context_attention", "set parallel.context_attention=heads"
    return Problem(
        where,
        f"no fused attention on a GPU supports {kind} with {' and '.join(lacking)}; only the reference does, and it "
        f"stores the complete matrix of scores",
        f"{fix}, or use the reference for a small model: ops.attention=reference",
    )


def device_problem(config: RunConfig) -> Problem | None:
    """Return the problem of this run's working precision on the device that the run will use."""
    return problem_on_gpu(config) if _uses_gpu(config) else problem_on_cpu(config)


def refuse_on_device(config: RunConfig) -> None:
    """Raise FrontierError if the run's device does not support its working precision."""
    if problem := device_problem(config):
        raise FrontierError(problem)


def _uses_gpu(config: RunConfig) -> bool:
    """Return True if the run's device is a GPU: by train.device, the machine file, or the driver's files."""
    if config.train.device != "auto":
        return config.train.device == "cuda"
    if load_machine(config.machine).device.vendor != "none":
        return True
    return any(Path(path).exists() for path in GPU_FILES.values())
