"""The instruction sets of a CPU, and the limit that FRONTIER_LLM_INSTRUCTION_SET sets for the libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.errors import FrontierError
from frontier_llm.machine import processor
from frontier_llm.machine.processor import INSTRUCTION_SETS, VARIABLE, chosen_set, limit_instruction_set

LIMITS = list(INSTRUCTION_SETS[0].limits())
AVX2 = "flags : fpu fma avx2\nmodel name : Zen 2\n\nflags : other\n"
AVX512_BF16 = "flags : fma avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16\nmodel name : Zen 5\n\n"


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that replaces this CPU by an x86 CPU with the given /proc/cpuinfo."""
    for name in (VARIABLE, *LIMITS):
        monkeypatch.delenv(name, raising=False)

    def replace(text: str) -> None:
        path = tmp_path / "cpuinfo"
        path.write_text(text)
        facts = processor.cpu_facts.__wrapped__(path)
        monkeypatch.setattr(processor, "cpu_facts", lambda: facts)
        monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")

    return replace


@pytest.mark.parametrize(("text", "best"), [(AVX2, "avx2"), (AVX512_BF16, "avx512_bf16"), ("", "generic")])
def test_the_best_set_is_used_without_the_variable(cpu, text: str, best: str) -> None:
    cpu(text)
    assert chosen_set().name == best
    assert processor.has_bf16_instructions() == (best == "avx512_bf16")


def test_a_limit_below_bf16_takes_the_bf16_instructions_away(cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu(AVX512_BF16)
    monkeypatch.setenv(VARIABLE, "avx512")
    assert chosen_set().name == "avx512"
    assert not processor.has_bf16_instructions()


@pytest.mark.parametrize(
    ("value", "message"),
    [("avx512", r"this CPU \(Zen 2\) lacks avx512; its best set is avx2"), ("sse", "'sse' is not an instruction set")],
)
def test_a_set_that_the_cpu_lacks_is_an_error(cpu, monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    cpu(AVX2)
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(FrontierError, match=message):
        limit_instruction_set()


def test_a_limit_after_the_import_of_torch_is_an_error(cpu, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    cpu(AVX512_BF16)
    monkeypatch.setenv(VARIABLE, "avx2")
    monkeypatch.setitem(sys.modules, "torch", object())
    assert main(["ops", "list"]) == 2
    assert f"torch is imported already, so {VARIABLE}=avx2 comes too late" in capsys.readouterr().err
    assert not [name for name in LIMITS if name in os.environ]


def test_a_contradictory_limit_is_an_error(cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu(AVX512_BF16)
    monkeypatch.setenv(VARIABLE, "avx2")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    with pytest.raises(FrontierError, match="ONEDNN_MAX_CPU_ISA=AVX512_CORE contradicts"):
        limit_instruction_set()


ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
from frontier_llm.machine.processor import limit_instruction_set
limit_instruction_set()
import os, torch
from frontier_llm.ops.native import describe_instruction_sets
print(describe_instruction_sets())
a = torch.ones(64, 64)
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
    torch.ops.mkldnn._linear_pointwise(a, a, None, "none", [], "")
print(os.environ["MKL_ENABLE_INSTRUCTIONS"])
"""


needs_avx2 = pytest.mark.skipif("avx2" not in processor.cpu_facts()[1], reason="this CPU has no AVX2")


@needs_avx2
def test_torch_onednn_and_ours_use_the_limit() -> None:
    """oneDNN's own report names the set that it uses."""
    kept = {name: value for name, value in os.environ.items() if name not in LIMITS}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**kept, VARIABLE: "avx2", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"torch AVX2, oneDNN AVX2 (limited by {VARIABLE})" in done.stdout
    assert "ops avx2" in done.stdout or "ops not built" in done.stdout
    assert "isa:Intel AVX2\n" in done.stdout
    assert done.stdout.splitlines()[-1] == "AVX2"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["avx2", "avx512"])
def test_the_ops_of_a_cpu_are_correct_if_torch_and_onednn_are_limited(name: str) -> None:
    """Some of this package's ops call torch, which uses other code under a smaller instruction set. The test takes 8 s
    on one core.
    """
    if name not in {instructions.name for instructions in processor.supported_sets()}:
        pytest.skip(f"this CPU has no {name}")
    kept = {name: value for name, value in os.environ.items() if name not in LIMITS}
    program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/unit/ops/test_cpu.py"]
    limited = {**kept, VARIABLE: name}
    done = subprocess.run(program, cwd=ROOT, env=limited, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    best = processor.supported_sets()[-1].name
    assert name == best or f"this CPU's best is {name}" in done.stdout  # cases of larger sets are skipped
