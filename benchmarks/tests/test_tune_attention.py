"""benchmarks/ops/tune_attention.py without compiler and GPU: the candidates, and the use of their times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import ROOT
from benchmarks.ops import tune_attention
from frontier_llm.ops.kernel_table import ARCHITECTURES, ATTENTION_BLOCKS, Blocks


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_candidates_cover_the_diagonal_by_whole_blocks_and_give_each_warp_rows(architecture):
    amd = architecture.startswith("gfx")
    for kernel in tune_attention.KERNELS:
        tried = tune_attention.candidates(kernel, architecture)
        for m, n, warps, stages, matrix, *_ in tried:
            outer, inner = (n, m) if kernel == "attention_grad_kv" else (m, n)
            assert (
                outer % inner == 0 and outer >= warps * ((matrix or 32) if amd else 16) and stages <= (2 if amd else 3)
            )
        assert len(set(tried)) == len(tried)
        shipped = ATTENTION_BLOCKS[architecture][kernel]["d64"]
        assert shipped in tried or not amd


def test_one_kernel_is_replaced():
    said = []

    def stub(name):
        return SimpleNamespace(
            block=lambda kernel, variant, block: name, launch=lambda kernel, *rest: said.append((name, kernel))
        )

    mixed = tune_attention.WithCandidate(stub("shipped"), stub("candidate"), "attention_forward")
    for kernel in ("attention_forward", "attention_grad_kv"):
        mixed.launch(kernel, torch.bfloat16, "d64", (1, 1, 1))
    assert said == [("candidate", "attention_forward"), ("shipped", "attention_grad_kv")]
    assert (
        mixed.block("attention_forward", "d64", "BLOCK_M") == "candidate"
        and mixed.block("attention_grad_q", "d64", "BLOCK_M") == "shipped"
    )


def test_the_best_comes_first_and_a_broken_candidate_is_passed_over(tmp_path, monkeypatch, capsys):
    for index, blocks in enumerate(([64, 64, 4, 1], [128, 64, 8, 2], [128, 128, 8, 3])):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "candidate.json").write_text(
            json.dumps(
                {
                    "kernel": "attention_forward",
                    "variant": "d128",
                    "blocks": blocks,
                }
            )
        )
    times = iter([2.0, 3.0, 1.0, RuntimeError("too much shared memory")])

    def time_of(*_args):
        value = next(times)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(tune_attention, "PrebuiltKernels", lambda architecture, folder: None)
    monkeypatch.setattr(tune_attention, "time_of", time_of)
    found = tune_attention.run(SimpleNamespace(architecture="sm_90"), tmp_path, "cuda")
    assert found == {"attention_forward, d128": [(1.0, [128, 64, 8, 2]), (2.0, "shipped"), (3.0, [64, 64, 4, 1])]}
    assert "2: too much shared memory" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.exhaustive
def test_simulated_shares_are_below_one_and_fall_where_warps_compute_the_same(objects, tmp_path):
    """The candidate has the block sizes that were shipped before the kernels had ever been executed. With them, two
    warps computed each of the first two products.
    """
    pytest.importorskip("triton", reason="pip install --no-deps triton")
    blocks = list(Blocks(64, 32, 4))
    code = "import pathlib; from benchmarks.ops import tune_attention as t; "
    code += (
        f"print(t.compile_candidate('gfx90a', 'attention_grad_q', 'd128', t.Blocks(*{blocks}), "
        f"pathlib.Path({str(tmp_path)!r})))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path / "c")
    }
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=environment,
        cwd=ROOT,
        timeout=200,
    )
    shares = tune_attention.simulate(objects, tmp_path, sequence=256)
    assert {key.partition(",")[0] for key in shares} == set(tune_attention.KERNELS)
    assert all(0.1 < share < timing.matrix_share < 1 for found in shares.values() for share, _, timing in found)
    (best, shipped, _), (worse, tried, timing) = shares["attention_grad_q, d128"]
    assert (shipped, tried) == ("shipped", blocks) and worse < 0.8 * best and worse < 0.7 * timing.matrix_share
