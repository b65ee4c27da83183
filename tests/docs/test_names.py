"""Names in backticks exist: paths, identifiers, options and configuration keys (pages, docstrings, comments)."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# These pages are not checked, because they describe other software or history, or are generated.
LEFT_OUT = (
    "CHANGELOG.md",
    "benchmarks/findability.md",
    "docs/benchmarks/",
    "docs/coming_from.md",
    "docs/generated/",
    "docs/log.md",
)
PATH = re.compile(r"[\w./-]*\w\.(?:py|md|sh|cpp|h|yaml|sbatch|json)")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
OPTION = re.compile(r"(?<!\S)--[a-z][\w-]+")
WORD = re.compile(r"--[a-z][\w-]+|[A-Za-z_]\w*")
# Folders to which a path in a text may be relative, beside the folder of the text itself.
BASES = ("", "frontier_llm", "docs", "configs", "csrc", "tests", "scripts", "benchmarks")

# Names of other software, and names of a run's files that the code composes of several strings.
FOREIGN = {
    "--calculate-per-token-loss",
    "--ckpt-format",
    "--gpu-counters",
    "--mem",
    "--no-bias-gelu-fusion",
    "AWS_ACCESS_KEY_ID",
    "AWS_ENDPOINT_URL",
    "AWS_PROFILE",
    "AWS_SECRET_ACCESS_KEY",
    "LICENSE",
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "PREFIX.meta.json",
    "RUN/logs/flight_rank00000.json",
    "SYS",
    "_us",
    "global_aux_loss",
    "incarnations/00000003.json",
    "incarnations/99999999.json",
    "make_vocab_size_divisible_by",
    "mkldnn._linear_pointwise",
    "model0",
    "model1",
    "mp_rank_TT_model_states.pt",
    "ncclCommSplit",
    "nohup",
    "perf",
    "preprocess_data.py",
    "runs/first.yaml",
    "shard_NNNNN.safetensors",
    "step_N",
    "step_N.tmp.I",
    "sync_file_range",
    "trust_remote_code",
}


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the string nodes that document a module, class or function."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first.value


@cache
def tracked() -> list[str]:
    """Return the paths of all files in git except this one. The names of other software in this file must not count as
    known.
    """
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file() and ROOT / path != Path(__file__)]


@cache
def words_in_code() -> frozenset[str]:
    """Return identifiers, words of strings, options and keys in code and data, without comments and docstrings."""
    words: set[str] = set()
    for path in tracked():
        if path.endswith(".py"):
            source = (ROOT / path).read_text(encoding="utf-8")
            lines: set[int] = set()
            for node in docstrings(ast.parse(source)):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            for token in tokenize.generate_tokens(io.StringIO(source).readline):
                if token.type != tokenize.COMMENT and token.start[0] not in lines:
                    words.update(WORD.findall(token.string))
        elif path.endswith((".yaml", ".yml", ".toml", ".json", ".sh", ".sbatch", ".cpp", ".h")) or "/" not in path:
            words.update(WORD.findall((ROOT / path).read_text(encoding="utf-8", errors="replace")))
    return frozenset(words)


@cache
def file_names() -> frozenset[str]:
    """Return the names of all files in git, without their folders."""
    return frozenset(Path(path).name for path in tracked())


def unknown(text: str, folder: Path) -> list[str]:
    """Return the names in backticks in `text` that do not exist. Paths may be relative to `folder`."""
    missing = []
    for span in re.findall(r"`([^`\n]+)`", text):
        if span in FOREIGN:
            continue
        if PATH.fullmatch(span):
            bases = [folder, *(ROOT / base for base in BASES)]
            exists = any((base / span).exists() for base in bases) if "/" in span else span in file_names()
            if not exists and span not in words_in_files():
                missing.append(span)
        elif IDENTIFIER.fullmatch(span):
            parts = span.removesuffix("()").split(".")
            if not words_in_code().issuperset(parts):
                missing.append(span)
        else:
            options = [option for option in OPTION.findall(span) if option not in FOREIGN]
            missing += [option for option in options if option not in words_in_code()]
    return missing


@cache
def words_in_files() -> frozenset[str]:
    """Return the file names in strings of the code, for example names of files that a run writes."""
    names: set[str] = set()
    for path in tracked():
        if path.endswith((".py", ".sh", ".sbatch")):
            names.update(PATH.findall((ROOT / path).read_text(encoding="utf-8")))
    return frozenset(names)


def texts(path: str) -> Iterator[str]:
    """Yield the text of a page without its code blocks, or the docstrings and comments of a module."""
    source = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        yield re.sub(r"```.*?```", " ", source, flags=re.DOTALL)
        return
    for node in docstrings(ast.parse(source)):
        yield str(node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def missing_names(suffix: str) -> list[str]:
    """Return 'path: name' for each name that does not exist, in files that end with `suffix`."""
    found = []
    for path in tracked():
        if path.endswith(suffix) and not path.startswith(LEFT_OUT):
            for text in texts(path):
                names = unknown(text, (ROOT / path).parent)
                found += [f"{path}: {name}" for name in names]
    return found


def test_names_on_pages_exist() -> None:
    assert missing_names(".md") == []


def test_names_in_docstrings_and_comments_exist() -> None:
    assert missing_names(".py") == []


@pytest.mark.parametrize(
    "name",
    ["no_such_function()", "training/no_such_file.py", "no_such_section.key", "frontier-llm plan --no-such-option"],
)
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert unknown(f"Call `{name}`.", ROOT) != []
