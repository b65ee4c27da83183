"""A run with two checkpoints, and a URL for their copies. Some files define a run of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.checkpoint.serial import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.save(2, 4)
    run.checkpoints.close()
    return run


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "store" / "run").as_uri()
