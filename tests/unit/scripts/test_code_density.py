"""The density measure counts constructs that make lines hard to read, and fails above a bound."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PLAIN = '''"""Documentation is no code."""

import os


def area(width: int, height: int) -> int:
    """Neither is this."""
    # nor this
    return width * height
'''
GOLF = """
a, b, c = 1, 2, 3
d, e = 4, 5
f = [*(a, b), *((1,) if c else (2,))]
"""
PROGRAM = """
import sys
sys.path.insert(0, "scripts")
from code_density import BOUNDS, Bound, excesses, measure
found = measure(sys.stdin.read())
bound = Bound(tokens_per_line=20, tuples=0, pairs=1, starred=1, wide=0)
print(found.tokens, found.code_lines, found.tuples, found.pairs, found.starred, found.wide, excesses(found, bound))
"""


def measured(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=source, capture_output=True, text=True, cwd=ROOT, check=True
    )
    return done.stdout.strip()


def test_documentation_and_imports_are_no_code() -> None:
    # two docstrings, 2 tokens of the import, 14 of the signature, 4 of the statement
    assert measured(PLAIN) == "22 2 0 0 0 0 []"


def test_tuples_and_wide_lines_are_counted_and_refused_above_a_bound() -> None:
    answer = measured(GOLF + "g = " + "1 + " * 40 + "1\n")
    assert answer.startswith("126 4 1 1 2 1 ")
    for excess in ("tokens_per_line is 31.5, at most 20", "tuples is 1", "starred is 2", "wide is 1"):
        assert excess in answer
    assert "pairs" not in answer


def test_wide_lines_of_shell_are_named_unless_a_url_or_one_word_needs_the_width(tmp_path: Path) -> None:
    script = tmp_path / "launch" / "job.sh"
    script.parent.mkdir()
    words = "word " * 25
    script.write_text(f"{words}\n# https://example.org {words}\nimage={'x' * 130}\nshort\n")
    program = (
        "import sys; sys.path.insert(0, 'scripts'); import code_density; from pathlib import Path\n"
        f"code_density.ROOT = Path({str(tmp_path)!r}); print(code_density.wide_lines())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "['launch/job.sh:1']"


def test_small_files_are_counted_except_package_marks_and_commands(tmp_path: Path) -> None:
    files = {"model/__init__.py": 1, "cli/plan.py": 59, "model/small.py": 59, "model/long.py": 60}
    for name, lines in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n" * lines)
    program = (
        "import sys, pathlib; sys.path.insert(0, 'scripts'); import code_density; "
        "print(code_density.small_files(pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "['model/small.py']"
