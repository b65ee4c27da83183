"""Output of `frontier-llm checkpoint list|verify|diff`, and checkpoints of the format's first version."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint.inspect import find
from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.cli.main import main
from frontier_llm.errors import CheckpointError
from frontier_llm.inference.open import open_model
from tests.unit.checkpoint.serial import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.save(2, 4)
    return run


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_list_is_a_table_with_ages_and_sizes(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run.checkpoints.directory
    old_s = time.time() - 2.5 * 3600
    os.utime(directory / "step_00000002" / folder.MANIFEST, (old_s, old_s))
    assert main(["checkpoint", "list", str(directory.parent)]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert [line.index(word) for line, word in ((first, "TP1"), (second, "TP1"))] == [header.index("written as")] * 2
    assert first.startswith("step_00000002") and first.endswith("2 h ago")
    assert second.startswith("step_00000004") and second.endswith("just now  LATEST")
    flip(directory / "step_00000002" / folder.MANIFEST, 5)
    assert main(["checkpoint", "list", str(directory.parent)]) == 1
    said = capsys.readouterr()
    assert "step_00000002  DAMAGED" in said.out and "sha256 is" in said.err


def test_verify_says_what_it_has_read(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run.checkpoints.directory
    assert main(["checkpoint", "verify", str(directory)]) == 0
    assert [line.split("  ")[:2] for line in capsys.readouterr().out.splitlines()] == [
        [f"step_0000000{step}", "intact"] for step in (2, 4)
    ]
    flip(directory / "step_00000004" / "shard_00000.safetensors", -1)
    assert main(["checkpoint", "verify", str(directory)]) == 1
    said = capsys.readouterr()
    assert "step_00000004  DAMAGED" in said.out and "MiB read in" in said.out and "it contains" in said.err


def test_a_checkpoint_that_its_run_deletes_is_not_damaged(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: on the directory of a running job, `verify` reported damage after each save."""
    pytest.importorskip("fsspec")
    directory = run.checkpoints.directory
    read_manifest = folder.read_manifest

    def deletes_step_2(path: Path) -> tuple[Manifest, bytes]:
        result = read_manifest(path)
        if path.name == "step_00000002":
            folder.delete_checkpoint(directory, 2, 1)
        return result

    url = (tmp_path / "store").as_uri()
    for name in ("verify", "list", "push"):
        run.save(2)
        with monkeypatch.context() as patch:
            patch.setattr(folder, "read_manifest", deletes_step_2)
            assert main(["checkpoint", name, str(directory)] + [url] * (name == "push")) == 0
        assert folder.named_steps(directory) == [4]
        said = capsys.readouterr()
        assert "DAMAGED" not in said.out and "step_00000004" in said.out
        assert ("step_00000002  was deleted by its run while it was read" in said.out + said.err) is (name != "list")
    assert main(["checkpoint", "verify", str(directory / "step_00000002")]) == 2
    assert "contains no complete checkpoint" in capsys.readouterr().err


def test_every_command_means_the_same_checkpoints(run: Run, tmp_path: Path) -> None:
    """Commands find the same checkpoints as training. The newest checkpoint is determined by its name, even if a crash
    came before LATEST was updated. A command also accepts the folder of a single checkpoint.
    """
    directory = run.checkpoints.directory
    folder.point_latest(directory, "step_00000002")
    (directory / "checkpoints").mkdir()  # an empty folder does not hide the checkpoints
    for path in (tmp_path, directory):
        assert [one.name for one in find(path)] == ["step_00000002", "step_00000004"]
        assert open_model(path).path.name == "step_00000004"
    assert (
        find(directory / "step_00000002")
        == [directory / "step_00000002"]
        == [open_model(directory / "step_00000002").path]
    )
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        find(directory / "checkpoints")
    with pytest.raises(CheckpointError, match="is not a model"):
        open_model(directory / "checkpoints")


def test_diff_groups_and_counts(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (str(run.checkpoints.directory / f"step_0000000{step}") for step in (2, 4))
    assert main(["checkpoint", "diff", first, first]) == 0
    assert capsys.readouterr().out == "weights and optimizer state are bit-equal\n"
    assert main(["checkpoint", "diff", first, second]) == 1
    out = capsys.readouterr().out
    assert (
        "\n  progress.step: 2 → 4\n" in out
        and "elements that differ" in out
        and out.endswith("weights or optimizer state differ\n")
    )
    assert max(map(len, out.splitlines())) < 180
    run_dir = run.checkpoints.directory.parent
    assert main(["checkpoint", "diff", str(run_dir), second]) == 0, "a run directory stands for its newest checkpoint"
