"""Checkpoints of other format versions. Commit 1a97201 wrote `version_3` on two tensor-parallel ranks."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest
import yaml

from frontier_llm.checkpoint.directory import MANIFEST, MANIFEST_DIGEST, digest_line, read_manifest
from frontier_llm.checkpoint.inspect import verify
from frontier_llm.checkpoint.shard import write
from frontier_llm.cli.main import main
from frontier_llm.data.position import START

WRITTEN = Path(__file__).parent / "version_3" / "step_00000002"
LOSSES = [4.284821391105652, 4.02243709564209]  # losses of steps 3 and 4 after commit 1a97201 resumed the run


def resume(tmp_path: Path) -> int:
    """Continue the checkpoint in `tmp_path` for two steps on another layout, and return the exit code."""
    config = json.loads((WRITTEN / MANIFEST).read_text())["config"]
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(config))
    settings = ["parallel.tensor=1", "parallel.data=2", "train.steps=4", f"train.run_dir={tmp_path / 'run'}"]
    return main(["train", str(run), *settings])


@pytest.mark.thorough
def test_version_3_resumes_on_another_layout(tmp_path: Path) -> None:
    assert verify(WRITTEN) == []
    shutil.copytree(WRITTEN.parent, tmp_path / "run" / "checkpoints")
    assert resume(tmp_path) == 0
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [record["loss"] for record in records if record["kind"] == "step"] == pytest.approx(LOSSES, rel=1e-5)
    manifest, _ = read_manifest(tmp_path / "run" / "checkpoints" / "step_00000004")
    assert manifest.version == 4
    assert manifest.progress.position not in (None, START)


@pytest.mark.parametrize(
    ("version", "fix"), [(1, "git checkout b4b69c5"), (2, "git checkout b4b69c5"), (5, "or a newer one")]
)
def test_other_versions_are_refused_and_left_alone(
    version: int, fix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(WRITTEN.parent, checkpoints)
    path = checkpoints / WRITTEN.name
    content = json.loads((path / MANIFEST).read_text())
    content["version"] = version
    if version == 1:
        del content["block_bytes"]
    if version < 3:
        del content["data"], content["optimizer"]
    data = json.dumps(content).encode()
    (path / MANIFEST).write_bytes(data)
    (path / MANIFEST_DIGEST).write_bytes(digest_line(data))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    assert resume(tmp_path) == 2
    message = capfd.readouterr().err
    assert f"has format version {version}, but this frontier_llm reads versions 3 and 4" in message
    assert fix in message
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_digest_follows_the_documented_formula(tmp_path: Path) -> None:
    """Hash a header, two full blocks and a short block by the formula of docs/checkpoint_format.md."""
    head = b"header"
    data = random.Random(1).randbytes(9 << 20)
    blocks = [data[start : start + (4 << 20)] for start in range(0, len(data), 4 << 20)]
    digests = [hashlib.sha256(part).digest() for part in (head, *blocks)]
    expected = hashlib.sha256(b"".join(digests)).hexdigest()
    assert write(tmp_path / "shard", head, memoryview(data)) == expected
    assert (tmp_path / "shard").read_bytes() == head + data
