"""A missing optional package is reported before a command does anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from frontier_llm.cli import lm_eval
from frontier_llm.cli.main import main
from frontier_llm.cli.needs import NEEDS
from frontier_llm.config.urls import PACKAGES
from tests.unit.cli.test_vocabulary import LEAVES, flags

COMMANDS = {
    "plan gpt-tiny --figures x.html": "plotly",
    "bench comm train_small --figures=x.html": "plotly",
    "evaluate runs/x --figures x.png": "matplotlib",
    "tune train_small --max-node-hours 1": "scipy",
    "tune train_small --max-node-hours 1 --exhaustive --emit-machine x.yaml": "scipy",
    "checkpoint export-hf runs/x out --push-to-hub me/mine": "huggingface_hub",
    "checkpoint push runs/x s3://bucket/x": "s3fs",
    "checkpoint pull gs://bucket/x": "gcsfs",
    "checkpoint list s3://bucket/x": "s3fs",
    "train quickstart train.remote=s3://bucket/x": "s3fs",
}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for row in NEEDS:
        if row.package != "torch":
            monkeypatch.setitem(sys.modules, row.package, None)
    for client in PACKAGES.values():
        monkeypatch.setitem(sys.modules, client, None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("typed", COMMANDS)
@pytest.mark.usefixtures("bare")
def test_a_missing_package_is_reported_first(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    package = COMMANDS[typed]
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"    fix: pip install {package}" and len(said) == 3


@pytest.mark.usefixtures("bare")
def test_other_uses_of_the_commands_need_no_package(capsys: pytest.CaptureFixture[str]) -> None:
    for typed in ("evaluate runs/x", "tune train_small --max-node-hours 1 --exhaustive --nodes 2", "tune --help"):
        main(typed.split())
        assert "pip install" not in capsys.readouterr().err


def test_lm_eval_is_checked_before_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as end:
        lm_eval.main()
    assert end.value.code == 2
    assert "lm_eval is not installed\n    fix: pip install lm_eval" in capsys.readouterr().err


def test_the_table_names_commands_and_options_of_this_program() -> None:
    rows = [row for row in NEEDS if row.command != "frontier-lm-eval"]
    for row in rows:
        named = {row.option, row.unless} - {""}
        assert named <= flags(LEAVES[row.command])
