"""Checkpoints in an S3 store (a local server): there and back, over a connection that is cut, and without secrets on
disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from frontier_llm.checkpoint import remote
from frontier_llm.checkpoint.remote import RateLimit, RemoteCheckpoint, uploaded_checkpoints
from frontier_llm.checkpoint.remote_writer import claim, this_writer
from frontier_llm.cli.main import main
from frontier_llm.data.remote import UnreachableError
from frontier_llm.data.remote_folder import RemoteFolder
from tests.harness.object_store import VARIABLES, Wire, s3_server
from tests.unit.checkpoint.serial import Run

pytest.importorskip("moto", reason="needs moto[server]")
pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with s3_server("bucket") as wire:
        yield wire


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = Run(tmp_path / "run")
    run.save(2, 4)
    run.checkpoints.close()
    return tmp_path / "run"


@pytest.mark.usefixtures("wire")
def test_there_and_back(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "s3://bucket/there"
    RemoteFolder(url).check_writable()
    assert RemoteFolder(url).entries() == {}
    assert main(["checkpoint", "push", str(run_dir), url]) == 0
    assert main(["checkpoint", "list", url]) == 0
    assert "step_00000004" in capsys.readouterr().out
    assert main(["checkpoint", "pull", url, str(tmp_path / "pulled")]) == 0
    again = Run(tmp_path / "pulled")
    assert again.checkpoints.newest(strict=True).step == 4
    again.check(4)
    again.checkpoints.close()
    secret = VARIABLES["AWS_SECRET_ACCESS_KEY"].encode()
    assert not any(secret in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_cut_connection(wire: Wire, run_dir: Path, tmp_path: Path) -> None:
    """A push that is cut inside a shard leaves no complete checkpoint, and a second push completes it. A pull that is
    cut leaves no local file.
    """
    place = RemoteFolder("s3://bucket/cut")
    writer = this_writer("me", run_dir)
    claim(place, writer)
    path = run_dir / "checkpoints" / "step_00000004"
    wire.cut(after=1 << 20)  # the shard has 2 MiB
    with pytest.raises(UnreachableError, match="files that have arrived are kept"):
        remote.push(path, place, writer, RateLimit())
    wire.mend()
    assert list(uploaded_checkpoints(place)) == []
    assert remote.push(path, place, writer, RateLimit()).sent_files == 1
    found = RemoteCheckpoint(place, 4)
    assert remote.verify(found) == []
    target = tmp_path / "pulled" / "checkpoints"
    wire.cut(after=3000)
    with pytest.raises(UnreachableError):
        remote.pull(found, target)
    wire.mend()
    assert not target.exists() or list(target.iterdir()) == []
    assert remote.pull(found, target).name == "step_00000004"
