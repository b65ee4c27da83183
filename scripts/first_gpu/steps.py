"""The stages of first_gpu.sh that train.

They measure the speed of a step and its time by kernel. They compare losses on this device with the CPU, and losses on
several devices with one device.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from stages import CLI, DEVICE, REHEARSAL, ROOT, Skipped, model_of
from torch.profiler import ProfilerActivity, profile

from frontier_llm.blueprint.work import model_flops_per_token
from frontier_llm.comm import serial_mesh
from frontier_llm.config import BatchConfig, ModelConfig, OptimizerConfig, PrecisionConfig, RunConfig, TrainConfig
from frontier_llm.config.load import load_model
from frontier_llm.config.schema import OpsConfig
from frontier_llm.data.loader import open_batches
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import TrainState, build_state
from frontier_llm.training.step import train_step

STEPS, PROFILED, TWICE = (2, 1, 2) if REHEARSAL else (10, 2, 10)
KERNELS_SHOWN = 25
WARM_UP = 1 if REHEARSAL else 3
_MEASURED = Path(sys.argv[2]) / "attention.yaml"  # written by an earlier stage
TABLE = str(_MEASURED) if _MEASURED.is_file() else "shipped"
# (microbatch, recomputation); the first pair that fits into memory is used.
SIZES = ((8, "none"), (4, "none"), (2, "none"), (1, "none"), (1, "full"))


def built(
    model: ModelConfig,
    micro_batch: int,
    recompute: str,
    dtype: str = "bf16",
    device: str = DEVICE,
    op: str = "auto",
    deterministic: bool = False,
) -> TrainState:
    """Return a training state of one rank on a device. `op` is the back-end of all ops."""
    ops = OpsConfig(no_jit=True, attention_table=TABLE, deterministic=deterministic)
    chosen = {name: op for name, value in ops if value == "auto"}
    config = RunConfig(
        model=model,
        batch=BatchConfig(global_batch=2 * micro_batch, micro_batch=micro_batch),
        optimizer=OptimizerConfig(schedule="constant", lr=1e-3),
        precision=PrecisionConfig.model_validate({"dtype": dtype}),
        ops=OpsConfig.model_validate({**dict(ops), **chosen}),
        train=TrainConfig(steps=1000, recompute=recompute),
    )
    batches = open_batches(config, 0, 1)
    return build_state(
        config, make_plan(config, 1), serial_mesh(), torch.device(device, *([0] if device == "cuda" else [])), batches
    )


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def speed(name: str, out: Path, twice: bool) -> dict[str, Any]:
    """Measure seconds, memory and kernels of a step, at the largest size that fits. With `twice` also compare the first
    losses of two runs.
    """
    model = model_of(name)
    faults = []
    begin = time.monotonic()
    for size in SIZES[3:] if REHEARSAL else SIZES:
        try:
            result, losses = measured(built(model, *size), out)
        except torch.OutOfMemoryError as error:
            faults.append(str(error).splitlines()[0])
        else:
            break
        torch.cuda.empty_cache()  # after the except clause, because the error's frames hold tensors
    else:
        raise Skipped(f"no size of the {name} model fits: {faults[-1]}")
    result |= {
        "model": model.model_dump(exclude_defaults=True),
        "start_s": result.pop("ready_at") - begin,
        "too_large": len(faults),
    }
    if twice:
        result |= repeated(model, size, losses[:TWICE], result["step_s"])
    if not all(map(math.isfinite, losses)):
        result["wrong"] = f"losses are {losses}"
    return result


def repeated(model: ModelConfig, size: tuple[int, str], fastest: list[float], fastest_s: float) -> dict[str, Any]:
    """Compute the first losses twice more with deterministic ops, and once more with the fastest.

    A difference between the deterministic runs is a failure. `fastest` and `fastest_s` are the losses and the seconds
    of a step with the fastest ops. Their difference from a second run is a note, and `deterministic_price` is the
    additional time of a step with deterministic ops, as a share.
    """

    def first_losses(deterministic: bool) -> tuple[list[float], float]:
        torch.cuda.empty_cache()
        state = built(model, *size, deterministic=deterministic)
        losses = []
        begin = time.perf_counter()
        for step in range(TWICE):
            if step == WARM_UP:
                begin = time.perf_counter()
            losses.append(train_step(state).loss)
        wait()
        return losses, (time.perf_counter() - begin) / max(TWICE - WARM_UP, 1)

    again, _ = first_losses(deterministic=False)
    first, step_s = first_losses(deterministic=True)
    second, _ = first_losses(deterministic=True)
    result: dict[str, Any] = {
        "losses": first,
        "bitwise_equal": first == second,
        "fastest_bitwise_equal": fastest == again,
        "deterministic_price": step_s / fastest_s - 1,
    }
    if first != second:
        result["wrong"] = f"two runs of the same steps with deterministic ops gave {first} and {second}"
    return result


def measured(state: TrainState, out: Path) -> tuple[dict[str, Any], list[float]]:
    """Time STEPS steps and run PROFILED more under the profiler. Returns the results and all losses."""
    ready_at = time.monotonic()
    losses = [train_step(state).loss for _ in range(WARM_UP)]
    wait()
    begin = time.perf_counter()
    losses += [train_step(state).loss for _ in range(STEPS)]
    wait()
    step_s = (time.perf_counter() - begin) / STEPS
    memory = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        begin = time.perf_counter()
        for _ in range(PROFILED):
            losses.append(train_step(state).loss)
        wait()
        profiled_s = (time.perf_counter() - begin) / PROFILED
    rows = kernel_rows(profiler)
    busy_s = sum(row["seconds_per_step"] for row in rows)
    batch = state.config.batch
    tokens = batch.global_batch * state.config.model.sequence_length
    flops = tokens * model_flops_per_token(state.config.model)
    rate = _ceiling(out)
    return (
        {
            "micro_batch": batch.micro_batch,
            "recompute": state.config.train.recompute,
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            "model_flops_per_s": flops / step_s,
            "mfu_of_measured_gemm_rate": flops / step_s / rate if rate else None,
            "memory_gib": memory / 2**30,
            # busy_s is the time of the kernels alone, without the profiler's overhead
            "device_idle_share": max(1 - busy_s / step_s, 0.0) if DEVICE == "cuda" else None,
            "profiled_step_s": profiled_s,
            "launches_per_step": sum(row["calls_per_step"] for row in rows),
            "kernels": rows[:KERNELS_SHOWN],
            "ready_at": ready_at,
        },
        losses,
    )


def kernel_rows(profiler: Any) -> list[dict[str, Any]]:
    """Return the time on the device of each kernel, longest first. A rehearsal lists the CPU's ops instead."""
    field = "self_device_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
    events = [
        event
        for event in profiler.key_averages()
        if getattr(event, field) > 0 and (DEVICE == "cpu" or _on_device(event))
    ]
    rows = [
        {
            "kernel": event.key[:120],
            "seconds_per_step": getattr(event, field) / 1e6 / PROFILED,
            "calls_per_step": event.count / PROFILED,
        }
        for event in events
    ]
    return sorted(rows, key=lambda row: -row["seconds_per_step"])


def _on_device(event: Any) -> bool:
    return "CUDA" in str(event.device_type)


def _ceiling(out: Path) -> float | None:
    path = out / "ceilings.json"
    result = json.loads(path.read_text(encoding="utf-8")).get("result", {}) if path.is_file() else {}
    return result.get("gemm_flops_per_s")


def against_cpu(_out: Path) -> dict[str, Any]:
    """Compare the losses of 100 steps in fp32 on this device with the same steps in plain torch on the CPU, then in
    bf16.
    """
    count = 4 if REHEARSAL else 100
    shapes = load_model(
        "llama-tiny" if REHEARSAL else "llama-15m", {} if REHEARSAL else {"layers": 4, "head_dim": 64, "heads": 4}
    )
    torch.set_num_threads(min(16, len(os.sched_getaffinity(0))))

    def losses(device: str, dtype: str, op: str, steps: int) -> list[float]:
        state = built(shapes, 2, "none", dtype, device, op)
        return [train_step(state).loss for _ in range(steps)]

    expected = losses("cpu", "fp32", "reference", count)
    result: dict[str, Any] = {"steps": count, "loss": [expected[0], expected[-1]]}
    wrong = []
    # In fp32, sums have another order, so losses slowly drift apart. In bf16, every op rounds to 1/256.
    for dtype, limit in (("fp32", 0.01), ("bf16", 0.05)):
        got = losses(DEVICE, dtype, "auto", count)
        worst = max(abs(a - b) / b for a, b in zip(got, expected, strict=True))
        result |= {f"{dtype}_worst_difference": worst, f"{dtype}_loss": [got[0], got[-1]]}
        if not worst <= limit:
            wrong.append(f"{dtype} losses differ from the CPU's by up to {worst:.2%}, more than {limit:.0%}")
    return result | ({"wrong": "; ".join(wrong)} if wrong else {})


def degrees() -> tuple[int, int, int]:
    """Return the degrees (tensor, pipeline, data) over the devices of this machine."""
    devices = 4 if REHEARSAL else torch.cuda.device_count()
    if devices < 2:
        raise Skipped("there is only one device, so nothing is sent")
    return next(shape for size, shape in ((8, (2, 2, 2)), (4, (2, 2, 1)), (2, (1, 2, 1))) if devices >= size)


def run_file(path: Path, layers: int, tensor: int, pipeline: int, data: int, steps: int) -> None:
    """Write a run file of a small model over tensor x pipeline x data ranks. JSON is valid YAML."""
    content = {
        "model": {"base": "llama-tiny" if REHEARSAL else "llama-2-7b", "layers": layers},
        "parallel": {"tensor": tensor, "pipeline": pipeline, "data": data, "sequence_parallel": tensor > 1},
        "batch": {"global_batch": 8, "micro_batch": 1},
        "precision": {"dtype": "bf16"},
        "train": {
            "run_dir": str(path.with_suffix("")),
            "steps": steps,
            "device": DEVICE,
            "tensorboard": False,
            "save_final": False,
            "eval_samples": 0,
            "timeout_s": 60,
        },
        "machine": _base_machine(),
    }
    path.write_text(json.dumps(content), encoding="utf-8")


def _base_machine() -> str:
    from page import base_machine
    from stages import _architecture

    return "local" if REHEARSAL else base_machine(_architecture(), torch.cuda.get_device_name())


def hang_test(out: Path) -> dict[str, Any]:
    """Run steps of one layer per stage in each mode, under a watchdog."""
    tensor, pipeline, data = degrees()
    run_file(out / "hang.yaml", pipeline, tensor, pipeline, data, steps=1000)
    times = ["--steps", "3" if REHEARSAL else "100"]
    command = [
        *CLI,
        "bench",
        "comm",
        str(out / "hang.yaml"),
        "--hang-test",
        *times,
        "--emit-machine",
        str(out / "in_flight.yaml"),
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {"wrong": done.stderr.strip()[-300:]}
    if "wrong" in result:
        return result
    if not result.get("in_flight"):
        return {**result, "wrong": "no mode is safe here"}
    return result | communicators(out, result["in_flight"])


def communicators(out: Path, in_flight: str) -> dict[str, Any]:
    """Measure the collectives of the hang test's layout, and on GPUs the device memory of its communicators."""
    largest = "4KiB" if REHEARSAL else "256MiB"
    options = ["--no-pairs", "--max", largest, "--emit-machine", str(out / "collectives.yaml"), "--json"]
    command = [*CLI, "bench", "comm", str(out / "hang.yaml"), f"comm.in_flight={in_flight}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stderr)
    if done.returncode:
        return {"wrong": f"bench comm ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}"}
    return {"communicator_memory": json.loads(done.stdout)["memory"]}


def layout(out: Path) -> dict[str, Any]:
    """Compare first and last losses of the same steps on one device and on several."""
    tensor, pipeline, data = degrees()
    steps = 2 if REHEARSAL else 20
    losses = {}
    for name, shape in (("one", (1, 1, 1)), ("several", (tensor, pipeline, data))):
        path = out / f"layout_{name}.yaml"
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
        run_file(path, 2 * pipeline, *shape, steps=steps)
        done = subprocess.run([*CLI, "train", str(path)], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"wrong": f"the run on {name} ended with exit code {done.returncode}: {done.stderr.strip()[-600:]}"}
        lines = [
            json.loads(line)
            for line in (path.with_suffix("") / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        losses[name] = [line["loss"] for line in lines if "loss" in line and "mfu" in line]
    worst = max(abs(a - b) / b for a, b in zip(losses["one"], losses["several"], strict=True))
    result = {"tensor": tensor, "pipeline": pipeline, "data": data, "losses": losses, "worst_difference": worst}
    return result | ({"wrong": f"losses of the layouts differ by {worst:.1%}"} if not worst <= 0.02 else {})
