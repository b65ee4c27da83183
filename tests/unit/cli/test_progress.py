from __future__ import annotations

import pytest

from frontier_llm.cli.arguments import ProgressBar


def test_only_a_terminal_sees_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ProgressBar()
    line.on("step_00000100", "shards")(3, 3072)
    line.close()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    line = ProgressBar()
    line.on("step_00000100", "shards")(3, 3072)
    line.on("piqa", "batches")(7)
    line.close()
    said = capsys.readouterr()
    assert "step_00000100: 3 of 3,072 shards" in said.err and said.err.endswith("piqa: 7 batches\n") and said.out == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    ProgressBar(shown=False).on("x", "batches")(1)
    assert capsys.readouterr().err == ""
