"""Tests all parts of a kernel launch except the GPU: ops, argument packing, csrc/gpu_launcher.cpp and a driver that
records its calls.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
import threading

import pytest
import torch

from frontier_llm.errors import BackendError
from frontier_llm.ops import AdamWUpdate, Scores
from frontier_llm.ops.gpu import GpuOps
from tests.harness.fake_gpu import DEVICE, IMAGE, STREAM, checked_address, fake_gpu, skipped

pytestmark = skipped


@pytest.fixture(scope="module", params=["gfx90a", "sm_90"])
def gpu_of_module(request, tmp_path_factory):
    with fake_gpu(request.param, tmp_path_factory.mktemp("code")) as gpu:
        yield gpu


@pytest.fixture
def gpu(gpu_of_module):
    yield gpu_of_module
    watch(gpu_of_module[1], 0)


def watch(driver, count):
    """Record `count` arguments of each following launch. A kernel must have that many."""
    ctypes.c_int.in_dll(driver, "wanted_count").value = count


def as_float(slot):
    return struct.unpack("<f", struct.pack("<Q", slot)[:4])[0]


def test_every_argument_arrives(gpu):
    kernels, driver, record = gpu
    ops = GpuOps(kernels)
    x = torch.zeros(5, 48)
    weight = torch.zeros(48)
    bias = torch.zeros(48)
    watch(driver, 14)
    out = ops.layer_norm(x, weight, bias, 1e-3)
    assert record.symbol == b"norm_forward" and list(record.grid) == [5, 1, 1] and list(record.block) == [256, 1, 1]
    assert (record.stream, record.shared, record.device) == (STREAM, 0, DEVICE)
    assert list(record.slots[:3]) == [x.data_ptr(), 0, weight.data_ptr()]  # without a residual the pointer is null
    assert record.slots[4] == out.data_ptr() and record.slots[5] == x.data_ptr()
    assert [slot & 0xFFFFFFFF for slot in (record.slots[8], record.slots[10], record.slots[11])] == [48, 0, 1]
    assert as_float(record.slots[9]) == pytest.approx(1e-3)
    assert list(record.slots[12:14]) == [0, 0]  # Triton's scratch pointers


def test_long_integers_and_device_scalars(gpu):
    kernels, driver, record = gpu
    master, grad, first, second = (torch.zeros(4096) for _ in range(4))
    weights = torch.zeros(4096, dtype=torch.bfloat16)
    clip = torch.tensor(0.5)
    watch(driver, 14)
    update = AdamWUpdate(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1, grad_scale=clip)
    GpuOps(kernels).adamw_(master, grad, first, second, weights, update)
    tensors = (master, grad, first, second, weights, clip)
    assert list(record.slots[:7]) == [*(tensor.data_ptr() for tensor in tensors), 4096]
    assert as_float(record.slots[7]) == pytest.approx(1.0) and as_float(record.slots[8]) == pytest.approx(0.9)
    assert record.slots[13] & 0xFFFFFFFF == 1
    watch(driver, 3)
    kernels.launch("accumulate", torch.float32, "any", (1, 1, 1), main_grad=master, grad=grad, count=2**40 + 16)
    assert record.slots[2] == 2**40 + 16


@pytest.mark.parametrize(
    ("count", "offset", "symbol"),
    [
        (4096, 0, b"accumulate"),
        (4096, 4, b"accumulate"),
        (4095, 0, b"accumulate_unaligned"),
        (4096, 1, b"accumulate_unaligned"),
    ],
)
def test_alignment_is_looked_at_when_it_is_launched(gpu, count, offset, symbol):
    kernels, driver, record = gpu
    watch(driver, 3)
    main = torch.zeros(8192)[offset : offset + count]
    grad = torch.zeros(count)
    kernels._functions.clear()
    loads = record.loads
    GpuOps(kernels).accumulate_(main, grad)
    assert record.slots[0] == main.data_ptr()
    assert record.symbol == symbol
    GpuOps(kernels).accumulate_(main, grad)
    assert record.loads == loads + 1  # the code object is loaded once


def test_a_kernel_that_wants_alignment_refuses_anything_else(gpu):
    kernels, *_ = gpu
    q = torch.zeros(16, 1, 1, 64, dtype=torch.bfloat16)
    rows = torch.zeros(16)
    tensors = dict.fromkeys(("q", "k", "v", "o"), q) | {"slopes": None, "documents": None, "key_documents": None}
    tensors["logsumexp"] = rows
    numbers = {"scale": 0.125, "softcap": 0.0, "heads": 1, "group": 1, "head_dim": 72}
    numbers |= {"window": 16, "sequence": 16, "keys": 16, "offset": 0}
    strides = {f"{name}_{dim}": 64 for name in "qkvo" for dim in "sba"}
    with pytest.raises(BackendError, match=r"head_dim, v_b must be a multiple of 16(.|\n)*"):
        kernels.launch(
            "attention_forward", torch.bfloat16, "d64", (1, 1, 1), **tensors, **numbers, **{**strides, "v_b": 72}
        )


def test_attention_goes_through_on_views_and_asks_for_its_shared_memory(gpu):
    kernels, driver, record = gpu
    kernels._functions.clear()
    fused = torch.zeros(100, 2, 3, 4, 64, dtype=torch.float16)
    q, k, v = (x.requires_grad_() for x in fused.unbind(2))
    watch(driver, 29)
    out = GpuOps(kernels).attention(q, k, v, Scores(0.125))
    block = kernels.block("attention_forward", "d64", "BLOCK_M")
    assert list(record.grid) == [-(-100 // block), 8, 1] and record.shared == 60000
    # The arguments from the window on.
    assert [slot & 0xFFFFFFFF for slot in record.slots[10:20]] == [100, 100, 100, 0, 4, 1, 64, *q.stride()[:3]]
    assert kernels.architecture == "gfx90a" or record.shared_attribute == 60000
    watch(driver, 0)
    launches = record.launches
    out.sum().backward()
    assert record.launches == launches + 2  # grad_q, grad_kv


def test_wrong_tensors_numbers_and_grids_are_refused_before_the_driver(gpu):
    kernels, _, record = gpu
    launches = record.launches
    main = torch.zeros(64)
    q = torch.zeros(16, 1, 1, 64)
    with pytest.raises(
        BackendError, match=r"attention_forward \(fp32, d64\)(.|\n)*no code object for this(.|\n)*ops\.\* to sdpa"
    ):
        GpuOps(kernels).attention(q, q, q, Scores(0.125))
    with pytest.raises(BackendError, match=r"main_grad is torch\.float64 on cpu, but the kernel reads torch\.float32"):
        kernels.launch("accumulate", torch.float32, "any", (1, 1, 1), main_grad=main.double(), grad=main, count=64)
    with pytest.raises(BackendError, match=r"on cpu, but the kernel reads torch\.float32 on the current device 0"):
        checked_address("grad", torch.float32, main, 0)
    given = {"x": main, "weights": None, "out": main, "has_weights": 0}
    with pytest.raises(BackendError, match=r"does not fit its type(.|\n)*columns 4294967296"):
        kernels.launch("swiglu_forward", torch.float32, "any", (1, 1, 1), columns=2**32, **given)
    with pytest.raises(BackendError, match=r"grid has at most"):
        kernels.launch("swiglu_forward", torch.float32, "any", (1, 65536, 1), columns=64, **given)
    # an empty grid is not launched
    kernels.launch("swiglu_forward", torch.float32, "any", (0, 1, 1), columns=64, **given)
    for wrong in (given, {**given, "rows": 1}, {**given, "columns": 64, "rows": 1}):
        with pytest.raises((AssertionError, KeyError)):
            kernels.launch("swiglu_forward", torch.float32, "any", (1, 1, 1), **wrong)
    assert record.launches == launches


def test_what_the_driver_says_is_said(gpu, monkeypatch):
    kernels, driver, _ = gpu
    main = torch.zeros(64)
    fail = ctypes.c_int.in_dll(driver, "fail_launch")
    fail.value = 1
    with pytest.raises(BackendError, match=r"launch of accumulate .*unspecified launch failure \(code 719\)"):
        GpuOps(kernels).accumulate_(main, main)
    fail.value = 0
    code = next(iter(kernels._variants["accumulate", "fp32", "any"].codes.values()))
    with pytest.raises(
        BackendError, match=r"does not contain the kernel absent: some error \(code 500\)(.|\n)*build_ops"
    ):
        kernels._load(DEVICE, dataclasses.replace(code, symbol="absent"))
    with pytest.raises(BackendError, match="device 64"):
        kernels._load(64, code)
    if kernels.architecture == "sm_90":
        fail = ctypes.c_int.in_dll(driver, "fail_attribute")
        fail.value = 1
        with pytest.raises(BackendError, match="does not allow 100000 bytes of shared memory per block"):
            kernels._load(DEVICE, dataclasses.replace(code, shared_bytes=100_000))
        fail.value = 0
    broken = code.path.parent / "broken"
    broken.write_bytes(b"not ELF." + bytes([8]))  # the byte with the ABI version is the ninth
    kernels.tools["ptxas"] = "13.4"
    monkeypatch.setattr("frontier_llm.ops.prebuilt.driver_version", lambda: "CUDA 12.4")
    with pytest.raises(BackendError, match=r"the driver refuses the code object: some error \(code 200\)") as error:
        kernels._load(DEVICE, dataclasses.replace(code, path=broken))
    text = str(error.value)
    del kernels.tools["ptxas"]
    assert (
        "built by Triton 3.9.0, ptxas 13.4, ABI 8, which may be newer than this driver (CUDA 12.4)" in text
        and f"build them again on this machine, with the Triton of this torch: python setup.py build_ops --arch "
        f"{kernels.architecture}"
        in text
    )
    for variable in ("TRITON_PTXAS_PATH=", "TRITON_PTXAS_BLACKWELL_PATH="):
        assert (variable in text) == (kernels.architecture == "sm_90")


def test_a_driver_that_refuses_code_objects_is_known_before_the_first_launch(gpu):
    kernels, *_ = gpu
    kernels.load_any()
    code = next(iter(next(iter(kernels._variants.values())).codes.values()))
    code.path.write_bytes(b"text")
    with pytest.raises(BackendError, match="the driver refuses the code object"):
        kernels.load_any()
    code.path.write_bytes(IMAGE)


def test_another_thread_gets_its_device_first(gpu):
    """Autograd's threads start without a current device."""
    kernels, _, record = gpu
    main = torch.zeros(64)
    GpuOps(kernels).accumulate_(main, main)
    record.device = -1
    switches = record.context_switches
    thread = threading.Thread(target=lambda: GpuOps(kernels).accumulate_(main, main))
    thread.start()
    thread.join()
    assert record.device == DEVICE
    if kernels.architecture == "sm_90":
        assert record.context_switches == switches + 1
        GpuOps(kernels).accumulate_(main, main)
        assert record.context_switches == switches + 1  # the device is already current, so it is not set again
