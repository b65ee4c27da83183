"""Checkpoints of earlier formats still load. `version_2` was written on two tensor-parallel ranks before optimizers
declared their states.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from frontier_llm.checkpoint.directory import read_manifest
from frontier_llm.checkpoint.inspect import verify
from frontier_llm.checkpoint.weights import CheckpointWeights
from frontier_llm.cli.main import main

WRITTEN = Path(__file__).parent / "version_2" / "step_00000002"
LOSSES = [3.367240786552429, 3.2802189588546753]  # of steps 3 and 4, as the program that wrote it went on


def test_version_2_is_intact_and_belongs_to_adamw() -> None:
    assert verify(WRITTEN) == []
    manifest = read_manifest(WRITTEN)[0]
    assert (manifest.version, manifest.optimizer, manifest.kinds) == (2, "adamw", ("master", "exp_avg", "exp_avg_sq"))
    assert CheckpointWeights(WRITTEN).rectangle("layers.1.mlp.up.weight", (0, 0), (16, 8)).abs().sum() > 0


def test_version_2_resumes_on_another_layout(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN.parent, tmp_path / "run" / "checkpoints")
    config = json.loads((WRITTEN / "manifest.json").read_text())["config"]
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(config))
    settings = ["parallel.tensor=1", "parallel.data=2", "train.steps=4", f"train.run_dir={tmp_path / 'run'}"]
    assert main(["train", str(run), *settings]) == 0
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [record["loss"] for record in records if record["kind"] == "step"] == pytest.approx(LOSSES, rel=1e-5)
