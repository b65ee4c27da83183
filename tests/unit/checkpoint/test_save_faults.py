"""A save that is cut off at any point leaves a loadable checkpoint, and the next start cleans up."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import frontier_llm
from frontier_llm import failpoints
from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import save, shard
from frontier_llm.checkpoint.lock import Superseded
from frontier_llm.checkpoint.manifest import Progress
from frontier_llm.checkpoint.save import Save, Saved
from frontier_llm.checkpoint.weights import CheckpointWeights, write_checkpoint
from frontier_llm.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.serial import CONFIG, Run, in_child, progress

BEFORE_RENAME = [
    "copied",
    "shard_created",
    "block_written",
    "shard_written",
    "shard_synced",
    "before_manifest",
    "manifest_written",
    "before_rename",
]
AFTER_RENAME = ["before_latest", "latest_written", "latest_moved", "before_delete", "delete_renamed"]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_files_that_grow_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without progress, the watchdog ends a run that waits for its files (see tests/faults)."""
    seen: list[int] = []
    run = Run(tmp_path, on_wait=lambda: seen.append(1))
    monkeypatch.setattr(save, "PROGRESS_S", 0.01)
    monkeypatch.setattr(shard, "SYNC_GROUPS", 1)
    flushed: list[int] = []
    monkeypatch.setattr(os, "fdatasync", flushed.append)

    def slow(path: Path, head: bytes, data: memoryview, on_progress: Callable[[], object]) -> str:
        for pieces in range(1, 4):
            while len(seen) < pieces:
                on_progress()
                time.sleep(0.01)
        return write(path, head, data, on_progress)

    write = shard.write
    monkeypatch.setattr(shard, "write", slow)
    run.save(2)
    assert len(seen) >= 4 and flushed
    seen.clear()
    run.checkpoints.newest()
    assert seen
    run.check(2)
    run.checkpoints.close()


def test_the_points_above_are_all_that_the_code_has() -> None:
    package = Path(frontier_llm.__file__).parent / "checkpoint"
    named = {
        name for path in package.glob("*.py") for name in re.findall(r'hit\("checkpoint\.(\w+)"\)', path.read_text())
    }
    assert named == {*BEFORE_RENAME, *AFTER_RENAME, "replaced", "loading", "loaded"}


@pytest.mark.parametrize("point", [*BEFORE_RENAME, *AFTER_RENAME])
def test_killed_while_saving(point: str, tmp_path: Path) -> None:
    def work() -> None:
        run = Run(tmp_path)
        run.save(2, 4)
        failpoints.arm(f"checkpoint.{point}=kill")
        run.save(6)

    assert in_child(work) == -signal.SIGKILL
    checkpoints = tmp_path / "checkpoints"
    run = Run(tmp_path)
    expected = 6 if point in AFTER_RENAME else 4
    loaded = run.checkpoints.newest(strict=True)
    assert loaded is not None and loaded.step == expected
    run.check(expected)
    assert folder.leftovers(checkpoints) == []
    assert folder.read_latest(checkpoints) == folder.step_name(expected)
    run.save(6, 8)
    assert folder.named_steps(checkpoints) == [8, 6]
    assert run.checkpoints.newest(strict=True).step == 8
    run.check(8)
    run.checkpoints.close()


def test_killed_while_replacing_a_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    def work() -> None:
        run = Run(tmp_path)
        run.save(4)
        failpoints.arm("checkpoint.replaced=kill")
        run.save(4)

    assert in_child(work) == -signal.SIGKILL
    assert folder.named_steps(tmp_path / "checkpoints") == []
    run = Run(tmp_path)
    assert run.checkpoints.newest().step == 4
    run.check(4)


@pytest.mark.parametrize(
    "point", ["shard_created", "block_written", "shard_written", "manifest_written", "before_rename", "before_latest"]
)
@pytest.mark.parametrize("cause", ["ENOSPC", "EIO", "EDQUOT", "EROFS"])
def test_failing_device(point: str, cause: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(2)
    failpoints.arm(f"checkpoint.{point}=errno:{cause}")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint") as caught:
        run.save(4)
    failpoints.arm("")
    text = str(caught.value)
    assert "the checkpoints before this one are untouched" in text
    if cause in ("ENOSPC", "EDQUOT"):
        assert re.search(r"needs 2\.\d MiB, .* and \d+ files are free", text)
    run.check(4)  # training continues from memory
    assert not list((tmp_path / "checkpoints").glob("step_*.tmp.*"))
    run.save(6)
    assert run.checkpoints.newest(strict=True).step == 6


@pytest.mark.parametrize("point", ["replaced", "before_latest", "latest_written"])
@pytest.mark.parametrize("cause", ["ENOSPC", "EIO"])
def test_failing_device_while_a_step_is_saved_again(point: str, cause: str, tmp_path: Path) -> None:
    """The device fails after the first rename. The checkpoint that is then in place, old or new, is complete, and the
    next save succeeds.
    """
    run = Run(tmp_path)
    run.save(2, 4)
    for _ in range(2):
        failpoints.arm(f"checkpoint.{point}=errno:{cause}")
        with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
            run.save(4)
        failpoints.arm("")
        assert folder.named_steps(tmp_path / "checkpoints") == [4, 2]
        assert run.checkpoints.newest(strict=True).step == 4
        run.check(4)
    run.save(4, 6)
    assert folder.named_steps(tmp_path / "checkpoints") == [6, 4] and folder.leftovers(tmp_path / "checkpoints") == []
    assert run.checkpoints.newest(strict=True).step == 6


def test_newest_checkpoint_deleted_while_it_is_loaded(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(2, 4)
    failpoints.arm("checkpoint.loading=sleep:1")
    timer = threading.Timer(0.5, shutil.rmtree, [tmp_path / "checkpoints" / "step_00000004"])
    timer.start()
    loaded = run.checkpoints.newest()
    timer.join()
    assert loaded is not None and loaded.step == 2
    run.check(2)
    assert folder.read_latest(tmp_path / "checkpoints") == "step_00000002"


def test_real_full_disk(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(mounted)], check=False, capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        run = Run(mounted)
        run.save(2, 4)
        with pytest.raises(
            CheckpointError, match=r"No space left on device; it needs 2\.\d MiB, and 1\.\d MiB and \d+ files are free"
        ):
            run.save(6)
        assert run.checkpoints.newest(strict=True).step == 4
        run.check(4)
        # otherwise its lock's heartbeat would warn during later tests that the directory is gone
        run.checkpoints.close()
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_file_size_limit(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(2)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large; it needs"):
            run.save(4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert run.checkpoints.newest(strict=True).step == 2


def test_unwritable_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"choose a train\.run_dir that is writable"):
        Run(tmp_path)


def test_state_is_that_of_the_call_even_when_training_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    failpoints.arm("checkpoint.shard_created=sleep:0.3")
    run.fill(2)
    save = run.checkpoints.begin(progress(2))
    run.fill(99)
    assert save.advance(2) is None
    assert folder.read_latest(tmp_path / "checkpoints") == ""
    assert save.finish() == Saved(2, tmp_path / "checkpoints" / "step_00000002")
    assert run.checkpoints.newest().step == 2
    run.check(2)


def test_background_failure_surfaces_at_a_later_poll_and_saves_never_overlap(tmp_path: Path) -> None:
    run = Run(tmp_path)
    failpoints.arm("checkpoint.shard_written=errno:EIO")
    run.checkpoints.begin(progress(2))
    with pytest.raises(CheckpointError, match="Input/output error"):
        run.checkpoints.begin(progress(4))  # waits for the save in progress, which has failed
    assert run.checkpoints.under_way is None
    failpoints.arm("checkpoint.shard_written=error:unforeseen")
    save = run.checkpoints.begin(progress(6))
    with pytest.raises(CheckpointError, match="RuntimeError: unforeseen"):
        while not save.is_over:
            save.advance(6)
    assert run.checkpoints.under_way is None
    assert folder.named_steps(tmp_path / "checkpoints") == []


def attempt(run: Run, step: int, failpoint: str = "") -> None:
    """Save as the training loop does, which tolerates one failure."""
    failpoints.arm(failpoint)
    with run.checkpoints.tolerating_one_failure():
        run.checkpoints.begin(progress(step))
        run.checkpoints.finish()
    failpoints.arm("")


def test_the_second_failure_in_a_row_is_raised(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    full = "checkpoint.shard_created=errno:ENOSPC"
    attempt(run, 5, full)
    assert "a save failed; training continues, and stops if the next save fails too" in capfd.readouterr().err
    assert run.checkpoints.newest_step == -1  # -1: the same step may be saved again
    attempt(run, 10)
    assert run.checkpoints.newest_step == 10
    attempt(run, 15, full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        attempt(run, 20, full)


def test_a_lost_run_directory_is_not_tolerated(tmp_path: Path) -> None:
    run = Run(tmp_path)
    lock = tmp_path / "checkpoints" / "incarnations" / "00000001.json"
    lock.rename(lock.with_name("00000002.json"))
    with pytest.raises(Superseded, match="incarnation 1 has been replaced by"):
        attempt(run, 5)
    lock.with_name("00000002.json").rename(lock)  # otherwise the heartbeat's thread would warn during later tests


@pytest.mark.parametrize("lag_steps", [0, 1, 3])
def test_training_waits_for_a_save_that_is_late(
    lag_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    write = Save._write
    monkeypatch.setattr(Save, "_write", lambda save: released.wait(60) and write(save))
    run = Run(tmp_path, lag_steps=lag_steps)
    run.fill(5)
    save = run.checkpoints.begin(progress(5))
    for steps_done in range(5, 5 + lag_steps):
        assert save.advance(steps_done) is None
    released.set()
    # without waiting, one call advances a save by one stage at most
    assert save.advance(5 + lag_steps) == Saved(5, tmp_path / "checkpoints" / "step_00000005")


def best_at(step: int) -> Progress:
    return progress(step).model_copy(update={"policy": {"best": {"step": step, "loss": 1.0}}})


def test_the_commit_names_the_best_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (2, 4):
        run.fill(step)
        run.checkpoints.begin(best_at(step) if step == 2 else progress(step))
        run.checkpoints.finish(verify=False)
        assert folder.read_latest(run.checkpoints.directory, folder.BEST) == "step_00000002"


def test_killed_before_best_is_named(tmp_path: Path) -> None:
    def work() -> None:
        run = Run(tmp_path)
        run.fill(4)
        failpoints.arm("checkpoint.latest_moved=kill")
        run.checkpoints.begin(best_at(4))
        run.checkpoints.finish()

    assert in_child(work) == -signal.SIGKILL
    checkpoints = tmp_path / "checkpoints"
    assert folder.read_latest(checkpoints, folder.BEST) == ""
    assert Run(tmp_path).checkpoints.newest().is_best
    assert folder.read_latest(checkpoints, folder.BEST) == "step_00000004"


def test_durability_order(tmp_path: Path) -> None:
    """Checked with strace: every file is fsynced before the rename, the folder after it, and LATEST is written last."""
    trace = tmp_path / "trace"
    script = f"""
from pathlib import Path
from tests.unit.checkpoint.serial import Run
Run(Path({str(tmp_path)!r})).save(2)
"""
    import shutil
    import sys

    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    subprocess.run(
        ["strace", "-f", "-y", "-o", str(trace), "-e", "trace=fsync,rename,write", sys.executable, "-c", script],
        check=True,
    )
    events = []
    for line in trace.read_text().splitlines():
        match = re.search(r"(fsync|rename)\((.*)", line)
        if (match and "step_00000002" in line) or (match and "LATEST" in line) or (match and "/checkpoints>" in line):
            events.append(re.sub(r"\d+(?=<)", "", match[0]))

    def first(pattern: str) -> int:
        return next(number for number, event in enumerate(events) if re.search(pattern, event))

    order = [
        r"fsync\(<.*shard_00000.safetensors>",
        r"fsync\(<.*manifest.json>",
        r"fsync\(<.*manifest.sha256>",
        r"fsync\(<.*\.tmp\.1>",
        r'rename\(".*step_00000002.tmp.1", ".*step_00000002"',
        r"fsync\(<.*/\.LATEST\.",
        r'rename\(".*/\.LATEST\.[0-9a-f]+", ".*/LATEST"',
    ]
    positions = [first(pattern) for pattern in order]
    assert positions == sorted(positions)
    assert "/checkpoints>" in events[positions[4] + 1] and "fsync" in events[positions[4] + 1]
    assert "/checkpoints>" in events[positions[6] + 1] and "fsync" in events[positions[6] + 1]


def test_failpoint_rules() -> None:
    failpoints.arm("a.b@1#2=error:boom,a.c%=errno:EIO", rank=1)
    failpoints.hit("a.b")
    with pytest.raises(RuntimeError, match="boom"):
        failpoints.hit("a.b")
    failpoints.hit("a.b")
    for _ in range(2):
        with pytest.raises(OSError, match=r"failpoint a\.c"):
            failpoints.hit("a.c")
    failpoints.arm("a.b@1=error:boom", rank=0)
    failpoints.hit("a.b")
    with pytest.raises(ConfigError), contextlib.suppress(RuntimeError):
        failpoints.arm("a.b=explode")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_not_saved(value: float, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(2)
    run.fill(4)
    run.optimizer.states[0]["master"][3] = value
    run.checkpoints.begin(progress(4))
    with pytest.raises(CheckpointError, match="step 4: weights are not finite: "):
        run.checkpoints.finish()
    assert folder.read_latest(tmp_path / "checkpoints") == "step_00000002\n".strip()
    assert folder.named_steps(tmp_path / "checkpoints") == [2] and folder.leftovers(tmp_path / "checkpoints") == []


def test_a_directory_moved_away_mid_run_is_called_that(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(2)
    (tmp_path / "checkpoints").rename(tmp_path / "archive")
    with pytest.raises(CheckpointError, match="was moved or deleted during the run") as caught:
        run.checkpoints.begin(progress(4))
    assert not isinstance(caught.value, Superseded) and not (tmp_path / "checkpoints").exists()
    run.checkpoints.close()


def test_a_full_disk_while_importing_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    run.save(2)
    config = CONFIG.model_copy(
        update={"train": CONFIG.train.model_copy(update={"run_dir": str(tmp_path / "imported")})}
    )
    source = CheckpointWeights(tmp_path / "run" / "checkpoints" / "step_00000002")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        CheckpointError, match=r"step_00000000\.tmp\.0/shard_00000\.safetensors: .*No space left on device; it needs"
    ):
        write_checkpoint(source, config, 1 << 30)
    assert list((tmp_path / "imported" / "checkpoints").iterdir()) == []


def test_an_import_that_fails_leaves_nothing_and_names_the_cause(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.save(2)
    source = CheckpointWeights(tmp_path / "run" / "checkpoints" / "step_00000002")
    (tmp_path / "file").write_text("")
    for run_dir, what in (
        (tmp_path / "file", "cannot write the checkpoint: Not a directory"),
        (tmp_path / "imported", "are in no shard"),
    ):
        config = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update={"run_dir": str(run_dir)})})
        with pytest.raises(CheckpointError, match=what):
            write_checkpoint(source, config, 1 << 30)
        source._places.clear()
    assert list((tmp_path / "imported" / "checkpoints").iterdir()) == []
