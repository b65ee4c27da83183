"""scripts/prose.py finds each pattern in each kind of text, and reports none in plain text."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LONG_SENTENCE = "This sentence has many words " + "and more words " * 8 + "before it ends."
ROWS = [
    ("where-for-if", "The loss is skipped where it is not finite."),
    ("what-as-noun", "The buffer holds what is left of the batch."),
    ("starts-with-of", "Of the ranks the first writes the file."),
    ("starts-with-where", "Where torch is loaded, this takes longer."),
    ("persons", "The process is the one who writes the file."),
    ("long", LONG_SENTENCE),
]
PLAIN = '''"""Reads a file of tokens."""


def read(path: str) -> bytes:
    """Return the bytes of the file. Raises OSError if the file is missing."""
    # The file is read twice because the first read fills the cache.
    raise ValueError("the file has no tokens")
'''


def prose(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/prose.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(("pattern", "sentence"), ROWS, ids=[pattern for pattern, _ in ROWS])
def test_each_pattern_is_found_in_each_kind_of_text(pattern: str, sentence: str, tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(f'"""{sentence}"""\n# {sentence}\nraise ValueError("{sentence}")\n')
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{sentence}\n\n```\n{sentence}\n```\n")
    done = prose("--check", str(code), str(page))
    assert done.returncode == 1
    for kind in ("docstring", "comment", "message", "page"):
        assert f"{kind}: {pattern} in 100.00 % of the sentences" in done.stderr
    listed = prose("--list", f"{pattern}:page", str(code), str(page)).stdout
    assert listed.count(sentence) == 1, "a sentence in a code block is no text of the page"


def test_plain_text_passes(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(PLAIN)
    assert prose("--check", str(code)).returncode == 0


@pytest.mark.parametrize(
    ("docstring", "found"),
    [("Read the tokens of a file.", True), ("Read the tokens that fit into memory.", False), ("tokens @ file", False)],
)
def test_a_docstring_that_repeats_its_signature_is_an_error(docstring: str, found: bool, tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(f'def read_tokens(file: str) -> None:\n    """{docstring}"""\n')
    done = prose("--check", str(code))
    assert ("repeats-name" in done.stderr) == found


def test_an_exception_needs_a_reason_and_is_counted(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    sentence = "The loss is skipped where it is not finite."
    code.write_text(f"# prose: ok: quotes a message of torch\n# {sentence}\n")
    done = prose("--check", str(code))
    assert done.returncode == 0 and "1 sentences are excepted" in done.stdout
    code.write_text(f"# prose: ok:\n# {sentence}\n")
    assert prose("--check", str(code)).returncode == 1


def test_house_words_are_refused_in_text_and_in_identifiers(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text('"""Each rank posts its wish to all ranks."""\n\nrank_board = 1\nkeyboard = 2\n', encoding="utf-8")
    done = prose("--check", str(code))
    assert done.returncode == 1
    assert "house-word in 100.00 %" in done.stderr
    assert "code.py:3: rank_board: instead of 'board' use: heartbeats" in done.stderr
    assert "keyboard" not in done.stderr


def test_the_words_of_pages_are_counted_without_code_and_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmarks = tmp_path / "docs/benchmarks"
    benchmarks.mkdir(parents=True)
    (benchmarks / "speed.md").write_text("Measurements are not counted.\n")
    (tmp_path / "docs/page.md").write_text("Four words, [one link](a/b.md)\n\n```\nno code\n```\n| - |\n")
    loaded = runpy.run_path(str(ROOT / "scripts/prose.py"))
    count = loaded["count_words_of_pages"]
    monkeypatch.setitem(count.__globals__, "ROOT", tmp_path)
    assert count() == 4
    monkeypatch.setitem(count.__globals__, "MOST_WORDS_OF_PAGES", 3)
    monkeypatch.setattr(sys, "argv", ["prose.py", "--check", str(tmp_path / "docs/page.md")])
    assert loaded["main"]() == 1
