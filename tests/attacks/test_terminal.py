"""File names from untrusted sources are escaped before they are printed on a terminal.

The names in checkpoints and datasets are tested in test_checkpoints.py and test_data.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster.local import run_local_ranks

ATTACK = "\x1b]0;owned\x07\x9b31m\u202e"


def test_status_of_a_run_with_a_name_and_a_record_that_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / f"run{ATTACK}"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "loss": 1.0}) + "\n")
    (run / "incarnation.json").write_text(
        json.dumps({"incarnation": 1, "job_id": ATTACK, "host": ATTACK, "pid": 1, "since_unix_s": 0.0})
    )
    main(["status", str(tmp_path)])
    _harmless("".join(capsys.readouterr()))


def test_what_a_rank_failed_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        f"import os; open('/nonexistent/' + {ATTACK!r}) if os.environ['RANK'] == '1' else __import__('time').sleep(60)"
    )
    assert run_local_ranks(2, [code], dict(os.environ), tmp_path, program=(sys.executable, "-c")) == 1
    _harmless(capfd.readouterr().err)


def _harmless(output: str) -> None:
    assert "owned" in output
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(output)
