"""Commands and fixtures of tests that submit to a Slurm whose commands only record their arguments."""

from __future__ import annotations

import shlex
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from frontier_llm.certificate import certificate, communication
from frontier_llm.certificate.section import CertificateSection
from frontier_llm.certificate.subject import Subject
from frontier_llm.cluster import code
from frontier_llm.cluster.sites import root_dir
from frontier_llm.config import dump

CHECKED: dict[tuple[str, str, int], CertificateSection] = {}


def checked_once(entry: certificate.Entry) -> certificate.Entry:
    """Return an entry that checks each configuration once in this process.

    It is for sections that do not depend on the job, the run directory and the number of steps.
    """

    def check(subject: Subject) -> CertificateSection:
        train = subject.config.train.model_copy(update={"run_dir": "run", "steps": 1})
        key = (entry.name, dump(subject.config.model_copy(update={"train": train})), subject.world_size)
        if key not in CHECKED:
            CHECKED[key] = entry.check(subject)
        return CHECKED[key]

    return replace(entry, check=check)


@pytest.fixture
def quick_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the sections communication and types once for each configuration, and do not compile the job's code.

    These parts of `submit` take seconds. Other tests call them: those of the certificate, and
    `test_a_snapshot_holds_the_bytecode_that_ranks_would_each_write`.
    """
    slow = (communication.NAME, certificate.TYPES)
    entries = tuple(checked_once(entry) if entry.name in slow else entry for entry in certificate.ENTRIES)
    monkeypatch.setattr(certificate, "ENTRIES", entries)
    monkeypatch.setattr(code.compileall, "compile_dir", lambda *args, **options: True)


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_submit: None) -> Path:
    """Commands that record their arguments. tests/slurm uses the real commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    log = tmp_path / "calls"
    answers = {"sbatch": "4711", "squeue": "", "scontrol": "JobId=1 JobState=COMPLETED\nClusterName = here"}
    for name, answer in answers.items():
        script = commands / name
        script.write_text(
            f'#!/bin/bash\nprintf "%s " {name} "$@" >> {shlex.quote(str(log))}\necho >> '
            f"{shlex.quote(str(log))}\necho {shlex.quote(answer)}\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    log.touch()
    return log


SMALL = ["submit", "train_small", "--site", "frontier", "-A", "ABC123"]


PRETRAIN_1T = [
    "submit",
    "pretrain_1t",
    "--site",
    "frontier",
    "-A",
    "A",
    "data.train=synthetic",
    "data.allow_synthetic=true",
]


@pytest.fixture
def here(tmp_path: Path) -> list[str]:
    """`SMALL` on the cluster of `fake_slurm`. Its ranks compute on CPUs, so everything that they need is installed."""
    content = yaml.safe_load((root_dir() / "slurm" / "sites" / "frontier.yaml").read_text())
    content |= {"name": "here", "cluster": "here", "machine": "local", "bind": "none", "node_local": str(tmp_path)}
    content |= {"modules": [], "unset": [], "environment": {}, "run_roots": []}
    (tmp_path / "here.yaml").write_text(yaml.safe_dump(content))
    return ["submit", "train_small", "--site", str(tmp_path / "here.yaml"), "-A", "ABC123"]
