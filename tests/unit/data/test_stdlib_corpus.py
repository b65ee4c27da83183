"""The embedded corpus is split by path and lossless. It is reused if nothing changed, and rebuilt if something
changed.
"""

from __future__ import annotations

import math
import shutil
import sysconfig
from pathlib import Path

import pytest

from frontier_llm.data import stdlib_corpus
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.stdlib_corpus import held_out, prepare, source_files
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.errors import DataError


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the standard library, with files that must be left out."""
    root = tmp_path_factory.mktemp("library")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for name in ("json", "email", "concurrent", "asyncio", "importlib", "unittest", "logging", "http"):
        shutil.copytree(stdlib / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sorted(stdlib.glob("*.py"))[:60]:
        shutil.copy(path, root)
    (root / "latin.py").write_bytes(b"# \xe9\n")
    (root / "empty.py").write_bytes(b"")
    (root / "site-packages").mkdir()
    (root / "site-packages" / "foreign.py").write_text("x = 1\n")
    return root


def test_files_are_the_librarys_own_text(library: Path) -> None:
    names = [path.relative_to(library).as_posix() for path in source_files(library)]
    assert names == sorted(names)
    assert len(names) > 100
    assert not {"latin.py", "empty.py", "site-packages/foreign.py"} & set(names)


def test_one_in_twenty_is_held_out_whatever_else_there_is() -> None:
    root = Path("/somewhere")
    chosen = [held_out(root / f"package/module{number}.py", root) for number in range(4000)]
    assert abs(sum(chosen) - 200) < 5 * math.sqrt(200)
    assert chosen == [held_out(Path("/else") / f"package/module{number}.py", Path("/else")) for number in range(4000)]


def test_lossless_split_and_reused(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = prepare(tmp_path, 600, root=library, workers=1)
    codec = load_tokenizer(corpus.tokenizer)
    assert codec.vocab_size == 600
    texts = {split: [] for split in ("train", "validation")}
    for path in source_files(library):
        texts["validation" if held_out(path, library) else "train"].append(path.read_bytes().decode())
    for split, meta in (("train", corpus.train_meta), ("validation", corpus.validation_meta)):
        dataset = IndexedDataset(tmp_path / split)
        assert [codec.decode(dataset.document(d)) for d in range(dataset.document_count)] == texts[split]
        assert meta.text_bytes == sum(len(text.encode()) for text in texts[split])
        assert meta.tokenizer_digest == codec.digest
    monkeypatch.setattr(stdlib_corpus, "train_sentencepiece", lambda *_: pytest.fail("trained again"))
    assert prepare(tmp_path, 600, root=library, workers=1) == corpus


@pytest.mark.thorough
def test_another_vocabulary_makes_it_anew(library: Path, tmp_path: Path) -> None:
    first = prepare(tmp_path, 500, root=library, workers=1)
    second = prepare(tmp_path, 700, root=library, workers=1)
    assert first.tokenizer == second.tokenizer
    assert second.train_meta.vocab_size == 700
    assert second.train_meta.tokens < first.train_meta.tokens


def test_python_without_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="only 0 Python source files"):
        prepare(tmp_path / "out", root=tmp_path)


def test_directory_that_cannot_be_written(library: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        prepare(tmp_path / "file", 500, root=library)
