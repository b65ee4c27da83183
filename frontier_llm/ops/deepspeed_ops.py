"""Finds out which of DeepSpeed's own ops are prebuilt in this installation, and which a run would compile at run time.

This module imports neither DeepSpeed nor torch.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from frontier_llm.config import RunConfig
from frontier_llm.errors import Problem

BUILD_COMMAND = "scripts/build_deepspeed_ops.sh"
# DeepSpeed's variable; with the value `native`, an op of DeepSpeed pins host memory
PIN_BACKEND = "DS_PIN_MEMORY_BACKEND"

# Every op that a DeepSpeed run can load with the settings that this project supports, and the feature that loads it
# (DeepSpeed 0.19.8).
LOADED_BY = {
    "fused_adam": "DeepSpeed's own Adam on a GPU",
    "cpu_adam": "DeepSpeed's own Adam with its state on the host",
    "pin_memory": f"offload with pin_memory and {PIN_BACKEND}=native",
}


def op_states() -> dict[str, str]:
    """Map each op to 'prebuilt for cuda' or the reason why it is not prebuilt. Empty if DeepSpeed is not installed."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent
    built = _installed(folder / "git_version_info_installed.py")
    return {op: _state(folder, built, op) for op in LOADED_BY}


def run_ops(config: RunConfig, variables: Mapping[str, str]) -> list[str]:
    """Return the DeepSpeed ops that this run loads.

    A run needs at most the op for `pin_memory`, because the optimizer uses this project's formulas and ZeRO-1.
    """
    if config.optimizer.engine != "deepspeed":
        return []
    from frontier_llm.config.deepspeed import given_settings

    offload = given_settings(config).get("zero_optimization", {}).get("offload_optimizer")
    is_pinned = isinstance(offload, dict) and offload.get("device") == "cpu" and offload.get("pin_memory") is True
    is_native = variables.get(PIN_BACKEND, "torch").strip().lower() == "native"
    return ["pin_memory"] if is_pinned and is_native else []


def missing_ops(config: RunConfig, variables: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a Problem for each op that the run would compile, if ops.no_jit forbids compiling."""
    if not config.ops.no_jit:
        return
    states = op_states()
    for op in run_ops(config, variables):
        state = states.get(op, "DeepSpeed is not installed")
        if not state.startswith("prebuilt") or (
            config.train.device != "auto" and state != f"prebuilt for {config.train.device}"
        ):
            what = f"DeepSpeed would compile its op {op} at run time ({LOADED_BY[op]}): {state}"
            yield Problem("ops.no_jit", what, f"{BUILD_COMMAND}, or omit --no-jit")


def _installed(path: Path) -> dict[str, Any]:
    """Return the facts that DeepSpeed's installation has recorded: name -> value."""
    if not path.is_file():
        return {}
    values = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            values[statement.targets[0].id] = ast.literal_eval(statement.value)
    return values


def _state(folder: Path, built: Mapping[str, Any], op: str) -> str:
    """Return an op's state.

    DeepSpeed loads a prebuilt op only with the accelerator and the torch version (major.minor) of its build.
    """
    if not built.get("installed_ops", {}).get(op) or not any(folder.glob(f"ops/*/{op}_op*.so")):
        return "not prebuilt"
    torch_version = ".".join(importlib.metadata.version("torch").split(".")[:2])
    built_for = built.get("torch_info", {}).get("version")
    if built_for != torch_version:
        return f"built for torch {built_for}, but torch {torch_version} is installed"
    return f"prebuilt for {built.get('accelerator_name')}"
