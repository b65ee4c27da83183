"""scripts/bench_gpu.py on the CPU at tiny sizes: every stage's Python, what it does about failures, and the summary."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_llm.measure.ops import Timing
from frontier_llm.ops.no_jit import allow_jit

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "bench_gpu.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
def test_every_stage_gives_a_result_and_is_summed_up(script, tmp_path):
    """In this process but for the checks and the training, which are processes of their own in any case."""
    for stage, run in script.STAGES.items():
        try:
            result = run("cpu", tmp_path)
        finally:
            allow_jit()  # `ops` sets the guard, and `compiled` is next
        (tmp_path / f"{stage}.json").write_text(json.dumps(result))
    assert script.read(tmp_path, "ceilings")["copy_bytes_per_s"] > 0
    assert script.read(tmp_path, "checks")["tests"] > 0 and script.read(tmp_path, "checks")["failures"] == 0
    trained = script.read(tmp_path, "train")
    assert trained["steps"] == 4 and trained["bitwise_equal"] is True
    ways = {(timing["op"], timing["way"]): timing for stage in ("ops", "compiled") for timing in script.read(tmp_path, stage)}
    for op in ("attention", "rms_norm", "swiglu", "cross_entropy", "adamw", "weight_gradient"):
        assert ways[op, "ours"]["seconds"] > 0 and ways[op, "eager"]["seconds"] > 0
    assert ways["rms_norm", "compiled"]["seconds"] > 0
    assert ways["attention", "sdpa-cudnn"]["error"] and math.isnan(ways["attention", "sdpa-cudnn"]["seconds"])  # said, and the rest goes on
    assert ways["attention", "sdpa-flash"]["seconds"] > 0
    text = script.summary(tmp_path)
    assert "two runs bitwise equal: True" in text and "| rms_norm |" in text and "attention, sdpa-cudnn: " in text


def test_the_script_runs_stages_apart(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(tmp_path), "--stages", "ceilings"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["ceilings"]["device"] == "cpu"
    assert "copy" in done.stdout and "train: not run" in done.stdout


def test_a_stage_that_fails_or_hangs_is_an_error_in_its_result(script, tmp_path, monkeypatch):
    monkeypatch.setitem(script.LIMITS_S, "ceilings", 0.001)
    script.run_apart("ceilings", "cpu", tmp_path)
    assert "TimeoutExpired" in script.read(tmp_path, "ceilings")["error"]
    assert script.read(tmp_path, "ops") == {"error": "not run"}
    (tmp_path / "ops.json").write_text(json.dumps({"error": "killed", "until_then": [vars(Timing("rms_norm", "ours", 0.001, 9, 0.0))]}))
    text = script.summary(tmp_path)
    assert "train: not run" in text and "compiled: not run" in text
    assert "ops: killed" in text and "| rms_norm | 1.000 ms |" in text


def test_a_late_stage_ends_with_all_that_it_started(script, tmp_path):
    pid = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        script.run_limited(["bash", "-c", f"sleep 300 & echo $! > {pid}; wait"], 2)
    state = Path(f"/proc/{int(pid.read_text())}/stat")
    assert not state.exists() or state.read_text().split()[2] in "ZX"  # ended, if nobody has asked after it yet


def test_shares_are_of_the_right_ceiling(script):
    timings = [
        Timing("rms_norm", "ours", 1.0, 900, 0.0),
        Timing("attention", "ours", 1.0, 0, 50e12),
        Timing("attention", "sdpa-flash", 0.8, 0, 50e12),
        Timing("attention", "sdpa-cudnn", math.nan, 0, 50e12, "RuntimeError: none"),
        Timing("linear", "ours", 1.0, 0, 80e12),
        Timing("rope", "ours", math.nan, 9, 0.0, "BackendError: broken"),
        Timing("swiglu", "all", math.nan, 0, 0.0, "RuntimeError: no memory"),
    ]
    text = "\n".join(script.op_lines(timings, 1000.0, 100e12))
    assert "of copy bandwidth 90% (meets 85%)" in text
    assert "50 TFLOP/s, 50% of the GEMM rate; of SDPA's best 80% (misses 90%)" in text
    assert "80 TFLOP/s, 80% of the GEMM rate |" in text
    assert text.count("| failed |") == 2 and "rope, ours: BackendError: broken" in text and "swiglu, all: RuntimeError: no memory" in text
