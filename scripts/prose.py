"""Counts patterns that make the English of this project hard to read, and refuses more of them than the bounds below.

    python scripts/prose.py [--check] [--list PATTERN[:KIND]] [FILE ...]

Four kinds of text are measured: docstrings, comments, messages (texts of errors, problems and log calls) and pages
(Markdown without code, tables and headings). Each bound is a share of the sentences of a kind. In torchtitan, OLMo-core
and nanotron each pattern occurs in 0.0 to 0.4 % of the docstrings' sentences. Only long sentences are more frequent.

Words of our own that the field has another word for (HOUSE_WORDS) may occur neither in text nor in identifiers.

A sentence that must stay is excepted by `# prose: ok: reason` (in pages `<!-- prose: ok: reason -->`) on its first line
or on the line before it. The exceptions are counted.

All pages of docs/ together have at most MOST_WORDS_OF_PAGES words. Tables count. Code, addresses of links, generated
pages and benchmarks do not.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 25
MOST_WORDS_OF_PAGES = 40_000
LONG = "long"
HOUSE = "house-word"
# Words of our own → the field's words. They are refused in identifiers and in text.
HOUSE_WORDS = {
    "baton": "interleaving of two microbatches",
    "stranger": "unauthenticated peer",
    "strangers": "unauthenticated peers",
    "habit": "software option",
    "habits": "software options",
    "wish": "request",
    "wishes": "requests",
    "promise": "uncertainty, prediction",
    "promises": "predictions",
    "seats": "ranks per node",
    "meanwhile": "overlap",
    "played": "executed, simulated",
    "plays": "executes",
    "player": "simulation",
}
# Words that are refused in identifiers only, because text also uses them in their usual sense.
HOUSE_NAMES = HOUSE_WORDS | {
    "board": "heartbeats",
    "door": "handshake",
    "beat": "period, length",
    "play": "run, simulate",
    "settle": "wait for the gather",
    "lead": "warning time, leading",
}
REPEATS_NAME = "repeats-name"
PATTERNS = {
    "where-for-if": re.compile(
        r"\bwhere (it|they|there|that|this|a|an|the|one|no|none|nobody|some|each|all|both|only|ranks|nothing)\b"
    ),
    "what-as-noun": re.compile(
        r"\b(what is|what was|what has|what it|what they|what a|those that|that of|those of|as many|so many)\b"
    ),
    "starts-with-of": re.compile(r"^(And |But )?Of\b"),
    "starts-with-where": re.compile(r"^Where\b"),
    "persons": re.compile(r"\b(who|whoever|nobody|whom|somebody|everybody|he|heard)\b", re.IGNORECASE),
}
MESSAGE_CALLS = ("Problem", "warn", "warning", "info", "error")
EXCEPTION = re.compile(r"prose: ok: \w+")
FILLER = {
    "a",
    "an",
    "the",
    "of",
    "to",
    "and",
    "for",
    "from",
    "in",
    "it",
    "its",
    "this",
    "get",
    "return",
    "is",
    "i",
    "thi",
}
FORMULA = re.compile(r"[@=+*\[]")
# Generated pages and results have no sentences of their own. The simulator's folder can be copied by other projects.
LEFT_OUT = ("docs/generated/", "docs/configuration.md", "tests/cdna2/", "CHANGELOG.md")

# Highest share of sentences with each pattern, in percent, by kind of text. A bound may only be lowered.
GOAL = dict.fromkeys(PATTERNS, 0.5) | {LONG: 5.0, REPEATS_NAME: 0.0, HOUSE: 0.0}
BOUNDS = {
    "docstring": GOAL,
    "comment": GOAL,
    "message": GOAL,
    "page": GOAL | {LONG: 12.0},
}


@dataclass(frozen=True)
class Sentence:
    kind: str  # docstring, comment, message or page
    place: str  # path:line
    text: str
    repeats_name: bool = False  # the docstring has only words of the name that it documents


def patterns_in(sentence: Sentence) -> list[str]:
    """Return the names of the patterns in a sentence."""
    found = [name for name, pattern in PATTERNS.items() if pattern.search(sentence.text)]
    if len(sentence.text.split()) > MOST_WORDS:
        found.append(LONG)
    if any(word.lower() in HOUSE_WORDS for word in re.findall(r"[A-Za-z]+", sentence.text)):
        found.append(HOUSE)
    if sentence.repeats_name:
        found.append(REPEATS_NAME)
    return found


def split_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. Code, tables and fragments of less than three words are left out."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"``[^`]*``|`[^`]*`", "X", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*|#]|\n\s*\d+\.\s", text):
        paragraph = " ".join(paragraph.split())
        if "|" in paragraph:
            continue
        for sentence in re.split(r"(?<=[.!?;:])\s+(?=[A-Z`(X])|(?<=[.!?])\s+", paragraph):
            if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= 3:
                yield sentence.strip()


def words_of(text: str) -> set[str]:
    """Return the words of a name or a sentence, in lower case and without a plural's s."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", text)
    return {word.lower().rstrip("s") for word in words}


def repeats_name(docstring: str, node: ast.AST) -> bool:
    """Return whether a docstring has only words of its function's or class's name and parameters."""
    signature = words_of(getattr(node, "name", ""))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for parameter in parameters:
            signature |= words_of(parameter.arg)
    if FORMULA.search(docstring):
        return False
    said = words_of(docstring) - FILLER
    return bool(said) and said <= signature


def literal_text(node: ast.AST) -> str:
    """Return the text of a string or an f-string, with X in place of each value. Returns '' for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values]
        return "".join(parts)
    return ""


def sentences_of_python(path: str, source: str) -> Iterator[Sentence]:
    """Yield the sentences of a module's docstrings, messages and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node) or ""
            place = f"{path}:{getattr(node, 'lineno', 1)}"
            if repeats_name(docstring, node):
                yield Sentence("docstring", place, docstring, repeats_name=True)
                continue
            for text in split_sentences(docstring):
                yield Sentence("docstring", place, text)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called.endswith(("Error", "Problem")) or called in MESSAGE_CALLS:
                for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    for text in split_sentences(literal_text(argument)):
                        yield Sentence("message", f"{path}:{node.lineno}", text)
    for line, block in comment_blocks(source):
        for text in split_sentences(block):
            yield Sentence("comment", f"{path}:{line}", text)


def comment_blocks(source: str) -> Iterator[tuple[int, str]]:
    """Yield first line and text of each block of comments on consecutive lines."""
    block: list[str] = []
    first = last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#!", "# type", "# noqa", "# fmt", "# prose")):
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield first, " ".join(block)
            block = []
        if not block:
            first = line
        block.append(token.string.lstrip("# "))
        last = line
    if block:
        yield first, " ".join(block)


def sentences_of_page(path: str, text: str) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown page, each with the line of its paragraph."""
    line = 1
    for part in re.split(r"(```.*?```)", text, flags=re.DOTALL):
        if not part.startswith("```"):
            for paragraph in re.split(r"(\n\s*\n)", part):
                for sentence in split_sentences(paragraph):
                    yield Sentence("page", f"{path}:{line}", sentence)
                line += paragraph.count("\n")
        else:
            line += part.count("\n")


def tracked_files() -> list[str]:
    """Return the Python files and pages in git, except LEFT_OUT."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = sorted(listed.stdout.split())
    return [path for path in paths if not path.startswith(LEFT_OUT) and (ROOT / path).is_file()]


def sentences(paths: list[str]) -> Iterator[Sentence]:
    """Yield all sentences of these files (relative to the project's folder, or absolute)."""
    for path in paths:
        source = (ROOT / path).read_text(encoding="utf-8")
        yield from sentences_of_python(path, source) if path.endswith(".py") else sentences_of_page(path, source)


def house_names(paths: list[str]) -> Iterator[str]:
    """Yield "path:line: name: use …" for each identifier with a word of HOUSE_NAMES that these Python files define."""
    for path in paths:
        if not path.endswith(".py"):
            continue
        tokens = tokenize.generate_tokens(io.StringIO((ROOT / path).read_text(encoding="utf-8")).readline)
        for token in tokens:
            if token.type != tokenize.NAME or (token.string.startswith("test_") and "_" in token.string[5:]):
                continue
            for word in re.findall(r"[A-Z]?[a-z]+", token.string):
                if word.lower() in HOUSE_NAMES:
                    place = f"{path}:{token.start[0]}"
                    yield f"{place}: {token.string}: instead of {word!r} use: {HOUSE_NAMES[word.lower()]}"


def count_words_of_pages() -> int:
    """Return the number of words in the pages of docs/, without code, addresses of links and the folders below it."""
    words = 0
    for page in (ROOT / "docs").glob("*.md"):
        text = re.sub(r"```.*?```", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        text = re.sub(r"\]\([^)]*\)", "]", text)
        words += len(re.findall(r"\S*\w\S*", text))
    return words


def is_excepted(sentence: Sentence) -> bool:
    """Return whether the line of the sentence, or the line before it, has an exception with a reason."""
    path, line = sentence.place.rsplit(":", 1)
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    index = int(line) - 1
    return any(EXCEPTION.search(each) for each in lines[max(0, index - 1) : index + 1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a share is above its bound")
    parser.add_argument("--list", metavar="PATTERN[:KIND]", help="print the sentences with a pattern")
    parser.add_argument("files", nargs="*", help="Python files and pages (default: all in git)")
    arguments = parser.parse_args()

    totals: Counter[str] = Counter()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    found: list[tuple[str, Sentence]] = []
    exceptions = 0
    for sentence in sentences(arguments.files or tracked_files()):
        totals[sentence.kind] += 1
        patterns = patterns_in(sentence)
        if patterns and is_excepted(sentence):
            exceptions += 1
            continue
        for pattern in patterns:
            counts[sentence.kind][pattern] += 1
            found.append((pattern, sentence))

    if arguments.list:
        pattern, _, kind = arguments.list.partition(":")
        for name, sentence in found:
            if name == pattern and kind in ("", sentence.kind):
                print(f"{sentence.place}\n    {sentence.text}")
        return 0

    broken = list(house_names(arguments.files or tracked_files()))
    for kind, bounds in BOUNDS.items():
        total = max(1, totals[kind])
        shares = {pattern: 100 * counts[kind][pattern] / total for pattern in GOAL}
        print(
            f"{kind}: {totals[kind]} sentences; " + ", ".join(f"{name} {share:.2f} %" for name, share in shares.items())
        )
        for pattern, share in shares.items():
            if share > bounds[pattern]:
                broken.append(f"{kind}: {pattern} in {share:.2f} % of the sentences, at most {bounds[pattern]} %")
    print(f"{exceptions} sentences are excepted with a reason")
    words = count_words_of_pages()
    print(f"docs/: {words:,} words, at most {MOST_WORDS_OF_PAGES:,}")
    if words > MOST_WORDS_OF_PAGES:
        broken.append(f"docs/ has {words:,} words: move measurements to docs/benchmarks/, or shorten a page")
    if arguments.check and broken:
        print("\n".join([*broken, "list them: python scripts/prose.py --list PATTERN:KIND"]), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
