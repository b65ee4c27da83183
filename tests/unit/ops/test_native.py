"""A library of C++ ops that was built from other sources, or for another torch, is refused, because it could compute
wrong numbers without an error.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from frontier_llm import libraries
from frontier_llm.libraries import torch_ops_sources
from frontier_llm.ops import native


def test_the_library_records_the_sources_that_it_was_built_from() -> None:
    assert native.load_cpu_library() == ""
    assert torch.ops.frontier_llm.built_from() == torch_ops_sources()


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "torch_ops_sources", lambda: "0" * 64)
    reason = native.load_cpu_library.__wrapped__()
    assert reason == "libfrontier_ops.so was built from other sources than the present csrc/cpu"


def test_a_library_for_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built_for = torch.__version__
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    reason = native.load_cpu_library.__wrapped__()
    assert reason == f"libfrontier_ops.so was built for torch {built_for}, but torch 2.99.0+cpu is loaded"


def test_the_digest_follows_every_source_and_an_installed_wheel_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "__file__", str(tmp_path / "frontier_llm" / "libraries.py"))
    assert torch_ops_sources() is None
    folder = tmp_path / "csrc" / "cpu"
    folder.mkdir(parents=True)
    (folder / "ops.cpp").write_text("int one;\n")
    before = torch_ops_sources()
    (folder / "ops.cpp").write_text("int two;\n")
    assert torch_ops_sources() not in (None, before)
