"""Counts tokens per line of code and other signs of dense Python code, by folder, and refuses values above the bounds.

    python scripts/code_density.py [--check]

Also refuses lines of C++ and shell over 120 columns, and more than 30 files of the package with fewer than 60 lines.

A line of code is a line that is not blank, a comment, a docstring or an import. Tokens are the tokens of Python's
tokenizer without comments and layout.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_COLUMNS = 120
SMALL_LINES = 60  # a file with fewer lines is small
MOST_SMALL_FILES = 30
# Files that may be small: an `__init__` file marks a package or lists its public names, a command has one file, and
# `model/dims.py` is the legend of the shapes.
MAY_BE_SMALL = ("**/__init__.py", "__main__.py", "cli/*.py", "experiments/scaling/point.py", "model/dims.py")
LONGEST_WORD = 100
WIDTH_CHECKED = (
    "csrc/**/*.cpp",
    "csrc/**/*.h",
    "csrc/**/*.inc",
    "scripts/*.sh",
    "launch/*",
    "slurm/**/*.sbatch",
    "slurm/**/*.sh",
    "slurm/**/*.yaml",
    ".ci/run",
)
LEFT_OUT = {"cdna2", "_native"}  # the simulator of gfx90a has tables of instructions
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass
class Measure:
    """Totals of a file or folder."""

    tokens: int = 0
    code_lines: int = 0
    tuples: int = 0  # a, b, c = x, y, z with three values or more
    pairs: int = 0  # a, b = x, y
    starred: int = 0  # *(a, b) and *(a if c else b)
    wide: int = 0  # lines over MOST_COLUMNS

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(1, self.code_lines)

    def add(self, other: Measure) -> None:
        """Add the totals of another file."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(frozen=True)
class Bound:
    """Largest values that a folder may have."""

    tokens_per_line: float
    tuples: int
    pairs: int
    starred: int
    wide: int


BOUNDS = {
    "frontier_llm": Bound(tokens_per_line=10.0, tuples=5, pairs=8, starred=0, wide=11),
    "tests": Bound(tokens_per_line=11.9, tuples=0, pairs=10, starred=1, wide=34),
    "scripts": Bound(tokens_per_line=10.0, tuples=0, pairs=0, starred=3, wide=2),
    "benchmarks": Bound(tokens_per_line=9.8, tuples=1, pairs=5, starred=3, wide=0),
}


def measure(source: str) -> Measure:
    """Return the totals of one file."""
    lines = source.splitlines()
    result = Measure(wide=sum(len(line) > MOST_COLUMNS for line in lines))
    no_code: set[int] = set()  # numbers of lines of imports and docstrings
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            no_code |= _lines_of(node)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                no_code |= _lines_of(node.body[0])
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and len(target.elts) == 2:
                    result.pairs += 1
                elif isinstance(target, ast.Tuple):
                    result.tuples += 1
        elif isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.IfExp):
            result.starred += 1
    for number, line in enumerate(lines, 1):
        text = line.strip()
        result.code_lines += bool(text) and not text.startswith("#") and number not in no_code
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    result.tokens = sum(token.type not in LAYOUT for token in tokens)
    return result


def _lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def measure_folder(folder: Path) -> Measure:
    """Return the totals of a folder's Python files."""
    total = Measure()
    for path in folder.rglob("*.py"):
        if not LEFT_OUT & set(path.parts):
            total.add(measure(path.read_text(encoding="utf-8")))
    return total


def wide_lines() -> list[str]:
    """Return FILE:LINE of each line of C++ and shell over MOST_COLUMNS, generated scripts included.

    A line with a URL is allowed. A line with a word that fits on no line is allowed too.
    """
    wide = []
    for pattern in WIDTH_CHECKED:
        for path in ROOT.glob(pattern):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                has_long_word = max(map(len, line.split()), default=0) > LONGEST_WORD
                if len(line) > MOST_COLUMNS and "://" not in line and not has_long_word:
                    wide.append(f"{path.relative_to(ROOT)}:{number}")
    return sorted(wide)


def small_files(package: Path) -> list[str]:
    """Return the files of the package that are small and not in MAY_BE_SMALL."""
    allowed = {path for pattern in MAY_BE_SMALL for path in package.glob(pattern)}
    return sorted(
        str(path.relative_to(package))
        for path in set(package.rglob("*.py")) - allowed
        if len(path.read_text(encoding="utf-8").splitlines()) < SMALL_LINES
    )


def excesses(found: Measure, bound: Bound) -> list[str]:
    """Return a line of text for each value above its bound."""
    return [
        f"{name} is {getattr(found, name):.4g}, at most {most} allowed"
        for name, most in asdict(bound).items()
        if round(getattr(found, name), 1) > most
    ]


def main() -> int:
    """Print the totals. With --check return 1 if a folder is above a bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a measured value of a folder exceeds its limit"
    )
    check = parser.parse_args().check
    too_dense = False
    for name, bound in BOUNDS.items():
        found = measure_folder(ROOT / name)
        print(
            f"{name}: {found.tokens} tokens, {found.tokens_per_line:.1f} per line of code; tuple assignments of three "
            f"and more {found.tuples}, of two {found.pairs}; starred tuples {found.starred}; wide lines {found.wide}"
        )
        for excess in excesses(found, bound):
            too_dense = True
            print(f"{name}: {excess}: write one thing per line (CONTRIBUTING.md)", file=sys.stderr)
    wide = wide_lines()
    for place in wide:
        print(f"{place} has more than {MOST_COLUMNS} columns: wrap it", file=sys.stderr)
    small = small_files(ROOT / "frontier_llm")
    print(f"frontier_llm: {len(small)} files below {SMALL_LINES} lines, at most {MOST_SMALL_FILES} allowed")
    has_too_many_small = len(small) > MOST_SMALL_FILES
    if has_too_many_small:
        advice = "merge each into a file of the same package with the same subject"
        print(f"frontier_llm has too many small files; {advice}: {', '.join(small)}", file=sys.stderr)
    return int(check and (too_dense or bool(wide) or has_too_many_small))


if __name__ == "__main__":
    sys.exit(main())
