"""Checkpoints at a URL: copied there and back without loss, whatever interrupts the copy."""

from __future__ import annotations

import json
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import remote, upload_process
from frontier_llm.checkpoint.lock import Superseded
from frontier_llm.checkpoint.manifest import DamagedCheckpoint
from frontier_llm.checkpoint.remote import RateLimit, RemoteCheckpoint, at_url, uploaded_checkpoints
from frontier_llm.checkpoint.remote_writer import (
    TakenUrl,
    Writer,
    check,
    claim,
    read_writer,
    release,
    renew,
    this_writer,
)
from frontier_llm.cli.main import main
from frontier_llm.config import load_run
from frontier_llm.data.remote import UnreachableError
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.errors import CheckpointError, ConfigError
from frontier_llm.run.uploads import read_uploads
from tests.unit.checkpoint.serial import Run, progress

pytest.importorskip("fsspec")
NO_LIMIT = RateLimit()


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

    def record(method: str) -> None:
        original = getattr(RemoteFolder, method)

        def recorded(self: RemoteFolder, name: str, *content: bytes) -> object:
            order.append(name)
            return original(self, name, *content)

        monkeypatch.setattr(RemoteFolder, method, recorded)

    record("created")  # shards
    record("write")  # small files
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
    """After a rewind, the second checkpoint of step 4 has other values in files of the same size."""
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
        remote.pull(RemoteCheckpoint(place, 4), target)
    assert list(target.iterdir()) == []


def test_a_copy_that_was_given_up_is_not_committed(run: Run, url: str, tmp_path: Path) -> None:
    """Regression: a store that answered after the time limit gave a running job a newer checkpoint than its own."""
    place, writer = claimed(run, url)
    remote.push(newest(run), place, writer, NO_LIMIT)
    has_received = threading.Event()
    answers = threading.Event()
    has_ended = threading.Event()

    def wait() -> None:
        has_received.set()
        answers.wait()

    def work(on_bytes: remote.OnBytes) -> None:
        try:
            remote.pull(RemoteCheckpoint(place, 4), tmp_path / "here", on_bytes, before_commit=wait)
        finally:
            has_ended.set()

    transfer = remote.RemoteTransfer(work, url)
    has_received.wait()
    with pytest.raises(UnreachableError, match="sent nothing"):
        transfer.result()
    answers.set()
    has_ended.wait()
    assert list((tmp_path / "here").iterdir()) == []


def test_a_copy_is_not_committed_by_a_job_that_has_lost_the_lock(
    run: Run, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["checkpoint", "push", str(run.checkpoints.directory), url]) == 0
    checkpoints = Run(tmp_path / "other", remote=url).checkpoints
    answers = iter([None, Superseded("another start has taken the lock")])

    def check_lock() -> None:
        if (error := next(answers)) is not None:
            raise error

    monkeypatch.setattr(checkpoints, "check_lock", check_lock)
    with pytest.raises(Superseded):
        checkpoints.newest()
    assert folder.named_steps(checkpoints.directory) == []


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
            remote.pull(RemoteCheckpoint(place, 4), mounted / "checkpoints")
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


def test_a_reader_never_sees_half_of_a_small_file(run: Run, url: str) -> None:
    """Regression: on file:// the claim, the file that names the writer of the URL, was truncated before it was written
    again.
    """
    place, writer = claimed(run, url)
    with (in_store(url, "writer.json")).open("rb") as open_before:
        claim(place, replace(writer, host="another"))
        before = open_before.read()
    assert json.loads(before)["host"] == writer.host
    assert sorted(path.name for path in in_store(url, "").iterdir()) == ["writer.json"]


def test_a_push_reports_progress_while_it_reads_a_local_file(run: Run, url: str) -> None:
    """Regression: while large shards were compared with their digests, the upload was ended because it seemed to have
    stalled.
    """
    place, writer = claimed(run, url)
    counts: list[int] = []
    remote.push(newest(run), place, writer, NO_LIMIT, counts.append)
    assert counts[0] == 0 and sum(counts) == (newest(run) / "shard_00000.safetensors").stat().st_size


ME = Writer("me", "/runs/a", "n0", 0.0)


@pytest.mark.parametrize(
    ("there", "may_claim", "may_write"),
    [
        (None, True, True),
        (ME, True, True),
        (replace(ME, host="n1", renewed_unix_s=9.0), True, True),
        (replace(ME, run_dir="/runs/copy"), False, False),
        (replace(ME, name="made again"), False, False),
        (Writer("other", "/runs/b", "n0", 0.0), False, False),
        # another run directory has written in the meantime
        (Writer("other", "/runs/b", "n0", 0.0, is_released=True), True, False),
    ],
)
def test_the_rule_of_one_writer(url: str, there: Writer | None, may_claim: bool, may_write: bool) -> None:
    place = RemoteFolder(url)
    if there is not None:
        claim(place, there, take_over=True)
    for act, may_act in ((check, may_write), (renew, may_write), (claim, may_claim)):
        if may_act:
            act(place, ME)
        else:
            with pytest.raises(TakenUrl, match="is written by"):
                act(place, ME)
    release(place, ME)
    expected = replace(ME, is_released=True) if may_claim else there
    assert read_writer(place) == expected


def test_a_push_whose_url_is_taken_changes_nothing_more(run: Run, url: str) -> None:
    place, writer = claimed(run, url)
    other = Writer("other", "/runs/other", "n0", 0.0)
    with pytest.raises(TakenUrl):
        remote.push(newest(run), place, writer, NO_LIMIT, lambda _: claim(place, other, take_over=True))
    assert list(uploaded_checkpoints(place)) == []
    (in_store(url) / "manifest.sha256").write_text("of another checkpoint of this step")
    before = content(in_store(url))
    with pytest.raises(TakenUrl):
        remote.push(newest(run), place, writer, NO_LIMIT)
    assert content(in_store(url)) == before


def test_a_url_without_a_checkpoint_is_taken_over(
    run: Run, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: if a writer had died before its first upload, no command could take over its URL."""
    place, _ = claimed(run, url)
    moved = tmp_path / "moved"
    assert main(["checkpoint", "pull", url, str(moved)]) == 2
    assert "contains no complete checkpoint" in capsys.readouterr().err
    assert main(["checkpoint", "pull", url, str(moved), "--take-over"]) == 0
    assert "no checkpoint is complete there" in capsys.readouterr().out
    again = Run(moved, remote=url)
    assert again.checkpoints.newest() is None
    again.checkpoints.close()
    writer = read_writer(place)
    assert writer is not None and writer.run_dir == str(moved) and writer.is_released


def test_a_push_goes_on_after_a_damaged_checkpoint(run: Run, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: if the newest checkpoint was damaged, no older checkpoint was sent."""
    run_dir = run.checkpoints.directory.parent
    (newest(run) / "shard_00000.safetensors").write_bytes(b"short")
    assert main(["checkpoint", "push", str(run_dir), url]) == 1
    shown = capsys.readouterr()
    assert "step_00000004  DAMAGED, not sent" in shown.out and "step_00000002  1 files sent" in shown.out
    assert "step_00000004/shard_00000.safetensors" in shown.err
    assert [one.step for one in uploaded_checkpoints(RemoteFolder(url))] == [2]
    record = read_uploads(run_dir)
    assert record is not None and record.uploaded_step == 2
    assert "step_00000004/shard_00000.safetensors" in record.problem, "`status` must show it"
    assert main(["checkpoint", "push", str(run_dir), url, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert "damaged" in rows[0] and rows[1]["step"] == 2


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


def test_a_push_obeys_the_rate(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, writer = claimed(run, url)
    monkeypatch.setattr(remote, "SENT_BYTES", 2**20)
    slept: list[float] = []
    remote.push(newest(run), place, writer, RateLimit(2.0**20, clock=lambda: 0.0, sleep=slept.append))
    assert slept == [0.0, 1.0, 2.0]  # the shard has 2.4 MiB


def test_rates_are_given_in_mib_per_second(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []

    def recorded(bytes_per_s: float) -> RateLimit:
        rates.append(bytes_per_s)
        return NO_LIMIT

    monkeypatch.setattr(remote, "RateLimit", recorded)
    monkeypatch.setattr(upload_process, "RateLimit", recorded)
    run_dir = str(run.checkpoints.directory.parent)
    assert main(["checkpoint", "push", run_dir, url, "--mib-per-s", "3"]) == 0
    request = {"task": "push", "checkpoint": str(newest(run)), "url": url, "writer": "me", "run_dir": run_dir}
    upload_process._serve({**request, "task": "claim", "known_step": None, "branched_at": None})
    upload_process._serve({**request, "mib_per_s": 2.0})
    assert rates == [3 * 2**20, 2 * 2**20]


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
    now_s += 60  # unused time does not allow a higher rate later
    limit.spend(100)
    limit.spend(100)
    assert slept[3:] == [0.0, 1.0]


def test_a_run_with_credentials_in_its_url_is_refused_without_showing_them() -> None:
    with pytest.raises(ConfigError, match=r"train\.remote: contains credentials") as caught:
        load_run("quickstart", ["train.remote=s3://me:HUSH@bucket/run"])
    assert "HUSH" not in str(caught.value)
