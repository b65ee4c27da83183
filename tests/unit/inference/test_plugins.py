"""A run's plugins are part of its identity. Commands that read a checkpoint import the plugins from files that the user
named, or refuse.

Every command runs in its own interpreter, because a plugin's changes cannot be undone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from frontier_llm.checkpoint.directory import read_manifest
from frontier_llm.checkpoint.manifest import config_digest
from frontier_llm.config import own_plugins
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.meta import DatasetMeta, write_meta
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.run.complete import digest_line
from tests.harness.marks import but_first

# A plugin with an activation of the user. Neither the configuration nor the weights show this activation.
PLUGIN = """
from frontier_llm.model.layers import Mlp

usual = Mlp.forward
Mlp.forward = lambda self, x: -3.0 * usual(self, x)
"""
CHECKPOINT = Path("checkpoints") / "step_00000002"


def frontier_llm(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "frontier_llm.cli.main", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with run.yaml, mine.py beside it, and run/ with two steps. The run was started from another
    directory.
    """
    directory = tmp_path_factory.mktemp("plugins")
    codec = load_tokenizer("bytes")
    text = "the quick brown fox jumps over the lazy dog; " * 40
    with IndexedWriter(directory / "data", np.dtype("<u2")) as writer:
        writer.add_document([*codec.encode(text), codec.eod])
    write_meta(directory / "data", DatasetMeta("bytes", codec.digest, 257, 256, 1, len(text) + 1, len(text)))
    (directory / "mine.py").write_text(PLUGIN)
    run = {
        "plugins": ["mine.py"],
        "model": {"base": "llama-tiny", "vocab_size": 257, "sequence_length": 64},
        "batch": {"global_batch": 4},
        "precision": {"dtype": "fp32"},
        "optimizer": {"schedule": "constant"},
        "data": {"train": str(directory / "data"), "validation": str(directory / "data"), "tokenizer": "bytes"},
        "train": {
            "run_dir": str(directory / "run"),
            "steps": 2,
            "eval_samples": 28,
            "device": "cpu",
            "tensorboard": False,
        },
    }
    (directory / "run.yaml").write_text(json.dumps(run))  # JSON is YAML
    done = frontier_llm("train", str(directory / "run.yaml"), cwd=directory.parent)
    assert done.returncode == 0, done.stderr
    return directory


def copy_of(trained: Path, tmp_path: Path) -> Path:
    """Copy the run directory, with mine.py beside it, so that a test may change it."""
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.copy(trained / "mine.py", tmp_path / "mine.py")
    config = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(config.replace(str(trained / "mine.py"), str(tmp_path / "mine.py")))
    return tmp_path / "run"


def loss_of(done: subprocess.CompletedProcess[str]) -> float:
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout)["held_out"][0]["loss"])


@pytest.mark.thorough
def test_the_manifest_records_each_plugin_as_data(trained: Path) -> None:
    (plugin,) = read_manifest(trained / "run" / CHECKPOINT)[0].plugins
    assert plugin.name == plugin.path == str(trained / "mine.py") and len(plugin.sha256) == 64
    assert own_plugins(trained / "run") == (str(trained / "mine.py"),)


@pytest.mark.thorough
def test_evaluation_of_the_own_run_directory_is_that_of_the_run(trained: Path, tmp_path: Path) -> None:
    """The run's samples and the evaluation's windows begin at different tokens of the same text, so the losses agree
    only approximately.
    """
    rows = map(json.loads, (trained / "run" / "metrics.jsonl").read_text().splitlines())
    (*_, during) = [row["loss"] for row in rows if row["kind"] == "evaluation"]
    words = ("evaluate", str(trained / "run"), "--json")
    assert loss_of(frontier_llm(*words, cwd=tmp_path)) == pytest.approx(during, abs=0.005)
    (tmp_path / "mine.py").write_text("")
    assert abs(loss_of(frontier_llm(*words, "--plugin", "mine.py", cwd=tmp_path)) - during) > 0.05


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    but_first([["evaluate"], ["generate", "--prompt=a"], ["checkpoint", "export-hf"]]),
    ids=" ".join,
)
def test_a_checkpoint_alone_never_causes_an_import(trained: Path, tmp_path: Path, words: list[str]) -> None:
    """This also holds if the checkpoint contains its own run file."""
    checkpoint = tmp_path / "step_00000002"
    shutil.copytree(trained / "run" / CHECKPOINT, checkpoint)
    (checkpoint / "config.yaml").write_text("plugins: [mine.py]\n")
    (checkpoint / "mine.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n" + PLUGIN)
    places = [str(checkpoint)]
    if "export-hf" in words:
        places.append(str(tmp_path / "out"))
    refused = frontier_llm(*words, *places, cwd=tmp_path)
    assert refused.returncode == 2 and not (tmp_path / "imported").exists()
    assert (
        "needs the plugin mine.py (sha256 " in refused.stderr
        and f"add --plugin {trained / 'mine.py'}" in refused.stderr
    )
    given = frontier_llm(*words, *places, "--plugin", str(trained / "mine.py"), cwd=tmp_path)
    assert given.returncode == 0, given.stderr


@pytest.mark.thorough
def test_a_plugin_that_has_changed_is_refused_and_can_be_given(trained: Path, tmp_path: Path) -> None:
    run_dir = copy_of(trained, tmp_path)
    (tmp_path / "mine.py").write_text(PLUGIN + "# another word\n")
    refused = frontier_llm("evaluate", str(run_dir), "--json", cwd=tmp_path)
    assert refused.returncode == 2 and "was trained with the plugin mine.py (sha256 " in refused.stderr
    assert f"add --plugin {tmp_path / 'mine.py'} to use it as it is now" in refused.stderr
    given = frontier_llm("evaluate", str(run_dir), "--json", "--plugin", str(tmp_path / "mine.py"), cwd=tmp_path)
    assert given.returncode == 0 and "is used instead, which has sha256" in given.stderr


@pytest.mark.thorough
def test_a_run_directory_of_another_user_is_like_a_checkpoint_alone(trained: Path, tmp_path: Path) -> None:
    run_dir = copy_of(trained, tmp_path)
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(run_dir / "config.yaml", 65534, 65534)
    refused = frontier_llm("evaluate", str(run_dir), cwd=tmp_path)
    assert refused.returncode == 2 and "which neither --plugin nor your run file names" in refused.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("plugins", "now"),
    but_first([("[mine.py]", "mine.py"), ("[]", "none"), ("[other.py]", "other.py")]),
    ids=["edited", "none", "other"],
)
def test_a_resume_with_other_or_changed_plugins_is_refused(
    trained: Path,
    tmp_path: Path,
    plugins: str,
    now: str,
) -> None:
    run_dir = copy_of(trained, tmp_path)
    (tmp_path / "mine.py").write_text(PLUGIN.replace("-3.0", "-2.0"))
    (tmp_path / "other.py").write_text("")
    words = ["train", str(trained / "run.yaml"), f"train.run_dir={run_dir}", f"plugins={plugins}", "train.steps=3"]
    refused = frontier_llm(*words, cwd=tmp_path)
    assert refused.returncode == 2 and "plugins: 'mine.py (sha256 " in refused.stderr and f"→ '{now}" in refused.stderr
    assert "--allow-change plugins" in refused.stderr
    allowed = frontier_llm(*words, "--allow-change", "plugins", "--dry-run", cwd=tmp_path)
    assert allowed.returncode == 0, allowed.stderr


@pytest.mark.thorough
def test_a_plugin_that_only_lies_elsewhere_is_the_same(trained: Path, tmp_path: Path) -> None:
    run_dir = copy_of(trained, tmp_path)
    words = ["train", str(trained / "run.yaml"), f"train.run_dir={run_dir}", "plugins=[mine.py]", "train.steps=3"]
    assert frontier_llm(*words, "--dry-run", cwd=tmp_path).returncode == 0


@pytest.mark.thorough
def test_a_checkpoint_from_before_digests_is_known_by_its_plugins_names(trained: Path, tmp_path: Path) -> None:
    """Up to version 3, a manifest has no list of plugins. The configuration in the manifest names the plugins, relative
    to the working directory.
    """
    run_dir = copy_of(trained, tmp_path)
    manifest = json.loads((run_dir / CHECKPOINT / "manifest.json").read_text())
    del manifest["plugins"]
    manifest["config"]["plugins"] = ["mine.py"]
    manifest["config_sha256"] = config_digest(manifest["config"])
    content = json.dumps(manifest).encode()
    (run_dir / CHECKPOINT / "manifest.json").write_bytes(content)
    (run_dir / CHECKPOINT / "manifest.sha256").write_bytes(digest_line(content))
    config = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(config.replace(str(tmp_path / "mine.py"), "mine.py"))
    refused = frontier_llm("evaluate", str(run_dir), "--json", cwd=tmp_path.parent)
    assert refused.returncode == 2 and "needs the plugin mine.py (sha256 not recorded)" in refused.stderr
    found = frontier_llm("evaluate", str(run_dir), "--json", cwd=tmp_path)
    assert (
        "plugins: mine.py is not in the folder of that file; the copy in the working directory is used. To keep it, "
        "write ../mine.py" in found.stderr
    )
    usual = loss_of(frontier_llm("evaluate", str(trained / "run"), "--json", cwd=tmp_path))
    assert loss_of(found) == usual
