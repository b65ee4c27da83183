"""The last line of a JSON-lines file, cut off by a crash or a full disk."""

from __future__ import annotations

from pathlib import Path

from frontier_llm.run.run_dir import append_line, read_jsonl


def test_a_long_torn_line_is_removed_before_the_next_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, {"step": 1})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"text": "' + 200_000 * "x")
    append_line(path, {"step": 2})
    assert list(read_jsonl(path)) == [{"step": 1}, {"step": 2}]
    assert path.stat().st_size < 100
