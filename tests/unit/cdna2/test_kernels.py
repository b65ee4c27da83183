"""Executes the shipped machine code for gfx90a on the simulator and compares the results with float64.

These tests run every bf16 code object. `python -m tests.harness.check_gfx90a --all` runs all code objects.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from frontier_llm.errors import BackendError
from frontier_llm.ops import Scores, check, manifest, reference
from frontier_llm.ops.cases import normal
from frontier_llm.ops.gpu import GpuOps
from frontier_llm.ops.kernel_table import variants
from frontier_llm.ops.prebuilt import PrebuiltKernels
from tests.cdna2 import launch, load
from tests.cdna2.driver import SimulatedGpu, TracingGpu, as_bytes
from tests.cdna2.timing import matrix_flops
from tests.harness.check_gfx90a import simulate
from tests.harness.marks import but_first


@pytest.mark.exhaustive
@pytest.mark.thorough
def test_every_bf16_code_object_computes_what_the_reference_does(objects):
    results = list(simulate(objects, ["bf16"]))
    assert not [result for result in results if not result["ok"]]
    shipped = {line["file"] for line in manifest.read_manifest("gfx90a", objects)["kernels"] if line["dtype"] == "bf16"}
    assert shipped <= {file for result in results for file in result["files"]}
    assert all(result["instructions"] > 0 for result in results)


def test_routers_choose_and_pass_gradients_back_as_the_reference_does(objects, monkeypatch):
    """Routing is computed in fp32 only. Each code object is tested with each convention and with experts of equal
    score.
    """
    checks = check.checks
    monkeypatch.setattr(check, "checks", lambda dtype: [one for one in checks(dtype) if one.case.op == "route"])
    results = list(simulate(objects, ["fp32"]))
    assert not [result for result in results if not result["ok"]]
    shipped = {
        line["file"]
        for line in manifest.read_manifest("gfx90a", objects)["kernels"]
        if line["kernel"].startswith("route_")
    }
    assert shipped == {file for result in results for file in result["files"]} and len(shipped) == 12


@pytest.mark.parametrize("kernel", ["attention_forward", "attention_grad_kv", "attention_grad_q"])
@pytest.mark.parametrize(
    "variant", but_first(["d128", "d128-extras", "d64", "d64-extras", "d256", "d256-extras", "d256-softcap"], 2)
)
def test_attention_computes_no_product_twice(objects, kernel, variant):
    """If a block has more warps than tiles of rows, two warps compute the same products. This was the case for 4 warps
    on 64 rows with 32 x 32 instructions, and halved the speed.
    """
    blocks = variants(kernel, "gfx90a")[variant]
    dim = blocks.constants["BLOCK_D"]
    outer = blocks.constants["BLOCK_N" if kernel == "attention_grad_kv" else "BLOCK_M"]
    q, k, v = (torch.randn(2 * outer, 1, 1, dim, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    extras = (torch.ones(1), torch.zeros(1, 2 * outer)) if blocks.constants["EXTRAS"] else ()
    gpu = TracingGpu()
    out = GpuOps(PrebuiltKernels("gfx90a", objects, gpu)).attention(
        q, k, v, Scores(dim**-0.5, *extras, softcap=float(blocks.constants["SOFTCAP"]))
    )
    if kernel != "attention_forward":
        out.backward(out.detach())
    program, trace = gpu.traces[kernel]
    executed = blocks.warps * sum(matrix_flops(program.instructions[place]) for place, _ in trace)
    products = {"attention_forward": 2, "attention_grad_kv": 4, "attention_grad_q": 3}[kernel]
    assert executed == 2 * products * dim * outer * 2 * outer  # the traced first workgroup processes the most tiles


def test_attention_in_fp16_reads_views_where_they_lie(objects):
    driver = SimulatedGpu()
    ops = GpuOps(PrebuiltKernels("gfx90a", objects, driver))
    fused = normal(33, 2, 2, 3, 64, dtype=torch.float16)
    q, k, v = fused.unbind(3)
    wide = [x.double() for x in (q, k, v)]
    got = ops.attention(q, k, v, Scores(0.125))
    expected = reference.attention(*wide, Scores(0.125))
    assert check.units(got, expected) < 1.0
    (launch,) = driver.launches
    assert launch.symbol == "attention_forward" and launch.counts.instructions["mfma"] > 0
    assert as_bytes(q).ctypes.data == fused.data_ptr()


def test_a_wrong_length_leads_out_of_the_tensor_and_into_no_other(objects):
    kernels = PrebuiltKernels("gfx90a", objects, SimulatedGpu())
    both = torch.zeros(2, 1504)  # in host memory the second tensor follows the first directly
    with pytest.raises(
        BackendError,
        match=r"outside of the launch's tensors: 16 bytes at offset 6016 of main_grad, which has 6016 bytes",
    ):
        kernels.launch("accumulate", torch.float32, "any", (2, 1, 1), main_grad=both[0], grad=both[1], count=1520)
    # both arguments may refer to the same memory
    kernels.launch("accumulate", torch.float32, "any", (2, 1, 1), main_grad=both[0], grad=both[0], count=1504)


def test_the_two_ways_into_a_kernel_are_one(objects):
    """Newer firmware loads the first arguments itself and enters the kernel 256 bytes later. The kernel's prologue must
    load the same arguments.
    """
    kernel = load((objects / "accumulate-fp16-any.hsaco").read_bytes())
    trace = []
    count = 1024
    main_grad = np.zeros(count, np.float32)
    arguments = {"main_grad": main_grad, "grad": np.ones(count, np.float16), "count": count}
    counts = launch(kernel, (1, 1, 1), arguments, trace=trace)
    assert (main_grad == 1).all() and len(trace) == sum(counts.instructions.values()) / counts.waves
    instructions = kernel.program.instructions
    executed = [instructions[place].address - instructions[0].address for place, _ in trace]
    assert 256 in executed and all(address < 32 or address >= 256 for address in executed)


def test_a_copy_of_the_folder_runs_the_example_of_its_readme(objects, tmp_path):
    """The copy contains neither `driver.py` nor this project."""
    simulator = Path(__file__).resolve().parents[2] / "cdna2"
    copy = tmp_path / "cdna2"
    copy.mkdir()
    for path in simulator.glob("*.py"):
        if path.name != "driver.py":
            shutil.copy(path, copy)
    shutil.copy(objects / "accumulate-fp16-any.hsaco", tmp_path)
    example = (simulator / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    blocked = "import sys\nsys.modules['frontier_llm'] = sys.modules['torch'] = None\n"
    command = [sys.executable, "-c", blocked + example]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[1. 1. 1. 1.]") and "'vmem stored': 4096" in done.stdout
