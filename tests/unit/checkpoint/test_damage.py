"""Every bit flip, truncation, swap or deletion is detected and named, and the newest intact checkpoint is used."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import load
from frontier_llm.checkpoint.inspect import verify
from frontier_llm.checkpoint.manifest import DamagedCheckpoint
from frontier_llm.errors import CheckpointError
from tests.unit.checkpoint.serial import Run
from tests.unit.checkpoint.simulated import TINY, Layout, buckets_of, optimizer_of, write


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0] ^ (1 << bit % 8)
        file.seek(bit // 8)
        file.write(bytes([byte]))


FLIPS = 334  # random bit flips in each of the three files: a thousand in total


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.save(2, 4)
    return run


def newest(run: Run) -> Path:
    return run.checkpoints.directory / "step_00000004"


@pytest.mark.parametrize("name", ["shard_00000.safetensors", "manifest.json", "manifest.sha256"])
def test_random_bit_flips_in_every_file(name: str, run: Run) -> None:
    random.seed(1)
    path = newest(run) / name
    bits = path.stat().st_size * 8
    header_bits = range(64)  # the header's length field, which determines the reader's next offset
    for bit in [0, bits - 1, *header_bits[::7], *(random.randrange(bits) for _ in range(FLIPS))]:
        if bit < bits:
            flip(path, bit)
            assert verify(newest(run)), f"bit {bit} of {name}"
            flip(path, bit)
    assert verify(newest(run)) == []


def flip_the_middle(path: Path) -> None:
    flip(path, path.stat().st_size * 4)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    """Replace a file by a link to the same bytes outside the checkpoint."""
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def add_another_name(path: Path) -> None:
    """Add a hard link, through which the bytes could change later."""
    os.link(path, path.parents[2] / "elsewhere")


@pytest.mark.parametrize("name", ["shard_00000.safetensors", "manifest.json", "manifest.sha256"])
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (flip_the_middle, "digest|sha256 is"),
        (cut_off, "bytes, but .* in the manifest|sha256 is"),
        (empty, "has 0 bytes|sha256 is"),
        (delete, "No such file"),
        (replace_by_folder, "is not a regular file"),
        (replace_by_link, "symbolic links"),
        (add_another_name, "hard link"),
    ],
)
def test_damage_is_named_and_the_checkpoint_before_is_used(
    name: str, damage: Callable[[Path], None], text: str, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    path = newest(run) / name
    damage(path)
    problems = "\n".join(map(str, verify(newest(run))))
    assert str(newest(run)) in problems
    assert re.search(text, problems)
    with pytest.raises(DamagedCheckpoint, match=re.escape(str(newest(run)))):
        run.checkpoints.newest(strict=True)
    loaded = run.checkpoints.newest()
    assert loaded is not None and loaded.step == 2
    run.check(2)
    assert "step_00000004 is damaged; loading the checkpoint before it" in capfd.readouterr().err
    assert folder.read_latest(run.checkpoints.directory) == "step_00000002"


def test_message_names_file_tensor_expected_and_found(run: Run) -> None:
    path = newest(run) / "shard_00000.safetensors"
    flip(path, path.stat().st_size * 4)
    expected = folder.read_manifest(newest(run))[0].shards[0].sha256
    (problem,) = verify(newest(run))
    assert problem.where == str(path) and f"expected {expected}" in problem.what and "final_norm.weight" in problem.what


def test_shards_of_another_step_or_rank_are_not_taken(tmp_path: Path) -> None:
    layout = Layout(dp=2)
    for step in (7, 9):
        write(TINY, layout, tmp_path, step)
    one = tmp_path / "step_00000007"
    other = tmp_path / "step_00000009"
    first = "shard_00000.safetensors"
    second = "shard_00001.safetensors"

    def swap(a: Path, b: Path) -> None:
        a.rename(tmp_path / "aside")
        b.rename(a)
        (tmp_path / "aside").rename(b)

    for a, b in (
        (one / first, other / first),
        (one / first, one / second),
        (one / "manifest.json", other / "manifest.json"),
    ):
        swap(a, b)
        assert verify(one)
        swap(a, b)
    assert verify(one) == []
    other.rename(tmp_path / "aside")
    one.rename(other)  # a complete checkpoint under another step's name
    assert "is of step 7, but its folder is named for step 9" in str(verify(other)[0])


def test_every_rank_of_another_layout_sees_damage_in_what_it_reads(tmp_path: Path) -> None:
    manifest = write(TINY, Layout(tp=2, dp=2), tmp_path)
    path = tmp_path / "step_00000007"
    flip(path / manifest.shards[2].file, 8 * (path / manifest.shards[2].file).stat().st_size - 5)
    layout = Layout(pp=2)
    found = []
    for rank in range(2):
        optimizer = optimizer_of(buckets_of(TINY, layout, rank), filled=False)
        found += load.read_shards(path, manifest, optimizer, rank, 2)
    assert [problem.where for problem in found] == [str(path / manifest.shards[2].file)]


def test_no_intact_checkpoint_stops_instead_of_starting_anew(run: Run) -> None:
    for step in (2, 4):
        flip(run.checkpoints.directory / folder.step_name(step) / "shard_00000.safetensors", 10_000)
    with pytest.raises(CheckpointError, match="no checkpoint is intact") as caught:
        run.checkpoints.newest()
    assert "step_00000002" in str(caught.value) and "step_00000004" in str(caught.value)


@pytest.mark.parametrize("content", ["step_00000099\n", "../../etc\n", "", "step_00000004"])
def test_wrong_latest_is_mended(content: str, run: Run) -> None:
    (run.checkpoints.directory / "LATEST").write_text(content)
    assert run.checkpoints.newest().step == 4
    assert (run.checkpoints.directory / "LATEST").read_text() == "step_00000004\n"


def test_added_file_is_reported(run: Run) -> None:
    (newest(run) / "notes.txt").write_text("mine")
    assert "is not part of the checkpoint" in str(verify(newest(run))[0])


def test_planted_pickle_is_never_run(run: Run, tmp_path: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "exploded",))

    for name in ("shard_00000.safetensors", "manifest.json", "manifest.sha256", ".metadata"):
        path = newest(run) / name
        old = path.read_bytes() if path.exists() else None
        path.write_bytes(pickle.dumps(Bomb()))
        assert verify(newest(run))
        run.checkpoints.newest()
        path.unlink() if old is None else path.write_bytes(old)
    assert not (tmp_path / "exploded").exists()
