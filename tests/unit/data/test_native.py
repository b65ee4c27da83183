"""A missing, foreign or outdated library is an error with the build command. The data package never imports torch."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from frontier_llm import libraries
from frontier_llm.data import native
from frontier_llm.errors import BackendError


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(libraries, "DIRECTORY", tmp_path)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    return tmp_path


def test_missing(directory: Path) -> None:
    with pytest.raises(BackendError, match=r"has not been built(?s:.*)build_native.sh"):
        native.library()


def test_foreign(directory: Path) -> None:
    (directory / "libsample_index.so").write_bytes(b"no library")
    with pytest.raises(BackendError, match=r"does not load(?s:.*)build_native.sh"):
        native.library()


def test_another_version(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "libsample_index.so").write_bytes(b"")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(fl_abi=lambda: native.ABI + 1))
    with pytest.raises(BackendError, match="build it again"):
        native.library()


def test_no_torch_is_imported() -> None:
    code = """
import sys
sys.modules["torch"] = None
import pkgutil, importlib, frontier_llm.data as room
names = [module.name for module in pkgutil.iter_modules(room.__path__)]
for name in names:
    importlib.import_module(f"frontier_llm.data.{name}")
print(len(names))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 10
