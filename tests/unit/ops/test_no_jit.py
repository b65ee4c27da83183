"""With the no-JIT guard, each known function that compiles at run time raises an error that names its caller."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

from frontier_llm.config.schema import OpsConfig
from frontier_llm.errors import BackendError
from frontier_llm.machine.processor import VARIABLE, supported_sets
from frontier_llm.ops import select_ops
from frontier_llm.ops.no_jit import allow_jit, forbid_jit


@pytest.fixture
def guarded():
    forbid_jit()
    yield
    allow_jit()


def test_cpp_extension(guarded):
    from torch.utils import cpp_extension

    for attempt in (
        lambda: cpp_extension.load("x", ["x.cpp"]),
        lambda: cpp_extension.load_inline("x", "int f() { return 1; }"),
    ):
        with pytest.raises(
            BackendError, match=r"test_no_jit\.py:\d+\) would compile at run time \(torch.utils.cpp_extension.load"
        ):
            attempt()


def test_torch_compile_raises_when_called_not_when_decorated(guarded):
    def double(x):
        return 2 * x

    for compiled in (torch.compile(double), torch.compile(dynamic=True)(double), torch.compile(torch.nn.Linear(2, 2))):
        with pytest.raises(BackendError, match=r"torch.compile of .*(double|Linear)"):
            compiled(torch.ones(2))


def test_modules_that_are_imported_later_are_guarded_too(monkeypatch, tmp_path, guarded):
    package = tmp_path / "deepspeed" / "ops" / "op_builder"
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[:2]):
        (folder / "__init__.py").touch()
    (package / "builder.py").write_text(
        "class OpBuilder:\n    def jit_load(self, verbose=True):\n        return 'compiled'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    allow_jit()
    forbid_jit()  # install the guard again, now that no DeepSpeed of another test is loaded
    builder = importlib.import_module("deepspeed.ops.op_builder.builder")
    with pytest.raises(BackendError, match=r"deepspeed.ops.op_builder.builder.OpBuilder.jit_load"):
        builder.OpBuilder().jit_load()
    allow_jit()
    assert builder.OpBuilder().jit_load() == "compiled"


def test_triton(guarded):
    triton = pytest.importorskip("triton")
    with pytest.raises(BackendError, match=r"triton.*compile"):
        triton.compile("kernel.ttir")
    from triton.runtime.jit import JITFunction

    # A first launch calls this method.
    with pytest.raises(BackendError, match=r"triton\.runtime\.jit\.JITFunction\._do_compile"):
        JITFunction._do_compile(None)


def test_modules_that_compile_themselves(guarded):
    module = torch.nn.Linear(2, 2)
    module.compile()
    with pytest.raises(BackendError, match=r"torch\.compile"):
        module(torch.ones(2))


def test_the_flag_sets_the_guard_and_it_can_be_lifted():
    original = torch.compile
    select_ops(OpsConfig(no_jit=True), "cpu", torch.float64)
    try:
        forbid_jit()  # a second call has no further effect
        assert torch.compile is not original
    finally:
        allow_jit()
    assert torch.compile is original
    assert not any(type(finder).__name__ == "_GuardOnImport" for finder in sys.meta_path)


@pytest.mark.thorough
def test_the_quickstart_trains_under_avx2_without_compiler_and_writable_home(tmp_path):
    """Train the quickstart's run on 2 x 2 ranks with the guard on, an empty PATH and the instructions of AVX2.

    The home directory is /proc, which even root cannot write.
    """
    environment = {"PATH": "", "HOME": "/proc", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    has_avx2 = "avx2" in {instructions.name for instructions in supported_sets()}
    if has_avx2:
        environment[VARIABLE] = "avx2"
    small = [
        "data.train=synthetic",
        "data.validation=null",
        "data.tokenizer=null",
        "train.steps=2",
        "train.log_interval=1",
        "batch.global_batch=4",
    ]
    run = [
        "quickstart",
        f"train.run_dir={tmp_path / 'run'}",
        *small,
        "batch.micro_batch=1",
        "model.vocab_size=512",
        "train.tensorboard=false",
    ]
    command = [sys.executable, "-m", "frontier_llm.cli.main", "train", *run, "--no-jit"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    if has_avx2:  # also on a CPU with bf16 instructions
        assert "precision.dtype=auto: fp32" in done.stderr and "torch AVX2, oneDNN AVX2" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
