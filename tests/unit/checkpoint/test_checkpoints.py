from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from frontier_llm import failpoints
from frontier_llm.blueprint.parameters import Parameter, ParameterKind
from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint.inspect import check_resume
from frontier_llm.cli.main import main
from frontier_llm.config import RunConfig
from frontier_llm.data.identity import Dataset, datasets_of
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.errors import CheckpointError
from frontier_llm.topology.shards import shard
from tests.unit.checkpoint.serial import CONFIG, Run, in_child, progress
from tests.unit.checkpoint.test_damage import flip


def changed(**sections: dict) -> RunConfig:
    content = CONFIG.model_dump()
    for name, values in sections.items():
        content[name] = {**content[name], **values}
    return RunConfig.model_validate(content)


def test_nothing_to_load(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.checkpoints.newest() is None
    assert folder.read_latest(run.checkpoints.directory) == ""


@pytest.mark.parametrize(("saved", "loaded"), [("bf16", "fp32"), ("fp32", "fp16"), ("fp32", "fp64"), ("fp64", "bf16")])
def test_working_precision_may_change(saved: str, loaded: str, tmp_path: Path) -> None:
    run = Run(tmp_path, dtype=saved)
    run.save(3)
    run.checkpoints.close()
    other = Run(tmp_path, dtype=loaded)
    assert other.checkpoints.newest() == other.checkpoints.load(other.checkpoints.directory / "step_00000003")
    other.check(3)


@pytest.mark.parametrize(("saved", "resumed", "scale"), [("bf16", "fp16", 2.0**18), ("fp16", "bf16", 1.0)])
def test_the_loss_scale_follows_a_changed_precision(
    saved: str, resumed: str, scale: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: a bf16 checkpoint was continued in fp16 with the loss scale 1, with which small gradients vanish."""
    run = Run(tmp_path, config=changed(precision={"dtype": saved}))
    run.fill(9)
    run.checkpoints.begin(progress(9).model_copy(update={"loss_scale": 64.0, "scaler_clean_steps": 5}))
    run.checkpoints.close()
    other = Run(tmp_path, config=changed(precision={"dtype": resumed}))
    loaded = other.checkpoints.newest()
    assert (loaded.loss_scale, loaded.scaler_clean_steps) == (scale, 0)
    assert f"because the checkpoint has precision.dtype={saved}" in capfd.readouterr().err
    other.checkpoints.close()
    same = Run(tmp_path, config=changed(precision={"dtype": saved})).checkpoints.newest()
    assert (same.loss_scale, same.scaler_clean_steps) == (64.0, 5)


def test_keeps_the_newest_and_the_permanent(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_every=4)
    run.save(*range(1, 11))
    assert folder.named_steps(run.checkpoints.directory) == [10, 9, 8, 4]


def test_prunes_nothing_while_one_that_is_kept_is_damaged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    run.save(1, 2)
    flip(run.checkpoints.directory / "step_00000002" / "shard_00000.safetensors", 100_000)
    run.save(3)
    assert folder.named_steps(run.checkpoints.directory) == [3, 2, 1]
    assert "no older checkpoint is deleted" in capfd.readouterr().err
    flip(run.checkpoints.directory / "step_00000003" / "shard_00000.safetensors", 100_000)
    assert run.checkpoints.newest().step == 1
    run.check(1)


def test_failed_delete_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    run.save(1, 2)
    failpoints.arm("checkpoint.delete_renamed=errno:EACCES")
    run.save(3)
    failpoints.arm("")
    assert "cannot delete step_00000001.deleted.1: Permission denied" in capfd.readouterr().err
    run.save(4)
    assert run.checkpoints.newest(strict=True).step == 4


def test_leftovers_that_cannot_be_deleted_do_not_keep_a_run_from_starting(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.save(1)
    run.checkpoints.close()
    leftover = folder.temporary(run.checkpoints.directory, 2, 1)
    leftover.mkdir()
    failpoints.arm("checkpoint.delete_renamed=errno:EACCES")
    again = Run(tmp_path)
    failpoints.arm("")
    assert again.checkpoints.newest().step == 1 and leftover.exists()
    assert f"cannot delete {leftover.name}: Permission denied" in capfd.readouterr().err


def test_write_protected_checkpoints_stay(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # simulates a folder without write permission, because root may write anywhere
    monkeypatch.setattr(folder.os, "access", lambda path, mode: path.name != "step_00000001")
    run = Run(tmp_path)
    run.save(1, 2, 3, 4)
    assert folder.named_steps(run.checkpoints.directory) == [4, 3, 1]
    assert "cannot delete step_00000001: it is write-protected; it stays" in capfd.readouterr().err


@pytest.mark.parametrize("is_protected", [True, False])
def test_a_rewind_renames_a_checkpoint_that_it_cannot_delete(
    is_protected: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the rewind failed, and each restart loaded the newer checkpoint again."""
    run = Run(tmp_path)
    directory = run.checkpoints.directory
    if is_protected:
        monkeypatch.setattr(folder.os, "access", lambda path, mode: path.name != "step_00000004")
    else:  # an earlier deletion could not be completed
        (directory / "step_00000004.deleted.1" / "file").mkdir(parents=True)
    for number in range(2):
        run.save(3, 4)
        assert run.checkpoints.rewind(3).step == 3
        assert folder.named_steps(directory) == [3]
        renamed = f"step_00000004.rewound.1.{number}"
        assert (directory / renamed / folder.MANIFEST).is_file()
        assert f"it is now {renamed}, which no start loads" in capfd.readouterr().err


def test_a_checkpoint_that_latest_names_is_missed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    run.save(1, 2)
    (run.checkpoints.directory / "step_00000002").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="step_00000002: does not exist, although LATEST names it"):
        run.checkpoints.newest(strict=True)
    assert run.checkpoints.newest().step == 1
    assert "step_00000002: does not exist, although LATEST names it" in capfd.readouterr().err
    folder.point_latest(run.checkpoints.directory, "step_00000002")
    (run.checkpoints.directory / "step_00000001").rename(tmp_path / "away too")
    with pytest.raises(CheckpointError, match="no checkpoint is intact"):  # the run must not start from step 0
        run.checkpoints.newest()


def test_a_copy_without_latest_and_through_a_link(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.save(1, 2)
    run.checkpoints.close()
    (run.checkpoints.directory / folder.LATEST).unlink()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    held = Run(tmp_path / "run")
    assert in_child(lambda: Run(tmp_path / "link")) == 1  # the directory is in use
    held.checkpoints.close()
    linked = Run(tmp_path / "link")
    assert linked.checkpoints.newest().step == 2
    assert folder.read_latest(run.checkpoints.directory) == "step_00000002"


@pytest.mark.parametrize("name", ["step_٠٠٠٠٠٠٠٩", "step_00000009 ", "step_9", "step_00000009.tmp"])
def test_other_names_are_not_checkpoints(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    (run.checkpoints.directory / name).mkdir()
    assert folder.named_steps(run.checkpoints.directory) == [1]
    assert run.checkpoints.newest().step == 1


def test_changed_mathematics_must_be_allowed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, environment={"torch": "2.10.0"})
    run.save(2)
    run.checkpoints.close()
    config = changed(optimizer={"betas": (0.9, 0.999), "lr": 1e-5}, parallel={"tensor": 2})
    with pytest.raises(CheckpointError) as caught:
        Run(tmp_path, config=config).checkpoints.newest()
    text = str(caught.value)
    assert "optimizer.betas: [0.9, 0.95] → [0.9, 0.999]" in text and "optimizer.lr: 0.0003 → 1e-05" in text
    assert "--allow-change optimizer.lr --allow-change optimizer.betas" in text and "parallel" not in text
    allowed = Run(
        tmp_path, config=config, allow_changes=("optimizer.betas", "optimizer.lr"), environment={"torch": "2.13.0"}
    )
    assert allowed.checkpoints.newest().step == 2
    said = capfd.readouterr().err
    assert "parallel.tensor: 1 → 2" in said and "torch: '2.10.0' → '2.13.0'" in said


def test_other_tokens_under_the_same_path_must_be_allowed(tmp_path: Path) -> None:
    one = "1" * 64
    other = "2" * 64

    def resumes(data: dict[str, str], *allowed: str) -> bool:
        run = Run(
            tmp_path, datasets={path: Dataset(identity, 1000) for path, identity in data.items()}, allow_changes=allowed
        )
        try:
            return run.checkpoints.newest().step == 2
        finally:
            run.checkpoints.close()

    run = Run(tmp_path, datasets={"text": Dataset(one, 1000), "more": Dataset(one, 1000)})
    run.save(2)
    run.checkpoints.close()
    assert resumes({"text": one, "moved": other})  # a changed path is a change of data.train
    with pytest.raises(
        CheckpointError,
        match=r"'1{12}' → '2{12}' \(the tokens of more have changed\)\n[\s\S]*--allow-change data.train",
    ):
        resumes({"text": one, "more": other})
    assert resumes({"text": one, "more": other}, "data")


def test_a_parent_looks_at_the_data_before_ranks_start(tmp_path: Path) -> None:
    def write(last: int) -> None:
        with IndexedWriter(tmp_path / "text", "uint16") as writer:
            writer.add_document(np.array([5] * 1000 + [last]))

    write(1)
    config = changed(data={"train": str(tmp_path / "text")})
    run = Run(tmp_path, config=config, datasets=datasets_of([config]))
    run.save(2)
    run.checkpoints.close()
    check_resume(tmp_path / "checkpoints", config, [])
    write(2)
    with pytest.raises(CheckpointError, match=r"the tokens of .*text have changed"):
        check_resume(tmp_path / "checkpoints", config, [])
    check_resume(tmp_path / "checkpoints", config, ["data"])


def resume_changed(change: dict, refused: bool, step: int, tmp_path: Path) -> None:
    """Save a run at `step`, continue it with the changed keys in `change`, and check whether the change is refused."""
    run = Run(tmp_path)
    run.save(step)
    run.checkpoints.close()
    other = Run(tmp_path, config=changed(**change))
    if refused:
        with pytest.raises(CheckpointError, match="would change its mathematics"):
            other.checkpoints.newest()
    else:
        assert other.checkpoints.newest().step == step


@pytest.mark.parametrize(("change", "refused"), [
    ({"train": {"steps": 200}}, True),  # the cosine ends at train.steps, so every learning rate changes
    ({"train": {"steps": 200, "seed": 1}, "optimizer": {"schedule": "constant"}}, True),
    ({"precision": {"dtype": "fp32"}}, False),
    ({"train": {"run_dir": "elsewhere", "save_interval": 3}}, False),
    ({"batch": {"global_batch": 8, "micro_batch": 2}}, False),
    ({"batch": {"global_batch": 16}}, True),
    ({"data": {"seed": 5}}, True),
])  # fmt: skip
def test_which_changes_are_mathematics(change: dict, refused: bool, tmp_path: Path) -> None:
    resume_changed(change, refused, 2, tmp_path)


@pytest.mark.parametrize(("change", "refused"), [
    ({"train": {"steps": 200}, "optimizer": {"lr": 1e-5}, "data": {"seed": 5}, "batch": {"global_batch": 16}}, False),
    ({"train": {"seed": 1}}, True),
    ({"model": {"rope_theta": 500.0}}, True),
])  # fmt: skip
def test_before_the_first_step_only_the_weights_are_given(change: dict, refused: bool, tmp_path: Path) -> None:
    resume_changed(change, refused, 0, tmp_path)


def test_other_model_is_named_by_its_tensors(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(2)
    path = run.checkpoints.directory / "step_00000002"
    run.buckets[0].parameters[0].spec = shard(Parameter("other.weight", (3,), ParameterKind.VECTOR))
    with pytest.raises(
        CheckpointError, match=r"other.weight: has the shape \(3,\) in the model and does not exist in the checkpoint"
    ):
        run.checkpoints.load(path)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    run.save(1, 2)
    first, second = (str(run.checkpoints.directory / folder.step_name(step)) for step in (1, 2))
    assert main(["checkpoint", "list", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["latest"]) for row in rows] == [(1, False), (2, True)]
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert main(["checkpoint", "diff", first, first]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "diff", first, second, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["same_state"] is False and result["tensors"][0]["largest"] == 1000.0
    flip(run.checkpoints.directory / "step_00000001" / "shard_00000.safetensors", 99_999)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "expected" in capsys.readouterr().err
    assert main(["checkpoint", "list", str(tmp_path / "nowhere")]) == 2
