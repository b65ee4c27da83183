"""Commands and fixtures of tests that submit to a Slurm whose commands only record their arguments."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path

import pytest
import yaml

from frontier_llm.cluster.sites import root_dir


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
