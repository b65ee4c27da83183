"""Writes complete checkpoints without a model, for tests of code around the training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from frontier_llm.files import write_atomically
from frontier_llm.run.complete import MANIFEST, MANIFEST_DIGEST, digest_line, step_name

SHARD = "shard_00000.safetensors"


def save_only(run_dir: Path, step: int) -> Path:
    """Make step `step` the only complete checkpoint of a run directory, as in a run that keeps one. Returns its
    folder.
    """
    checkpoints = run_dir / "checkpoints"
    building = checkpoints / f"{step_name(step)}.tmp.1"
    building.mkdir(parents=True)
    shard = b"weights"
    manifest = {"progress": {"step": step}, "shards": [{"file": SHARD, "bytes": len(shard)}]}
    content = json.dumps(manifest).encode()
    (building / SHARD).write_bytes(shard)
    (building / MANIFEST).write_bytes(content)
    (building / MANIFEST_DIGEST).write_bytes(digest_line(content))
    final = checkpoints / step_name(step)
    if final.exists():
        shutil.rmtree(final)
    building.rename(final)
    for older in checkpoints.glob("step_*"):
        if older != final:
            shutil.rmtree(older)
    write_atomically(checkpoints / "LATEST", f"{final.name}\n")
    return final
