"""scripts/tune_attention.py but for the compiler and the GPU: what is tried, and what is made of the times."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from frontier_llm.ops.kernel_table import ARCHITECTURES, ATTENTION_BLOCKS

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "tune_attention.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("tune_attention", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_candidates_cover_the_diagonal_by_whole_blocks(script, architecture):
    for kernel in script.KERNELS:
        tried = script.candidates(kernel, architecture)
        for m, n, warps, stages in tried:
            outer, inner = (n, m) if kernel == "attention_grad_kv" else (m, n)
            assert outer % inner == 0 and warps in (4, 8) and (stages == 1 or architecture.startswith("sm"))
        shipped = ATTENTION_BLOCKS[architecture][kernel][128]
        assert len(set(tried)) == len(tried) and shipped[2] in (4, 8)


def test_one_kernel_is_replaced(script):
    said = []

    def stub(name):
        return SimpleNamespace(block=lambda kernel, variant, block: name, launch=lambda kernel, *rest: said.append((name, kernel)))

    mixed = script.WithCandidate(stub("shipped"), stub("candidate"), "attention_forward")
    for kernel in ("attention_forward", "attention_delta"):
        mixed.launch(kernel, torch.bfloat16, "d64", (1, 1, 1))
    assert said == [("candidate", "attention_forward"), ("shipped", "attention_delta")]
    assert (
        mixed.block("attention_forward", "d64", "BLOCK_M") == "candidate" and mixed.block("attention_grad_q", "d64", "BLOCK_M") == "shipped"
    )


def test_the_best_comes_first_and_a_broken_candidate_is_passed_over(script, tmp_path, monkeypatch, capsys):
    for index, blocks in enumerate(([64, 64, 4, 1], [128, 64, 8, 2], [128, 128, 8, 3])):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "candidate.json").write_text(json.dumps({"kernel": "attention_forward", "dim": 128, "blocks": blocks}))
    times = iter([2.0, 3.0, 1.0, RuntimeError("too much shared memory")])

    def time_of(*_args):
        value = next(times)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(script, "PrebuiltKernels", lambda architecture, folder: None)
    monkeypatch.setattr(script, "time_of", time_of)
    found = script.run(SimpleNamespace(architecture="sm_90"), tmp_path, "cuda")
    assert found == {"attention_forward, 128": [(1.0, [128, 64, 8, 2]), (2.0, "shipped"), (3.0, [64, 64, 4, 1])]}
    assert "2: too much shared memory" in capsys.readouterr().out
