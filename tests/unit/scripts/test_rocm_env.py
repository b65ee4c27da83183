"""scripts/rocm_env.sh: the sources of a requested tag are built, and none after a failed clone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def fetch(tmp_path: Path, tag: str) -> subprocess.CompletedProcess[str]:
    """Run fetch as the build scripts do. Print the file of the checkout, and then "built"."""
    script = (
        f'source scripts/rocm_env.sh; folder="$(fetch file://{tmp_path}/apex {tag})"; cat "$folder/file"; echo built'
    )
    variables = {"PYTHON": "true", "FRONTIER_LLM_MODULES": "", "FRONTIER_LLM_SOURCES": str(tmp_path / "sources")}
    return subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def test_each_tag_has_its_own_checkout_and_a_failed_clone_ends_the_build(tmp_path: Path) -> None:
    repository = tmp_path / "apex"
    repository.mkdir()
    git(repository, "init", "-q")
    for tag in ("release/1.10.0", "release/1.11.0"):
        (repository / "file").write_text(f"{tag}\n")
        git(repository, "add", "file")
        git(repository, "commit", "-q", "-m", tag)
        git(repository, "tag", tag)
    assert fetch(tmp_path, "release/1.10.0").stdout == "release/1.10.0\nbuilt\n"
    assert fetch(tmp_path, "release/1.11.0").stdout == "release/1.11.0\nbuilt\n"
    for _ in range(2):
        failed = fetch(tmp_path, "release/1.12.0")
        assert failed.returncode != 0 and failed.stdout == "", failed.stderr
