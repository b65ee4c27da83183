"""The losses of a run that changes ops, transport and layout stay close to those of runs that do not change them.

Its checkpoints contain nothing that depends on ops, transport or layout, and the log reports each change.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.training import switch_vendors
from frontier_llm.cli.main import main as command_line


@pytest.mark.thorough
def test_a_run_changes_vendor_and_layout_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tmp_path / "text.jsonl"
    texts.write_text(json.dumps({"text": " ".join(map(str, range(3000)))}) + "\n")
    for part in ("train", "validation"):
        assert (
            command_line(["data", "tokenize", str(texts), "--tokenizer", "bytes", "--output", str(tmp_path / part)])
            == 0
        )
    monkeypatch.setattr(
        switch_vendors, "LAYOUTS", {name: switch_vendors.LAYOUTS[name] for name in ("1 rank", "dp 2 x pp 2, zb-h1")}
    )
    words = [
        "--steps",
        "3",
        "--dtypes",
        "fp32",
        "--data",
        tmp_path,
        "--directory",
        tmp_path / "runs",
        "--out",
        tmp_path / "out",
    ]
    result = switch_vendors.main([str(word) for word in words])["fp32"]
    assert result["checkpoints"] == {
        "alike": 2,
        "types": ["F32"],
        "tensors": result["checkpoints"]["tensors"],
        "samples": 48,
    }
    before, after = result["segments"]
    assert before["from steady"] == 0 and not before["said on resuming"]
    assert 0 < after["from steady"] < 5e-6 and 0 < after["of vendors"] < 5e-6 < result["between two steps, median"]
    said = {change.partition(":")[0] for change in after["said on resuming"]}
    assert {
        "ops.attention",
        "ops.adamw",
        "comm.transport",
        "parallel.data",
        "parallel.pipeline",
        "parallel.schedule",
    } <= said
    assert not {key for key in said if key.startswith(("model", "optimizer", "data"))}
    assert (tmp_path / "out" / "figures" / "switch_vendors.png").stat().st_size > 10_000
