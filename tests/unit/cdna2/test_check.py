"""Output and exit codes of `frontier-llm ops check` and python -m tests.harness.check_gfx90a."""

from __future__ import annotations

import json

import pytest
import torch

from frontier_llm.cli.main import main
from frontier_llm.ops import check, prebuilt
from tests.cdna2.driver import SimulatedGpu
from tests.harness import check_gfx90a


@pytest.fixture
def swiglu_alone(monkeypatch):
    checks = check.checks
    monkeypatch.setattr(check, "checks", lambda dtype: [one for one in checks(dtype) if one.case.op == "swiglu"])


@pytest.mark.usefixtures("swiglu_alone")
@pytest.mark.thorough
def test_the_script_simulates(objects, capsys, monkeypatch):
    folder = ["--folder", str(objects)]
    assert check_gfx90a.main([*folder, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["dtype"] for row in rows} == {"bf16"} and all(row["ok"] for row in rows)
    assert check_gfx90a.main([*folder, "--all"]) == 0
    printed = capsys.readouterr().out
    assert "| swiglu | fp32 | 3 x 1101 |" in printed and "12 code objects" in printed
    monkeypatch.setattr(check, "units", lambda got, expected: 7.0)
    assert check_gfx90a.main(folder) == 1
    printed = capsys.readouterr().out
    assert "| 7.00 |" in printed and "wrong" in printed


def test_the_script_says_what_is_missing(tmp_path, capsys):
    assert check_gfx90a.main(["--folder", str(tmp_path)]) == 2
    assert "have not been built" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_wants_a_gpu(capsys):
    assert main(["ops", "check"]) == 2
    assert "python -m tests.harness.check_gfx90a" in capsys.readouterr().err


@pytest.mark.usefixtures("swiglu_alone")
def test_the_command_checks_on_the_gpu(objects, capsys, monkeypatch):
    on_device = check.check
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        prebuilt, "kernels_of_this_gpu", lambda: prebuilt.PrebuiltKernels("gfx90a", objects, SimulatedGpu())
    )
    monkeypatch.setattr(check, "check", lambda ops, device, dtypes: on_device(ops, {"cuda": "cpu"}[device], dtypes))
    assert main(["ops", "check", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["dtype"] for row in rows} == {"bf16"} and all(row["ok"] for row in rows)
    monkeypatch.setattr(check, "units", lambda got, expected: 7.0)
    assert main(["ops", "check", "--all"]) == 1
    printed = capsys.readouterr().out
    assert "| swiglu | fp32 | 3 x 1101 | 7.00 |" in printed and "wrong: the error is above the limit" in printed
