"""A checkpoint that megatron-core wrote gives the same outputs here as in megatron-core."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from frontier_llm.comm import serial_mesh
from frontier_llm.config import OpsConfig
from frontier_llm.inference.model import build_inference_model, inference_plan
from frontier_llm.interop.megatron.weights import MegatronModel
from tests.harness.marks import but_first

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="pip install megatron-core")
ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", but_first(["llama", "gpt"]))
def test_logits_equal_megatron_cores(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.interop.megatron.core_model", kind, str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    witness = torch.load(tmp_path / "witness.pt", weights_only=True)
    source = MegatronModel(tmp_path / "iter_0000001")
    plan = inference_plan(source.model, 1, 1, 1)
    model = build_inference_model(source, plan, serial_mesh(), torch.device("cpu"), "fp32", OpsConfig())
    with torch.inference_mode():
        x_SBH = model.hidden(witness["tokens"].T.contiguous())
        assert x_SBH is not None
        found_BSV = model.whole_logits(x_SBH).transpose(0, 1)
    assert witness["logits"].abs().max() > 1
    assert (found_BSV - witness["logits"]).abs().max() < 5e-5
