"""scripts/first_gpu.sh: late and failing stages, the page, and a complete rehearsal in a bare environment."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from frontier_llm.machine.load import OWN_STACK, load_machine, rates
from frontier_llm.planner.uncertainty import SAME, basis

FOLDER = Path(__file__).resolve().parents[3] / "scripts" / "first_gpu"


@pytest.fixture(scope="module")
def scripts() -> Any:
    """Yield a function that imports the script's modules by name. `stages` imports torch, so it is imported late."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def driver(scripts: Any) -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_gpu", FOLDER / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["first_gpu"] = module  # a dataclass in this module looks up the module by this name
    spec.loader.exec_module(module)
    return module


def test_a_late_stage_ends_with_all_that_it_started(driver: ModuleType, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    fault = driver.run_limited(
        ["bash", "-c", f"sleep 300 & echo $! > {pid}; wait"], 2.0, tmp_path / "log", dict(os.environ)
    )
    assert fault == "not ready after 2 s"
    state = Path(f"/proc/{int(pid.read_text())}/stat")
    # the process has ended, and its status may not have been read yet
    assert not state.exists() or state.read_text().split()[2] in "ZX"


def test_a_stage_that_fails_is_a_result_with_the_end_of_its_log(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    stage = driver.Stage("ops", 60, "each op")
    monkeypatch.setattr(driver, "ROOT", tmp_path)  # there are no stages in this folder
    failed = driver.run_stage(stage, 60, tmp_path, sys.executable, dict(os.environ))
    assert failed["state"] == "failed" and failed["why"] == "exit code 2" and "No such file" in failed["log_tail"][-1]
    skipped = driver.run_stage(stage, -1.0, tmp_path, sys.executable, dict(os.environ))
    assert (skipped["state"], skipped["why"]) == ("skipped", "no time was left for it")
    assert json.loads((tmp_path / "ops.json").read_text()) == skipped


@pytest.mark.thorough
def test_what_has_nothing_to_do_is_skipped_with_a_reason(tmp_path: Path) -> None:
    """This test runs only on machines with fewer than two GPUs."""
    if torch.cuda.device_count() > 1:
        pytest.skip("there are GPUs to test")
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parents[1])}
    subprocess.run([sys.executable, str(FOLDER / "stages.py"), "layout", str(tmp_path)], env=environment, check=True)
    result = json.loads((tmp_path / "layout.json").read_text())
    assert (result["state"], result["why"]) == ("skipped", "there is only one device, so nothing is sent")


def timing(
    op: str, way: str, seconds: float | None, bytes_moved: int = 0, flops: float = 0.0, error: str = ""
) -> dict[str, Any]:
    return {"op": op, "way": way, "seconds": seconds, "bytes_moved": bytes_moved, "flops": flops, "error": error}


def test_a_rehearsal_without_the_packages_that_it_copies_names_them(scripts: Any, tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"error: the rehearsal needs no-such-package, which .*\n  fix: source scripts"
    ):
        scripts("wheels").from_installed(["no-such-package"], tmp_path)


def test_shares_are_of_the_right_ceiling_and_constants_make_a_machine_file(scripts: Any, tmp_path: Path) -> None:
    page = scripts("page")
    timings = [
        timing("rms_norm", "ours", 1.0, 900),
        timing("attention", "ours", 1.0, flops=50e12),
        timing("attention", "sdpa-flash", 0.9, flops=50e12),
        timing("attention", "sdpa-cudnn", 0.8, flops=50e12),
        timing("attention", "sdpa-efficient", None, flops=50e12, error="RuntimeError: none"),
        timing("linear", "ours", 1.0, flops=80e12),
        timing("rope", "ours", None, 9, error="BackendError: broken"),
        timing("swiglu", "all", None, error="RuntimeError: no memory"),
    ]
    machine = {
        "device": "NVIDIA H200",
        "architecture": "sm_90",
        "weight_gradients": "in-product",
        "devices": 8,
        "packages": {"torch": "2.11.0"},
        "memory_gib": 140.0,
    }
    safe = {"in_flight": "one", "source": "bench comm --hang-test on n0: one 200 of 200 steps"}
    safe |= {"communicator_memory": {"measured_bytes": 3 * 2**30, "communicators": 5}}
    results = {
        "machine": machine,
        "ceilings": {"copy_bytes_per_s": 1000.0, "gemm_flops_per_s": 100e12},
        "hang_test": safe,
        "attention": {"attention": {"seconds": {"cudnn": 0.8, "triton": 1.0}}},
        "products": {
            "devices": 8,
            "measured_for_s": 60.0,
            "together_over_alone": 1.25,
            "products": [
                {
                    "product": "1b head, forward",
                    "mnk": [100, 200, 500],
                    "seconds": 2e-6,
                    "fastest_device_s": 1.5e-6,
                    "alone_s": 1.6e-6,
                }
            ],
        },
    }
    stages = [
        {"stage": name, "about": "", "state": "passed", "seconds": 1, "limit_s": 9, "result": one}
        for name, one in results.items()
    ]
    late = {
        "stage": "ops",
        "about": "",
        "state": "failed",
        "seconds": 9,
        "limit_s": 9,
        "why": "late",
        "until_then": {"timings": timings},
    }
    text, content = page.render({"rehearsal": False, "seconds": 20, "stages": [*stages, late]})
    assert "of copy bandwidth 90% (meets 85%)" in text
    assert "| 800.000 ms (cudnn) | 50.0 TFLOP/s, 50% of the product rate; of SDPA's best 80% (misses 90%) |" in text
    assert (
        text.count("| failed |") == 3
        and "- rope, ours: BackendError: broken" in text
        and "swiglu, all: RuntimeError: no memory" in text
    )
    (tmp_path / "machine.yaml").write_text(content)
    here = load_machine(str(tmp_path / "machine.yaml"))
    reserve = here.stacks[OWN_STACK].reserve_gib
    assert (reserve.value, reserve.tag) == (3.0, "measured")
    assert here.device.peak_tflops.value == 100 and here.in_flight.mode == "one" and here.environment == "h100"
    assert here.device.gemm_shapes is not None and here.device.gemm_shapes.mnk_us == ((100, 200, 500, 2.0),)
    assert "8 device(s) busy for 60 s" in here.device.gemm_shapes.source and rates(here).accumulate_bytes == 0
    assert rates(here).weight_gradients == "in-product"
    assert "fp32 with the method in-product" in text
    assert "| 1b head, forward | 100 x 200 x 500 | 0.002 ms | 10.0 | 0.002 ms | 0.002 ms |" in text
    # The products alone do not make all constants of a prediction known.
    assert basis(here, OWN_STACK, {"matrix products": 1.0, "gradient reduction": 1.0}) != SAME
    # Training uses cudnn, which is faster than the project's kernel.
    assert here.stacks[OWN_STACK].flash_efficiency.value == 0.625 and here.stacks[OWN_STACK].hbm_efficiency.value == 0.9


@pytest.mark.exhaustive
@pytest.mark.thorough  # a minute and a half on two idle cores
@pytest.mark.timeout(900)
def test_the_rehearsal_plays_every_stage_in_a_bare_environment(driver: ModuleType, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    # Other tests in this process may have enabled Triton's interpreter, but the rehearsal compiles a kernel.
    environment.pop("TRITON_INTERPRET", None)
    # 14 minutes are enough on a busy machine.
    command = [str(FOLDER.with_suffix(".sh")), "--rehearse", "--out", str(tmp_path), "--minutes", "14"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=880)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((tmp_path / "page.json").read_text())
    assert {stage["stage"]: stage["state"] for stage in summary["stages"]} == dict.fromkeys(
        (one.name for one in driver.STAGES), "passed"
    )
    assert any(name.startswith("pydantic_core-") for name in summary["wheels"])
    results = {stage["stage"]: stage["result"] for stage in summary["stages"]}
    assert results["machine"]["weight_gradients"] == "rounded-product"  # method of torch on a CPU
    assert results["build"]["compiled"] == ["accumulate"] and results["checks"]["cases"] > 40
    assert (
        results["addresses"]["launches"] > 40 and results["step_1b"]["bitwise_equal"] and results["step_1b"]["kernels"]
    )
    assert results["products"]["devices"] == 2 and len(results["products"]["products"]) == 15
    assert results["hang_test"]["communicator_memory"] is None  # ranks on CPUs have no communicators on a device
    assert results["reference"]["fp32_worst_difference"] < 1e-3 and results["layout"]["worst_difference"] < 0.02
    assert max(results["families"]["worst_difference"].values()) < 1e-3 and not results["families"]["not_run"]
    # The host waits once, for the sums at the end of the step.
    for one in results["waits"].values():
        (line,) = one["waits"]
        assert line.startswith("frontier_llm/training/step.py:") and line.endswith("(sum_over_world)"), line
    assert results["restart"]["losses"]["whole"] == results["restart"]["losses"]["resumed"]
    assert results["hang_test"]["in_flight"] == "many" and (tmp_path / "in_flight.yaml").is_file()
    ways = {(one["op"], one["way"]): one for stage in ("ops", "compiled") for one in results[stage]["timings"]}
    assert ways["rms_norm", "compiled"]["seconds"] > 0 and ways["attention", "sdpa-flash"]["seconds"] > 0
    assert ways["attention", "sdpa-cudnn"]["error"] and "| rms_norm |" in (tmp_path / "page.md").read_text()
