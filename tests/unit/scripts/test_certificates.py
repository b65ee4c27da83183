"""docs/generated/certificates.md has the certificates that the shipped runs get today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.harness.marks import thorough

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("run", ["pretrain_22b", "pretrain_175b", thorough("pretrain_1t")])
def test_certificates_of_the_shipped_runs_are_current(run: str) -> None:
    spec = importlib.util.spec_from_file_location("certificates", ROOT / "scripts" / "certificates.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.PAGE.read_text(encoding="utf-8")
    assert text.startswith(module.HEAD) and module.section_of(run) in text, "run python scripts/certificates.py"
