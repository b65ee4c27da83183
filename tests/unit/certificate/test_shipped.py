"""docs/generated/certificates.md has the certificates that the shipped runs get today."""

from __future__ import annotations

import pytest

from frontier_llm.certificate.shipped import HEAD, PAGE, section_of
from tests.harness.marks import thorough


@pytest.mark.parametrize("run", ["pretrain_22b", thorough("pretrain_175b"), thorough("pretrain_1t")])
def test_certificates_of_the_shipped_runs_are_current(run: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(HEAD) and section_of(run) in text, "run python -m frontier_llm.certificate.shipped"
