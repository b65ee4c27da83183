"""A run writes no secret of its environment to any file, and opens no port except the transport's own."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from frontier_llm.run.job_secret import VARIABLE, folder_of
from tests.faults.test_runs import children, wait_for_ranks
from tests.harness.runs import Run

SECRETS = {
    "HF_TOKEN": "hf_never-to-be-written",
    "WANDB_API_KEY": "wandb-never-to-be-written",
    "AWS_SECRET_ACCESS_KEY": "aws-never-to-be-written",
}


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """Return (address, port) of every TCP socket on which one of the processes listens."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
            except OSError:
                continue  # the file has been closed since the listing
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


@pytest.mark.thorough
def test_ports_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    run = Run(tmp_path, steps=10_000, save_interval=3, overrides=("parallel.data=2", "train.tensorboard=true"))
    process = run.start()
    pids = wait_for_ranks(process, run)
    environment = Path(f"/proc/{pids[0]}/environ").read_bytes()
    assert all(value.encode() in environment for value in SECRETS.values())
    variables = dict(entry.partition("=")[::2] for entry in environment.decode().split("\0"))
    port = int(variables["MASTER_PORT"])
    secret = variables[VARIABLE]
    assert len(secret) == 64
    ports = listening(pids)
    store_port = int((folder_of(secret.encode()) / "store-port").read_text())
    (server,) = [pid for pid in children(pids[0]) if b"store_process.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert not any(secret.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in [process.pid, server, *pids])
    assert listening([server]) == [("0100007F", store_port)], "TCPStore: on one node a random port, on loopback only"
    assert {address for address, _ in ports} == {"0100007F"}, "only the job's interface, here 127.0.0.1"
    assert port not in [store_port, *(number for _, number in ports)], "on one node nothing listens on MASTER_PORT"
    assert len(ports) <= 3 * len(pids), "gloo's own: one per group and rank"
    os.kill(pids[1], signal.SIGSEGV)  # checks the files of a crash too: traceback, stacks, flight records, failure.json
    output, _ = process.communicate(timeout=60)
    files = [path for path in run.run_dir.rglob("*") if path.is_file()]
    assert any(path.name == "failure.json" for path in files) and len(files) > 10
    assert not folder_of(secret.encode()).exists(), "what killed ranks have left on the node"
    for value in [*SECRETS.values(), secret]:
        assert value not in output
        assert [path for path in files if value.encode() in path.read_bytes()] == []
