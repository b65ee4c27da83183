"""What scripts/bench_gpu.sh runs: correctness, speed and a short training run of the GPU ops, each in a process of its own.

    python scripts/bench_gpu.py [--device cpu] [--out build/bench_gpu] [--stages ceilings,checks,ops,compiled,train]

Each stage writes one JSON file into --out when it ends; one that fails or outlasts its time is reported and the others go on. The summary is
the last thing printed, and summary.json. Only the stage `compiled` may compile at run time: all others run under the no-JIT guard.
--device cpu goes the same way with tiny sizes, to test this script.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from frontier_llm.config.load import load_model
from frontier_llm.config.schema import ModelConfig, OpsConfig
from frontier_llm.measure.ops import Timing, compare, copy_bandwidth, gemm_rate
from frontier_llm.ops import select_ops
from frontier_llm.ops.driver import architecture_of_device
from frontier_llm.units import TERA

ROOT = Path(__file__).resolve().parents[1]
# seconds that each stage may take on a GPU: nine minutes together; ten times as long on a CPU, which may be a busy one
LIMITS_S = {"ceilings": 30, "checks": 100, "ops": 100, "compiled": 110, "train": 200}  # training saves 13 GB twice
# Llama's shapes with 1.1 G parameters: head dim 128, so that attention is what larger models have
ONE_BILLION = {
    "hidden": 2048,
    "layers": 20,
    "heads": 16,
    "kv_heads": 16,
    "ffn_hidden": 5632,
    "sequence_length": 2048,
    "vocab_size": 32000,
}
GOALS = {"memory": 0.85, "attention": 0.9, "mfu": 0.5}  # shares of copy bandwidth, of SDPA's best back-end, of the measured GEMM rate


def model_of(device: str) -> tuple[ModelConfig, int]:
    """(shapes, microbatch) of the run: on a GPU large enough that no op fits into the cache."""
    return (load_model("llama-2-7b", ONE_BILLION), 8) if device == "cuda" else (load_model("llama-tiny", {}), 2)


def ceilings(device: str, _out: Path) -> dict[str, Any]:
    """Copy bandwidth and GEMM rate of this device, by torch."""
    on_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "architecture": architecture_of_device() if on_gpu else "cpu",
        "torch": torch.__version__,
        "copy_bytes_per_s": copy_bandwidth(device, 4 * 2**30 if on_gpu else 2**20),
        "gemm_flops_per_s": _gemm_ceiling(device),
    }


def _gemm_ceiling(device: str) -> float:
    return gemm_rate(device, torch.bfloat16, 8192 if device == "cuda" else 128)


def checks(_device: str, out: Path) -> dict[str, Any]:
    """Every op against float64 through the launcher (tests/unit/ops/test_gpu.py, which sets the guard; skipped without a GPU)."""
    report = out / "checks.xml"
    report.unlink(missing_ok=True)  # an earlier run's
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/unit/ops/test_gpu.py",
        "--noconftest",  # which asks for packages that a machine with a GPU need not have
        "--no-header",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr)
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = [case.attrib["name"] for case in suite.iter("testcase") if case.find("failure") is not None or case.find("error") is not None]
    return {**counts, "failed": failed}


def ops(device: str, out: Path) -> list[dict[str, Any]]:
    """Ours, eager and SDPA's back-ends in turns, nothing compiled."""
    model, micro_batch = model_of(device)
    chosen = select_ops(OpsConfig(no_jit=True), device, torch.bfloat16)
    return _kept(compare(chosen, model, micro_batch, torch.bfloat16, device, rounds=3), out / "ops.json")


def compiled(device: str, out: Path) -> list[dict[str, Any]]:
    """Eager torch through torch.compile; on the CPU through Dynamo alone, which needs no compiler."""
    model, micro_batch = model_of(device)
    chosen = select_ops(OpsConfig(), device, torch.bfloat16)
    compiler: Callable[..., Any] = torch.compile if device == "cuda" else lambda function: torch.compile(function, backend="eager")
    timings = compare(chosen, model, micro_batch, torch.bfloat16, device, rounds=2, compiler=compiler)
    return _kept(timings, out / "compiled.json")


def _kept(timings: Iterator[Timing], path: Path) -> list[dict[str, Any]]:
    """All of them; what is there so far is in the file, should the stage be stopped."""
    done: list[dict[str, Any]] = []
    for timing in timings:
        done.append(asdict(timing))
        path.write_text(json.dumps(done), encoding="utf-8")
    return done


def train(device: str, out: Path) -> dict[str, Any]:
    """Steps of the model by `frontier-llm train --no-jit`, and the first ones a second time, which must give the same losses to the bit."""
    model, micro_batch = model_of(device)
    steps, again, batch = (100, 10, 2 * micro_batch) if device == "cuda" else (4, 2, micro_batch)
    peak = (read(out, "ceilings").get("gemm_flops_per_s") or _gemm_ceiling(device)) / TERA
    runs = []
    for name, count in (("run", steps), ("again", again)):
        shutil.rmtree(out / name, ignore_errors=True)  # a run goes on from what it finds
        config = {
            "model": model.model_dump(),
            "batch": {"global_batch": batch, "micro_batch": micro_batch},
            "precision": {"dtype": "bf16"},
            "optimizer": {"schedule": "constant"},
            "train": {
                "run_dir": str(out / name),
                "steps": count,
                "device": device,
                "tensorboard": False,
                "eval_samples": 0,
                "peak_tflops": peak,
            },
        }
        path = out / f"{name}.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        subprocess.run(
            [sys.executable, "-m", "frontier_llm.cli.main", "train", str(path), "--no-jit"], cwd=ROOT, check=True, stdout=sys.stderr
        )
        lines = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        runs.append([line for line in lines if "loss" in line and "mfu" in line])
        shutil.rmtree(out / name / "checkpoints")  # 13 GB
    first, second = runs
    steady = first[len(first) // 4 :]
    return {
        "steps": len(first),
        "loss": [first[0]["loss"], first[-1]["loss"]],
        "bitwise_equal": [line["loss"] for line in first[:again]] == [line["loss"] for line in second],
        "step_time_s": sum(line["step_time_s"] for line in steady) / len(steady),
        "tokens_per_s": sum(line["tokens_per_s"] for line in steady) / len(steady),
        "mfu_of_measured_gemm_rate": sum(line["mfu"] for line in steady) / len(steady),
        "memory_gib": first[-1]["memory_gib"],
    }


STAGES: dict[str, Callable[[str, Path], Any]] = {"ceilings": ceilings, "checks": checks, "ops": ops, "compiled": compiled, "train": train}


def run_limited(command: list[str], limit_s: float) -> None:
    """Raises CalledProcessError, or TimeoutExpired once the command and all that it started have been ended: a training run would keep the GPU."""
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        try:
            code = process.wait(limit_s)
        except BaseException:  # an interrupt from the keyboard, too, reaches nothing in another session
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def run_apart(stage: str, device: str, out: Path) -> None:
    """One stage in its own process; what went wrong becomes its result."""
    command = [sys.executable, __file__, "--device", device, "--out", str(out), "--only", stage]
    begin = time.monotonic()
    (out / f"{stage}.json").unlink(missing_ok=True)
    try:
        run_limited(command, LIMITS_S[stage] * (1 if device == "cuda" else 10))
    except subprocess.SubprocessError as error:
        result = {"error": f"{type(error).__name__}: {error}", "until_then": read(out, stage)}
        (out / f"{stage}.json").write_text(json.dumps(result), encoding="utf-8")
    print(f"{stage}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def read(out: Path, stage: str) -> Any:
    """A stage's result; an error where it left none."""
    path = out / f"{stage}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"error": "not run"}


def verdict(share: float, goal: float) -> str:
    """A share against its goal."""
    return f"{share:.0%} ({'meets' if share >= goal else 'misses'} {goal:.0%})"


def op_lines(timings: list[Timing], copy_bytes_per_s: float, gemm_flops_per_s: float) -> list[str]:
    """One table row per op: all ways, and ours as a share of the ceiling."""
    lines = ["| op | ours | eager | compiled | best SDPA | ours: share of the ceiling |", "|---|---|---|---|---|---|"]
    by_op: dict[str, dict[str, Timing]] = {}
    for timing in timings:
        by_op.setdefault(timing.op, {})[timing.way] = timing
    for op, ways in by_op.items():
        sdpa = [timing.seconds for way, timing in ways.items() if way.startswith("sdpa") and not timing.error]
        ours = ways.get("ours", ways.get("all"))
        share = (
            "failed" if ours is None or ours.error else _share(op, ours, copy_bytes_per_s, gemm_flops_per_s, min(sdpa, default=math.nan))
        )
        cells = [_milliseconds(ways.get(way)) for way in ("ours", "eager", "compiled")]
        lines.append(f"| {op} | {' | '.join(cells)} | {min(sdpa, default=math.nan) * 1e3:.3f} ms | {share} |")
    lines += [f"{timing.op}, {timing.way}: {timing.error}" for timing in timings if timing.error]
    return lines


def _share(op: str, ours: Timing, copy_bytes_per_s: float, gemm_flops_per_s: float, best_sdpa_s: float) -> str:
    if ours.flops:
        text = f"{ours.flops / ours.seconds / TERA:.0f} TFLOP/s, {ours.flops / ours.seconds / gemm_flops_per_s:.0%} of the GEMM rate"
        return text if math.isnan(best_sdpa_s) else f"{text}; of SDPA's best {verdict(best_sdpa_s / ours.seconds, GOALS['attention'])}"
    return f"of copy bandwidth {verdict(ours.bytes_moved / ours.seconds / copy_bytes_per_s, GOALS['memory'])}"


def _milliseconds(timing: Timing | None) -> str:
    return "-" if timing is None or math.isnan(timing.seconds) else f"{timing.seconds * 1e3:.3f} ms"


def summary(out: Path) -> str:
    """All stages' results on a page."""
    ceiling, checked, trained = (read(out, stage) for stage in ("ceilings", "checks", "train"))
    copy, gemm = (ceiling.get(name, math.nan) for name in ("copy_bytes_per_s", "gemm_flops_per_s"))
    lines = [
        f"{ceiling.get('device')} ({ceiling.get('architecture')}), torch {ceiling.get('torch')}: "
        f"copy {copy / 1e9:.0f} GB/s, bf16 GEMM {gemm / TERA:.0f} TFLOP/s"
    ]
    lines.append(f"against float64: {json.dumps(checked)}")
    timings: list[Timing] = []
    for stage in ("ops", "compiled"):
        found = read(out, stage)
        if isinstance(found, dict):
            lines.append(f"{stage}: {found['error']}")
            found = found.get("until_then", [])
        timings += [Timing(**timing) for timing in found if isinstance(timing, dict)]
    lines += op_lines(timings, copy, gemm)
    if "error" in trained:
        return "\n".join([*lines, f"train: {trained['error']}"])
    mfu = trained["mfu_of_measured_gemm_rate"]
    lines.append(
        f"train: {trained['steps']} steps, loss {trained['loss'][0]:.3f} -> {trained['loss'][1]:.3f}, {trained['tokens_per_s']:,.0f} tokens/s, "
        f"{trained['step_time_s'] * 1e3:.0f} ms/step, MFU of the measured GEMM rate {verdict(mfu, GOALS['mfu'])}, "
        f"{trained['memory_gib']:.1f} GiB; two runs bitwise equal: {trained['bitwise_equal']}"
    )
    return "\n".join(lines)


def main() -> int:
    """Exit code 0 when every stage gave a result and every check passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench_gpu")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--only", choices=tuple(STAGES), help=argparse.SUPPRESS)  # in the stage's own process
    args = parser.parse_args()
    out: Path = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if args.only:
        result = STAGES[args.only](args.device, out)
        (out / f"{args.only}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        return 0
    stages = args.stages.split(",")
    for stage in stages:
        run_apart(stage, args.device, out)
    results = {stage: read(out, stage) for stage in stages}
    (out / "summary.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(summary(out))
    failed = [stage for stage, result in results.items() if "error" in result or (isinstance(result, dict) and result.get("failed"))]
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
