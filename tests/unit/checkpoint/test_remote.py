"""Checkpoints at a URL: copied there and back without loss, whatever interrupts the copy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from frontier_llm.checkpoint import remote
from frontier_llm.checkpoint.manifest import DamagedCheckpoint
from frontier_llm.checkpoint.remote import RateLimit, RemoteCheckpoint, at_url, uploaded_checkpoints
from frontier_llm.checkpoint.remote_writer import Writer, claim, read_writer, this_writer
from frontier_llm.cli.main import main
from frontier_llm.data.remote import UnreachableError
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.serial import Run, progress

pytest.importorskip("fsspec")
NO_LIMIT = RateLimit()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.save(2, 4)
    run.checkpoints.close()
    return run


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "store" / "run").as_uri()


def newest(run: Run) -> Path:
    return run.checkpoints.directory / "step_00000004"


def claimed(run: Run, url: str) -> tuple[RemoteFolder, Writer]:
    place = RemoteFolder(url)
    writer = this_writer("me", run.checkpoints.directory.parent)
    claim(place, writer)
    return place, writer


def in_store(url: str, name: str = "step_00000004") -> Path:
    return Path(url.removeprefix("file://")) / name


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_there_and_back(run: Run, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands copy every byte, and a run continues from the copy."""
    run_dir = run.checkpoints.directory.parent
    assert main(["checkpoint", "push", str(run_dir), url]) == 0
    assert "step_00000004  1 files sent" in capsys.readouterr().out
    assert content(in_store(url)) == content(newest(run))
    assert main(["checkpoint", "push", str(run_dir), url, "--json"]) == 0
    assert [row["sent_files"] for row in json.loads(capsys.readouterr().out)] == [0, 0]
    assert main(["checkpoint", "list", url]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "step_00000002",
        "step_00000004",
    ]
    assert main(["checkpoint", "verify", url]) == 0
    assert main(["checkpoint", "verify", f"{url}/step_00000002"]) == 0
    pulled = tmp_path / "pulled"
    assert main(["checkpoint", "pull", url, str(pulled)]) == 0
    assert main(["checkpoint", "pull", url, str(pulled), "--step", "2"]) == 0
    assert main(["checkpoint", "pull", url, str(pulled), "--step", "3"]) == 2
    assert "complete there: step_00000004, step_00000002" in capsys.readouterr().err
    assert content(pulled / "checkpoints" / "step_00000004") == content(newest(run))
    again = Run(pulled)
    assert again.checkpoints.newest(strict=True).step == 4
    again.check(4)
    again.checkpoints.close()


def test_the_manifest_is_sent_last_and_only_missing_files_are_sent(
    run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, writer = claimed(run, url)
    order: list[str] = []
    created = RemoteFolder.created

    def recorded(self: RemoteFolder, name: str):
        order.append(name)
        return created(self, name)

    monkeypatch.setattr(RemoteFolder, "created", recorded)
    remote.push(newest(run), place, writer, NO_LIMIT)
    assert order == ["manifest.sha256", "shard_00000.safetensors", "manifest.json"]
    there = in_store(url)
    (there / "manifest.json").unlink()
    order.clear()
    assert remote.push(newest(run), place, writer, NO_LIMIT).kept_files == 1
    assert order == ["manifest.json"]
    with (there / "shard_00000.safetensors").open("r+b") as file:
        file.truncate(100)
    assert [one.step for one in uploaded_checkpoints(place)] == [4]
    with pytest.raises(DamagedCheckpoint, match="another size"):
        RemoteCheckpoint(place, 4).read_manifest()
    order.clear()
    assert remote.push(newest(run), place, writer, NO_LIMIT).sent_files == 1
    assert order == ["shard_00000.safetensors", "manifest.json"]
    assert content(there) == content(newest(run))


def test_the_rest_of_another_checkpoint_of_the_same_step_is_not_mixed_in(run: Run, url: str, tmp_path: Path) -> None:
    """After a rewind, step 4 has other values in files of the same size."""
    place, writer = claimed(run, url)
    remote.push(newest(run), place, writer, NO_LIMIT)
    (in_store(url) / "manifest.json").unlink()
    other = Run(tmp_path / "other")
    other.fill(9)
    other.checkpoints.begin(progress(4))
    other.checkpoints.finish()
    other.checkpoints.close()
    assert remote.push(newest(other), place, writer, NO_LIMIT).sent_files == 1
    assert content(in_store(url)) == content(newest(other))


def test_a_damaged_shard_is_never_sent(run: Run, url: str) -> None:
    place, writer = claimed(run, url)
    shard = newest(run) / "shard_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="is damaged"):
        remote.push(newest(run), place, writer, NO_LIMIT)
    assert sorted(content(in_store(url))) == ["manifest.sha256"]
    assert list(uploaded_checkpoints(place)) == []


def test_a_damaged_copy_is_found_and_leaves_nothing_here(run: Run, url: str, tmp_path: Path) -> None:
    place, writer = claimed(run, url)
    remote.push(newest(run), place, writer, NO_LIMIT)
    shard = in_store(url) / "shard_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["checkpoint", "verify", url]) == 1
    target = tmp_path / "pulled" / "checkpoints"
    with pytest.raises(DamagedCheckpoint, match="is damaged"):
        remote.pull(RemoteCheckpoint(place, 4), target, 0)
    assert list(target.iterdir()) == []


def test_a_full_disk(run: Run, url: str, tmp_path: Path) -> None:
    place, writer = claimed(run, url)
    remote.push(newest(run), place, writer, NO_LIMIT)
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(mounted)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with pytest.raises(CheckpointError, match=r"No space left on device; it needs 2\.\d MiB"):
            remote.pull(RemoteCheckpoint(place, 4), mounted / "checkpoints", 0)
        assert list((mounted / "checkpoints").iterdir()) == []
        with pytest.raises(UnreachableError, match="No space left on device"):
            store = RemoteFolder((mounted / "store").as_uri())
            claim(store, writer)
            remote.push(newest(run), store, writer, NO_LIMIT)
        assert list(uploaded_checkpoints(store)) == []
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_one_run_writes_to_a_url(run: Run, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, writer = claimed(run, url)
    run_dir = run.checkpoints.directory.parent
    other = Run(tmp_path / "other")
    other.save(2)
    other.checkpoints.close()
    assert main(["checkpoint", "push", str(tmp_path / "other"), url]) == 2
    assert f"is written by {run_dir} on" in capsys.readouterr().err
    assert read_writer(place) == writer
    assert main(["checkpoint", "push", str(tmp_path / "other"), url, "--take-over"]) == 0
    with pytest.raises(CheckpointError, match=f"is written by {tmp_path / 'other'}"):
        remote.push(newest(run), place, writer, NO_LIMIT)
    assert main(["checkpoint", "push", str(run_dir), url]) == 0  # the other push has ended


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://me:HUSH@bucket/run", "contains credentials"),
        ("s3://bucket/run?sig=HUSH", "contains credentials or a query"),
        ("https://server/run", "cannot be written"),
        ("simplecache::s3://bucket/run", "is a chain of URLs"),
        ("s3://", "names no folder"),
    ],
)
def test_urls_that_are_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        RemoteFolder(url)
    assert "HUSH" not in str(caught.value)


def test_an_empty_url_has_no_checkpoint(url: str) -> None:
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        at_url(url)
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        at_url(f"{url}/step_00000004")


def test_the_rate_limit_delays_by_bytes() -> None:
    now_s = 0.0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now_s
        slept.append(seconds)
        now_s += seconds

    limit = RateLimit(100.0, clock=lambda: now_s, sleep=sleep)
    for count in (50, 100, 25):
        limit.spend(count)
    assert slept == [0.0, 0.5, 1.0]
    now_s += 60  # unused time is not saved up
    limit.spend(100)
    limit.spend(100)
    assert slept[3:] == [0.0, 1.0]
