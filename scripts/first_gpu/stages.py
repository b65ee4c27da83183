"""One stage of first_gpu.sh, in its own process: `stages.py NAME OUT` writes OUT/NAME.json.

With FIRST_GPU_DEVICE=rehearsal it runs on a CPU at tiny sizes. A stage returns its result. A result with `wrong` has
failed. A result with `skipped` contains the reason why the stage was not run.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = os.environ.get("FIRST_GPU_DEVICE") == "rehearsal"
DEVICE = "cpu" if REHEARSAL else "cuda"
CLI = [sys.executable, "-m", "frontier_llm.cli.main"]

# Llama's shapes with head dim 128, so that attention is as in larger models: 1.1 and 3.1 billion parameters.
MODELS: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden": 2048,
        "layers": 20,
        "heads": 16,
        "kv_heads": 16,
        "ffn_hidden": 5632,
        "sequence_length": 2048,
        "vocab_size": 32000,
    },
    "3b": {
        "hidden": 3072,
        "layers": 26,
        "heads": 24,
        "kv_heads": 24,
        "ffn_hidden": 8192,
        "sequence_length": 2048,
        "vocab_size": 32000,
    },
}


class Skipped(Exception):
    """The stage does not apply to this machine. The text contains the reason."""


def machine(_out: Path) -> dict[str, Any]:
    """Return driver, versions, devices and tools."""
    import torch

    if not REHEARSAL and not torch.cuda.is_available():
        raise RuntimeError(f"torch of {sys.executable} sees no GPU: set PYTHON, or try first_gpu.sh --rehearse")
    tools = {
        name: shutil.which(name)
        for name in ("nvidia-smi", "rocm-smi", "nvcc", "hipcc", "ptxas", "compute-sanitizer", "c++")
    }
    from frontier_llm.ops.torch_linear import weight_gradient_method

    count = torch.cuda.device_count()
    packages = {name: _version(name) for name in ("torch", "triton", "numpy", "pydantic", "flash_attn", "apex")}
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": packages,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "tools": {name: path for name, path in tools.items() if path},
        "device": torch.cuda.get_device_name() if count else "cpu",
        "architecture": _architecture(),
        "weight_gradients": weight_gradient_method(torch.bfloat16, torch.device(DEVICE)),
        "devices": count,
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / 2**30 if count else None,
        "driver": _driver(tools),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver(tools: dict[str, str | None]) -> str:
    if tools["nvidia-smi"]:
        return _said(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"]
        )
    return _said(["rocm-smi", "--showdriverversion", "--showproductname"]) if tools["rocm-smi"] else "none"


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()


def _architecture() -> str:
    if REHEARSAL:
        return "sm_90"  # a rehearsal compiles the kernels of sm_90 and loads them into the fake driver
    from frontier_llm.ops.driver import architecture_of_device

    return architecture_of_device()


def build(_out: Path) -> dict[str, Any]:
    """Build the C++ parts, then this GPU's kernels.

    If the driver refuses the kernels, they are built again with the machine's own assembler.
    """
    result: dict[str, Any] = {"architecture": _architecture()}
    native = subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=ROOT, check=False)
    result["native"] = (
        "built"
        if native.returncode == 0
        else "not built: a C++ compiler and torch's headers are needed (see logs/build.log)"
    )
    if REHEARSAL:
        return result | _rehearsed_build()
    from frontier_llm.ops.manifest import PTXAS_VARIABLES

    for assembler in (None, _assembler()):
        if not (fault := _kernels_fault()):
            return result | _built(result["architecture"])
        print(fault, flush=True)
        environment = {**os.environ, **(dict.fromkeys(PTXAS_VARIABLES, assembler) if assembler else {})}
        command = [sys.executable, "setup.py", "--quiet", "build_ops", "--arch", result["architecture"]]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        result["built_with"] = assembler or "Triton's assembler"
        if done.returncode:
            break
        if not torch_is_nvidia():
            break
    fault = _kernels_fault()
    return result | (_built(result["architecture"]) if not fault else {"wrong": fault})


def _assembler() -> str | None:
    """Return the ptxas of this machine's CUDA, whose output its driver accepts."""
    places = [
        os.environ.get("PATH", ""),
        *(f"{os.environ.get(name) or '/usr/local/cuda'}/bin" for name in ("CUDA_HOME", "CUDA_PATH")),
    ]
    return shutil.which("ptxas", path=os.pathsep.join(places))


def torch_is_nvidia() -> bool:
    import torch

    return bool(torch.version.cuda)


def _kernels_fault() -> str:
    """Return the reason why this GPU's kernels cannot be used, or ''.

    Runs in another process, because a refused code object stays refused in its process.
    """
    code = "from frontier_llm.ops.prebuilt import kernels_of_this_gpu as k; k()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def _built(architecture: str) -> dict[str, Any]:
    from frontier_llm.ops.manifest import read_manifest

    manifest = read_manifest(architecture)
    spilled = [
        f"{line['kernel']} {line['variant']}"
        for line in manifest["kernels"]
        if line["spills"] and line["dtype"] == "bf16"
    ]
    return {
        "kernels": len(manifest["kernels"]),
        "triton": manifest["tools"]["triton"],
        "assembler": manifest["tools"].get("ptxas"),
        "abi": sorted({line.get("abi", 0) for line in manifest["kernels"]}),
        "spilled_bf16": sorted(set(spilled)),
    }


def _rehearsed_build() -> dict[str, Any]:
    """Compile a kernel with Triton, and load one code object into the fake driver."""
    from frontier_llm.ops.aot.build import Build, compile_one
    from tests.harness.fake_gpu import fake_gpu

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        compiled = compile_one(Build("sm_90", "accumulate", "bf16", "any", True), Path(folder)).symbol
        with fake_gpu("sm_90", Path(folder)) as (kernels, *_):
            kernels.load_any()
    return {"kernels": len(kernels._variants), "compiled": [compiled], "triton": _version("triton"), "spilled_bf16": []}


def checks(_out: Path) -> dict[str, Any]:
    """Check every op at odd shapes, forward and backward. A rehearsal checks the reference ops."""
    from frontier_llm.ops import reference
    from frontier_llm.ops.check import DTYPES, check

    if REHEARSAL:
        results = list(check(reference, "cpu", ["bf16"]))  # type: ignore[arg-type]
    else:
        from frontier_llm.ops.gpu import GpuOps
        from frontier_llm.ops.prebuilt import kernels_of_this_gpu

        results = list(check(GpuOps(kernels_of_this_gpu()), "cuda", list(DTYPES)))
    return _summed(asdict(result) | {"ok": result.ok} for result in results)


def _summed(cases: Iterable[dict[str, Any]]) -> dict[str, Any]:
    listed = list(cases)
    bad = [
        f"{case['op']} {case['dtype']} {case['shape']}: {case['fault'] or case['error']}"
        for case in listed
        if not case["ok"]
    ]
    worst = max((case["error"] / case["limit"] for case in listed if case["ok"]), default=0.0)
    return {"cases": len(listed), "worst_of_its_limit": worst, **({"wrong": "; ".join(bad)} if bad else {})}


def addresses(out: Path) -> dict[str, Any]:
    """Run every op in bf16 with each memory access checked. ROCm has no such tool for existing code objects."""
    if REHEARSAL:
        return _fake_addresses()
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        raise Skipped(
            "no compute-sanitizer here; gfx90a's kernels were executed with checked addresses by "
            "python -m tests.harness.check_gfx90a (simulated)"
        )
    log = out / "logs" / "compute-sanitizer.log"
    options = ["--tool", "memcheck", "--error-exitcode", "86", "--log-file", str(log)]
    command = [checker, *options, *CLI, "ops", "check", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
    last = found[-1] if found else done.stderr.strip()[-300:]
    if done.returncode == 0:
        return {"checker": checker, "said": last}
    return {"checker": checker, "wrong" if "ERROR SUMMARY" in last else "skipped": last}


def _fake_addresses() -> dict[str, Any]:
    """Check each launch's pointers before the fake driver receives them (ops/prebuilt.py)."""
    from frontier_llm.ops.check import check
    from frontier_llm.ops.gpu import GpuOps
    from tests.harness.fake_gpu import fake_gpu

    with tempfile.TemporaryDirectory() as folder, fake_gpu("sm_90", Path(folder)) as (kernels, _, record):
        faults = [result.fault for result in check(GpuOps(kernels), "cpu", ["bf16"]) if result.fault]
        return {
            "checker": "fake driver",
            "launches": record.launches,
            **({"wrong": "; ".join(faults)} if faults else {}),
        }


def ceilings(_out: Path) -> dict[str, Any]:
    """Measure the copy bandwidth and bf16 product rate of this device with torch."""
    from frontier_llm.experiments.measure.ops import copy_bandwidth

    sizes = (128,) if REHEARSAL else (4096, 8192, 16384)
    rates = {size: _product_rate(size) for size in sizes}
    return {
        "copy_bytes_per_s": copy_bandwidth(DEVICE, 2**20 if REHEARSAL else 4 * 2**30),
        "gemm_flops_per_s": max(rates.values()),
        "gemm_by_size": rates,
    }


def _product_rate(size: int) -> float:
    """Return FLOP/s of torch's product of two square bf16 matrices of random numbers. It is the ceiling of the
    products.
    """
    import torch

    from frontier_llm.experiments.measure.timing import kernel_s

    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    return 2 * size**3 / min(kernel_s(lambda: left @ right, DEVICE) for _ in range(5))


def ops(out: Path) -> dict[str, Any]:
    """Time this project's ops, eager torch and SDPA's back-ends in alternation, without compilation."""
    from frontier_llm.config.schema import OpsConfig
    from frontier_llm.ops import select_ops, working_dtype

    dtype = working_dtype("bf16")
    return _timed(out, "ops", select_ops(OpsConfig(no_jit=True), DEVICE, dtype), 3, None)


def compiled(out: Path) -> dict[str, Any]:
    """Time the plain torch operations (without kernels of this package), compiled by torch.compile. A rehearsal uses
    only Dynamo, which needs no compiler.
    """
    import torch

    from frontier_llm.config.schema import OpsConfig
    from frontier_llm.ops import select_ops, working_dtype

    compiler = (lambda function: torch.compile(function, backend="eager")) if REHEARSAL else torch.compile
    return _timed(out, "compiled", select_ops(OpsConfig(), DEVICE, working_dtype("bf16")), 2, compiler)


def _timed(out: Path, stage: str, chosen: Any, rounds: int, compiler: Callable[..., Any] | None) -> dict[str, Any]:
    """Return all timings. Earlier timings are in a file, in case the stage is stopped."""
    import torch

    from frontier_llm.experiments.measure.ops import compare

    timings: list[dict[str, Any]] = []
    for timing in compare(
        chosen, model_of("1b"), 2 if REHEARSAL else 8, torch.bfloat16, DEVICE, rounds=rounds, compiler=compiler
    ):
        timings.append(asdict(timing) | ({"seconds": None} if timing.error else {}))
        (out / f"{stage}.partial.json").write_text(json.dumps({"timings": timings}), encoding="utf-8")
    return {"timings": timings}


def model_of(name: str) -> Any:
    from frontier_llm.config.load import load_model

    return load_model("llama-tiny", {}) if REHEARSAL else load_model("llama-2-7b", MODELS[name])


def attention(out: Path) -> dict[str, Any]:
    """Measure every attention back-end at the 1B model's shapes. The training stages use the fastest."""
    from frontier_llm.experiments.measure.attention_choice import tune

    return tune(out / "attention.yaml", model_of("1b"), 2 if REHEARSAL else 8, "bf16", DEVICE, rounds=3)


def step_1b(out: Path) -> dict[str, Any]:
    """Measure speed, memory and time by kernel of a step. Ten losses are computed twice and must be equal to the
    bit.
    """
    import steps

    return steps.speed("1b", out, twice=True)


def step_3b(out: Path) -> dict[str, Any]:
    """Measure the same values for a larger model."""
    import steps

    return steps.speed("3b", out, twice=False)


def products(_out: Path) -> dict[str, Any]:
    """Time the models' matrix products by shape on all devices at once, for a minute."""
    import products

    return products.measure()


def reference(out: Path) -> dict[str, Any]:
    """Compare a small model's steps on this device with plain torch on the CPU."""
    import steps

    return steps.against_cpu(out)


def families(_out: Path) -> dict[str, Any]:
    """Compare the first losses of a small model of every family with plain torch on the CPU."""
    import families

    return families.against_cpu()


def waits(_out: Path) -> dict[str, Any]:
    """Count the host's waits for the device in one step, with and without experts."""
    import families

    return families.waits()


def restart(out: Path) -> dict[str, Any]:
    """Compare a run that was stopped and resumed with an uninterrupted run."""
    import families

    return families.restart(out)


def hang_test(out: Path) -> dict[str, Any]:
    """Run frontier-llm bench comm --hang-test over this machine's devices."""
    import steps

    return steps.hang_test(out)


def layout(out: Path) -> dict[str, Any]:
    """Compare the same run on one device and on several devices."""
    import steps

    return steps.layout(out)


STAGES = (
    machine,
    build,
    checks,
    ceilings,
    ops,
    attention,
    step_1b,
    step_3b,
    products,
    reference,
    families,
    waits,
    restart,
    hang_test,
    layout,
    addresses,
    compiled,
)


def main() -> int:
    name = sys.argv[1]
    out = Path(sys.argv[2])
    run = next(stage for stage in STAGES if stage.__name__ == name)
    try:
        result = run(out)
    except Skipped as reason:
        result = {"skipped": str(reason)}
    state = "failed" if "wrong" in result else "skipped" if "skipped" in result else "passed"
    why = {"why": str(result.get("wrong") or result["skipped"])} if state != "passed" else {}
    (out / f"{name}.json").write_text(json.dumps({"state": state, **why, "result": result}), encoding="utf-8")
    return int(state == "failed")


if __name__ == "__main__":
    import stages  # `steps` imports this module by this name, and both must use the same class Skipped

    raise SystemExit(stages.main())
