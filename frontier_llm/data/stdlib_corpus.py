"""Makes a small corpus without a download, from the sources of Python's standard library (about 30 MB of text).

The files are ordered by their relative path. One file in twenty is held out for validation, chosen by the digest of its
path. The text is kept exactly (decode(encode(text)) == text), so that bits per byte can be computed correctly.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from frontier_llm import log
from frontier_llm.data.meta import DatasetMeta
from frontier_llm.data.tokenize import TokenizeOptions, tokenize
from frontier_llm.data.tokenizer import Tokenizer, load_tokenizer, train_sentencepiece
from frontier_llm.errors import DataError
from frontier_llm.files import write_atomically

HELD_OUT_ONE_IN = 20  # 5 %
SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__"})
TRAINING_BYTES = 8 << 20  # training text of the tokenizer; takes about a second
SHARD_BYTES = 4 << 20


@dataclass(frozen=True)
class StdlibCorpus:
    """Datasets and tokenizer that `prepare` made: paths for a configuration, and the records of both splits."""

    tokenizer: str
    train: str  # prefix of the dataset
    validation: str
    train_meta: DatasetMeta
    validation_meta: DatasetMeta


def source_files(root: Path | None = None) -> list[Path]:
    """Return the UTF-8 `.py` files with text below the standard library's directory, ordered by relative path.

    Raises DataError if there are fewer than 40 files.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not SKIPPED_DIRECTORIES & set(path.relative_to(root).parts)]
    files = sorted((path for path in files if _text(path)), key=lambda path: path.relative_to(root).as_posix())
    if len(files) < 2 * HELD_OUT_ONE_IN:
        what = f"has only {len(files)} Python source files, and {2 * HELD_OUT_ONE_IN} are needed"
        raise DataError(
            what,
            where=str(root),
            fix="this Python has no sources; tokenize other text with `frontier-llm data tokenize`",
        )
    return files


def held_out(path: Path, root: Path) -> bool:
    """Return whether a file belongs to the validation split. This depends only on its relative path."""
    digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "little") % HELD_OUT_ONE_IN == 0


def prepare(
    directory: str | Path,
    vocab_size: int = 4096,
    root: Path | None = None,
    workers: int | None = None,
    tokenizer: str | None = None,
) -> StdlibCorpus:
    """Make train and validation datasets in `directory`, and a tokenizer for them unless one is given.

    Existing results are reused if they were made from the same sources with the same options. Raises DataError if the
    library has no sources, or if the directory cannot be written.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    directory = Path(directory)
    files = source_files(root)
    train = [path for path in files if not held_out(path, root)]
    validation = [path for path in files if held_out(path, root)]
    try:
        model = load_tokenizer(tokenizer) if tokenizer else _tokenizer(directory, train, vocab_size)
    except OSError as error:
        raise DataError(
            f"cannot write: {error.strerror or error}",
            where=str(directory),
            fix="choose a directory you can write",
        ) from error
    options = TokenizeOptions(shard_bytes=SHARD_BYTES)
    prefixes = {"train": train, "validation": validation}
    metas = {
        split: tokenize(
            inputs=paths,
            prefix=directory / split,
            tokenizer=model.name,
            options=options,
            workers=workers,
            overwrite=True,
        )
        for split, paths in prefixes.items()
    }
    return StdlibCorpus(
        model.name,
        str(directory / "train"),
        str(directory / "validation"),
        metas["train"],
        metas["validation"],
    )


def _tokenizer(directory: Path, train: list[Path], vocab_size: int) -> Tokenizer:
    """Return `tokenizer.model`, trained on these files with this vocabulary size.

    The file `tokenizer.made-from` records a digest of the files and the vocabulary size. If the digest differs, the
    tokenizer is trained again.
    """
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in train]
    digest = hashlib.sha256(repr((stats, vocab_size, TRAINING_BYTES)).encode()).hexdigest()
    path = directory / "tokenizer.model"
    record = directory / "tokenizer.made-from"
    if path.exists() and record.exists() and record.read_text(encoding="utf-8") == digest:
        return load_tokenizer(path)
    log.info(f"training a tokenizer of {vocab_size} pieces on the Python standard library")
    record.unlink(missing_ok=True)
    # in a pseudo-random order, so that the first files are a fair sample
    texts = map(_text, sorted(train, key=lambda file: hashlib.sha256(file.name.encode()).digest()))
    model = train_sentencepiece(texts, path, vocab_size, TRAINING_BYTES)
    write_atomically(record, digest)
    return model


def _text(path: Path) -> str:
    """Return the file's text, or '' if it is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return ""
