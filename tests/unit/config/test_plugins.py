"""Plugins by an installed package's entry point; files and modules are played by docs/extending.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from frontier_llm.config.plugins import import_plugins
from frontier_llm.errors import ConfigError


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_package.py").write_text("LOADED = True\n")
    record = tmp_path / "their_package-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text("[frontier_llm.plugins]\ntheirs = their_package\ngone = their_package:nothing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_package", raising=False)


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_loaded_when_it_is_named_and_not_before() -> None:
    assert "their_package" not in sys.modules
    import_plugins(["theirs"])
    assert sys.modules["their_package"].LOADED


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["their", "gone"])
def test_what_cannot_be_loaded_is_named_with_what_is_installed(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){name} cannot be imported.*gone, theirs"):
        import_plugins([name])
