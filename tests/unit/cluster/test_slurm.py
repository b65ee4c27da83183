from __future__ import annotations

from pathlib import Path

import pytest

from frontier_llm.cluster import slurm
from frontier_llm.errors import FrontierError


@pytest.fixture
def sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a sinfo whose first two calls do not reach the controller. Return the file that counts the calls."""
    count = tmp_path / "count"
    (tmp_path / "sinfo").write_text(
        f"""#!/bin/bash
echo >> {count}
if [[ $(wc -l < {count}) -lt 3 ]]; then
    echo "slurm_load_partitions: Unable to contact slurm controller (connect failure)" >&2
    exit 1
fi
echo "n0|idle"; echo "n1|down*"
"""
    )
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "PAUSE_S", 0.01)
    return count


def test_a_supervisor_waits_for_a_controller_that_is_away(sinfo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.unhealthy(["n0", "n1"]) == ["n1"]
    assert len(sinfo.read_text()) == 3
    assert capsys.readouterr().err.count("does not respond to sinfo") == 1


def test_a_person_is_told_at_once(sinfo: Path) -> None:
    with pytest.raises(FrontierError, match="Unable to contact"):
        slurm.call(["sinfo"])
    with pytest.raises(FrontierError, match="Unable to contact"):
        slurm.ask(["sinfo"], patience_s=0)
    assert len(sinfo.read_text()) == 2
