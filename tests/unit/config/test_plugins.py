"""Plugins by an installed package's entry point, and the resolution of plugin paths. test_extending.py tests plugin
files and modules.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from frontier_llm.config import load_run
from frontier_llm.config.plugins import below, import_plugins, record_of
from frontier_llm.errors import ConfigError


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_package.py").write_text("LOADED = True\n")
    record = tmp_path / "their_package-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(
        "[frontier_llm.plugins]\ntheirs = their_package\ngone = their_package:nothing\n"
    )
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


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/run.yaml is based on base/base.yaml, which names a plugin. The working directory is elsewhere/."""
    for name in ("runs", "base", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "base.yaml").write_text("model: llama-tiny\nbatch: {global_batch: 2}\nplugins: [one.py]\n")
    (tmp_path / "runs" / "run.yaml").write_text("base: ../base/base.yaml\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


@pytest.mark.parametrize("also_elsewhere", [False, True])
def test_a_path_is_relative_to_the_run_file_that_names_it(
    places: Path,
    capsys: pytest.CaptureFixture[str],
    also_elsewhere: bool,
) -> None:
    (places / "base" / "one.py").write_text("")
    if also_elsewhere:
        (places / "elsewhere" / "one.py").write_text("raise RuntimeError('the wrong one')")
    assert load_run("../runs/run.yaml").plugins == (str(places / "base" / "one.py"),)
    assert "working directory" not in capsys.readouterr().err


def test_an_older_run_falls_back_to_the_working_directory_with_a_notice(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (places / "elsewhere" / "one.py").write_text("")
    assert load_run("../runs/run.yaml").plugins == (str(places / "elsewhere" / "one.py"),)
    assert (
        "one.py is not in the folder of that file; the copy in the working directory is used. To keep it, write "
        "../elsewhere/one.py" in capsys.readouterr().err
    )


def test_the_command_lines_paths_are_relative_to_the_working_directory(places: Path) -> None:
    (places / "elsewhere" / "two.py").write_text("")
    assert load_run("../runs/run.yaml", ["plugins=[two.py]"]).plugins == (str(places / "elsewhere" / "two.py"),)


def test_the_digest_is_of_the_bytes_that_were_executed(tmp_path: Path) -> None:
    path = tmp_path / "changes.py"
    path.write_text("")
    import_plugins([str(path)])
    before = record_of(str(path))
    path.write_text("# edited while the run goes on\n")
    assert record_of(str(path)) == before


@pytest.mark.usefixtures("installed")
def test_a_package_is_identified_by_all_its_files(tmp_path: Path) -> None:
    package = tmp_path / "whole_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("")
    before = record_of("whole_package")
    (package / "inner.py").write_text("x = 1\n")
    assert record_of("whole_package").sha256 != before.sha256 and before.path == str(package / "__init__.py")


def test_a_run_directory_names_its_own_files_by_relative_paths(tmp_path: Path) -> None:
    names = (str(tmp_path / "code-1" / "plugins" / "0" / "a.py"), "/elsewhere/b.py", "module")
    assert below(names, tmp_path) == ("code-1/plugins/0/a.py", "/elsewhere/b.py", "module")
