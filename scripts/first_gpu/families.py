"""The stages of first_gpu.sh that train small models of every family: losses against the CPU, waits of the host, and a
run that is stopped and resumed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import torch
from stages import CLI, DEVICE, REHEARSAL
from steps import built, run_file, wait

from frontier_llm.config import ModelConfig
from frontier_llm.errors import BackendError
from frontier_llm.training.build import TrainState
from frontier_llm.training.step import train_step
from tests.harness.families import ALL_FAMILIES
from tests.harness.waits import Waits

STEPS = 2 if REHEARSAL else 5
# Shape of the parity suite's families, but with heads of 64 features, for which attention has a kernel.
SHAPE = {
    "layers": 2,
    "hidden": 256,
    "heads": 4,
    "ffn_hidden": 384,
    "vocab_size": 1000,
    "sequence_length": 32 if REHEARSAL else 256,
}
FAMILIES = ("llama", "mpt", "deepseek") if REHEARSAL else tuple(ALL_FAMILIES)
# In fp32, results differ because sums have another order. In bf16, every op rounds to 1/256.
LIMITS = {"fp32": 1e-3, "bf16": 0.02}


def model_of_family(family: str) -> ModelConfig:
    """Return the small model of a family of tests/harness/families.py."""
    content = {**ALL_FAMILIES[family], **SHAPE}
    if content.get("kv_heads"):
        content["kv_heads"] = 2
    if "head_dim" in content:
        content |= {"head_dim": 64, "score_width": 64}
    return ModelConfig.model_validate(content)


def losses_of(model: ModelConfig, device: str, dtype: str, op: str) -> list[float]:
    state = built(model, 2, "none", dtype, device, op)
    return [train_step(state).loss for _ in range(STEPS)]


def against_cpu() -> dict[str, Any]:
    """Compare each family's losses on this device with the same steps in plain torch on the CPU in fp32."""
    worst = {}
    wrong = []
    not_run = {}
    for family in FAMILIES:
        model = model_of_family(family)
        expected = losses_of(model, "cpu", "fp32", "reference")
        for dtype, limit in LIMITS.items():
            try:
                got = losses_of(model, DEVICE, dtype, "auto")
            except BackendError as error:
                not_run[f"{family} {dtype}"] = str(error)
                continue
            difference = max(abs(a - b) / b for a, b in zip(got, expected, strict=True))
            worst[f"{family} {dtype}"] = difference
            if not difference <= limit:
                wrong.append(f"{family} {dtype}: losses {got} here and {expected} on the CPU")
    return {
        "steps": STEPS,
        "worst_difference": worst,
        "not_run": not_run,
        **({"wrong": "; ".join(wrong)} if wrong else {}),
    }


def waits() -> dict[str, Any]:
    """List the waits of the host in one step, with and without experts."""
    return {family: _waits_of(family) for family in ("llama", "olmoe", "deepseek")}


def _waits_of(family: str) -> dict[str, Any]:
    state = built(model_of_family(family), 2, "none")
    for _ in range(2):
        train_step(state)
    wait()
    recorded = _calls(state) if DEVICE == "cpu" else _reported(state)
    wait()
    return {"microbatches": state.config.batch.global_batch // state.config.batch.micro_batch, "waits": recorded}


def _calls(state: TrainState) -> list[str]:
    """Return the lines of one step at which the host of a GPU would wait."""
    with Waits() as recorded:
        train_step(state)
    return [wait.line for wait in recorded.waits]


def _reported(state: TrainState) -> list[str]:
    """Return file and line of each synchronisation of one step, as torch reports them. Waits for events are not among
    them.
    """
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchronizing" in str(one.message)]


def restart(out: Path) -> dict[str, Any]:
    """Train a small model to its end, and again with a stop and a resume in the middle. The losses must be equal to the
    bit.
    """
    half, steps = (1, 2) if REHEARSAL else (10, 20)
    losses = {}
    for name, ends in (("whole", (steps,)), ("resumed", (half, steps))):
        path = out / f"restart_{name}.yaml"
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
        for end in ends:
            run_file(path, 2, 1, 1, 1, steps=end)
            content = json.loads(path.read_text(encoding="utf-8"))
            content["model"] = {"base": "llama-tiny" if REHEARSAL else "llama-15m"}
            content["optimizer"] = {"schedule": "constant"}
            content["ops"] = {"deterministic": True}
            content["train"]["save_final"] = True
            path.write_text(json.dumps(content), encoding="utf-8")
            done = subprocess.run([*CLI, "train", str(path)], capture_output=True, text=True, check=False)
            if done.returncode:
                return {"wrong": f"the run to step {end} ended with exit code {done.returncode}: {done.stderr[-600:]}"}
        metrics = (path.with_suffix("") / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        lines = [json.loads(line) for line in metrics]
        losses[name] = [line["loss"] for line in lines if "loss" in line and "mfu" in line]
    equal = losses["whole"] == losses["resumed"]
    return {"resumed_after": half, "losses": losses, **({} if equal else {"wrong": "the losses differ"})}
