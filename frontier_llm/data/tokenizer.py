"""One interface for sentencepiece models, Hugging Face `tokenizer.json` files and raw bytes.

A tokenizer's `digest` (sha256 of its files) is recorded beside every dataset that it makes. `loader.data_problems`
compares the digests. Text never yields a special id, even if it contains "<s>" or "<|endoftext|>".
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from frontier_llm.errors import DataError
from frontier_llm.files import LIFT_HINT, lifted_bound, write_atomically
from frontier_llm.units import format_bytes

META_SPACE = "\u2581"  # sentencepiece's symbol for a space; in a text it would be decoded as a space
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>")
MAXIMUM_BYTES = 256 << 20  # Size limit of a tokenizer's file. The largest in use has 35 MB.
SAMPLE_BYTES = 64 << 20  # Training text read by default. More text costs memory and hardly changes a vocabulary.


class Tokenizer(Protocol):
    """Converts text to token ids and back. `vocab_size` is the largest id plus 1. `eod` ends every document."""

    name: str
    vocab_size: int
    eod: int
    digest: str

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special ids at its ends."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Special ids yield no text."""


class ByteTokenizer:
    """Tokenizer without a file: each UTF-8 byte is an id, and 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    digest = hashlib.sha256(b"frontier_llm bytes 257").hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the bytes. Sequences that are not UTF-8 become U+FFFD."""
        return bytes(number for number in ids if number < 256).decode(errors="replace")


class SentencePieceTokenizer:
    """Tokenizer of a sentencepiece `.model` file. Its end-of-sentence id `</s>` ends a document."""

    def __init__(self, path: str | Path) -> None:
        import sentencepiece

        self.name = str(path)
        self.path = Path(path)
        self.digest = _digest(Path(path))
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(
                "is not a sentencepiece model",
                where=str(path),
                fix="give a sentencepiece .model file, or the tokenizer.json of a Hugging Face tokenizer",
            ) from error
        self.vocab_size = self._model.vocab_size()
        self.eod = self._model.eos_id()
        if self.eod < 0:
            raise DataError(
                "has no end-of-sentence id, which must mark the end of a document",
                where=str(path),
                fix="train it with eos_id >= 0",
            )
        pieces = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in META_SPACE.encode()]
        self._meta_space = pieces if all(self._model.is_byte(piece) for piece in pieces) else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Lossless if the model has byte fallback and identity normalisation."""
        if self._meta_space is None or META_SPACE not in text:
            return self._model.encode(text)
        first, *rest = (self._model.encode(part) for part in text.split(META_SPACE))
        return first + [number for part in rest for number in (*self._meta_space, *part)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self._model.decode([int(number) for number in ids])


class HuggingFaceTokenizer:
    """Tokenizer of a Hugging Face `tokenizer.json`, or of GPT-2's pair of vocab.json and merges.txt.

    The end-of-document id is the `eos_token` of tokenizer_config.json in the same folder. Without an `eos_token` it is
    the first of END_OF_DOCUMENT_NAMES in the vocabulary.
    """

    def __init__(self, path: str | Path) -> None:
        import tokenizers

        merges = _merges_beside(Path(path))
        self.name = str(path)
        self.path = Path(path)
        self.digest = _digest(Path(path), *filter(None, [merges]))
        try:
            if merges:
                self._model = _byte_level(tokenizers.models.BPE.from_file(str(path), str(merges)))
                ends = [name for name in END_OF_DOCUMENT_NAMES if self._model.token_to_id(name) is not None]
                self._model.add_special_tokens(
                    [tokenizers.AddedToken(name, special=True, normalized=False) for name in ends]
                )
            else:
                self._model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise DataError(
                f"is not a Hugging Face tokenizer: {error}",
                where=str(path),
                fix="give a tokenizer.json file",
            ) from error
        # path of tokenizer.json, or the content of such a file if GPT-2's vocabulary and merges were read
        self.as_file: str | Path = str(self._model.to_str(pretty=True)) if merges else Path(path)
        self._model.no_padding()
        self._model.no_truncation()
        self._model.encode_special_tokens = True  # "<|endoftext|>" in a text is ordinary text
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        self.eod = self._end_of_document(Path(path))

    def _end_of_document(self, path: Path) -> int:
        names: list[str] = []
        config = path.with_name("tokenizer_config.json")
        if config.is_file():
            try:
                declared = dict(json.loads(config.read_text(encoding="utf-8"))).get("eos_token")
            except (ValueError, TypeError, RecursionError) as error:
                raise DataError(
                    f"is not a JSON object: {error}",
                    where=str(config),
                    fix="fetch the file again, or remove it",
                ) from error
            declared = declared.get("content") if isinstance(declared, dict) else declared
            names = [declared] if isinstance(declared, str) else []
        for name in (*names, *END_OF_DOCUMENT_NAMES):
            number = self._model.token_to_id(name)
            if number is not None:
                return int(number)
        what = f"has none of the end-of-document tokens {', '.join((*names, *END_OF_DOCUMENT_NAMES))}"
        raise DataError(what, where=str(path), fix="set eos_token in tokenizer_config.json beside it")

    @property
    def eod_name(self) -> str:
        """Text of the token that ends a document."""
        return str(self._model.id_to_token(self.eod))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        # "fast" omits the offsets of the pieces in the text, which is 1.6 to 1.8 times faster
        return self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self._model.decode([int(number) for number in ids], skip_special_tokens=True)


def _merges_beside(vocabulary: Path) -> Path | None:
    """Return the merges file beside a vocabulary: merges.txt for vocab.json, gpt2-merges.txt for gpt2-vocab.json.

    None for a file with another name, and if the merges file is missing.
    """
    merges = vocabulary.with_name(vocabulary.name.replace("vocab.json", "merges.txt"))
    return merges if merges != vocabulary and merges.is_file() else None


def _byte_level(model: Any) -> Any:
    """Return a tokenizer of GPT-2's kind around a byte-pair model.

    The two files of such a tokenizer are the values of Megatron-LM's --vocab-file and --merge-file.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load the tokenizer that `spec` names.

    `spec` is `bytes`, a `.model` file, a `.json` file, or hf://OWNER/NAME on the Hugging Face Hub. It can also be a
    directory with such a file or with GPT-2's pair. Raises DataError for a file that is missing or not a tokenizer.
    """
    if str(spec) == "bytes":
        return ByteTokenizer()
    if str(spec).startswith("hf://"):
        from frontier_llm.data.hub import tokenizer_directory

        fetched = _load(tokenizer_directory(str(spec)))
        fetched.name = str(spec)
        return fetched
    try:
        return _load(Path(spec))
    except OSError as error:  # raised also for a name that is too long and for a device
        fix = "give a tokenizer's file or directory that you may read"
        raise DataError(f"cannot be read: {error.strerror}", where=str(spec)[:200], fix=fix) from None


def tokenizer_file(directory: Path) -> Path | None:
    """Return the tokenizer's file in a directory, or None if there is none."""
    pairs = sorted(file.name for file in directory.glob("*vocab.json") if _merges_beside(file))
    files = (directory / name for name in ("tokenizer.json", "tokenizer.model", *pairs))
    return next((file for file in files if file.is_file()), None)


def _load(path: Path) -> SentencePieceTokenizer | HuggingFaceTokenizer:
    if path.is_dir():
        file = tokenizer_file(path)
        if file is None:
            what = "contains neither tokenizer.json nor tokenizer.model, nor vocab.json with merges.txt"
            raise DataError(what, where=str(path), fix="give the tokenizer's file")
        path = file
    if not path.is_file():
        fix = (
            "give a tokenizer's file or directory, hf://OWNER/NAME to fetch one from the Hub, train one with "
            "`frontier-llm data tokenizer`, or give `bytes`"
        )
        raise DataError("no such tokenizer", where=str(path.absolute()), fix=fix)
    for file in filter(None, (path, _merges_beside(path), path.with_name("tokenizer_config.json"))):
        if file.is_file() and file.stat().st_size == 0:  # a file in /proc also has size 0, and may be endless
            raise DataError("is empty", where=str(file), fix="give the file of the tokenizer itself")
        if file.is_file() and file.stat().st_size > lifted_bound(MAXIMUM_BYTES):
            limit = format_bytes(lifted_bound(MAXIMUM_BYTES))
            what = f"has {format_bytes(file.stat().st_size)}, more than the limit of {limit} for a tokenizer"
            raise DataError(what, where=str(file), fix=f"give the tokenizer's own file; {LIFT_HINT}")
    if path.name.endswith("merges.txt"):
        raise DataError("has only the merges of a tokenizer", where=str(path), fix="give the vocab.json beside it")
    if path.suffix == ".json":
        return HuggingFaceTokenizer(path)
    return SentencePieceTokenizer(path)


def _digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def take_bytes(texts: Iterable[str], limit_bytes: int) -> Iterator[str]:
    """Yield texts until about `limit_bytes` of UTF-8 have passed."""
    for text in texts:
        if limit_bytes <= 0:
            return
        limit_bytes -= len(text.encode())
        yield text


def train_sentencepiece(
    texts: Iterable[str],
    path: str | Path,
    vocab_size: int,
    sample_bytes: int = SAMPLE_BYTES,
) -> SentencePieceTokenizer:
    """Train a lossless byte-pair model and write it to `path`: decode(encode(text)) == text for every text.

    The model has byte fallback, no normalisation, and no added or dropped spaces. A newline is always a separate token.
    Training reads about `sample_bytes` of the texts. Raises DataError for an empty corpus, and for a `vocab_size` that
    is too large or too small for it.
    """
    import sentencepiece

    lines = _some(
        line for text in take_bytes(texts, sample_bytes) for line in text.split("\n") if line and "\0" not in line
    )
    model = io.BytesIO()
    options: dict[str, Any] = {
        "model_type": "bpe", "vocab_size": vocab_size, "byte_fallback": True, "character_coverage": 0.9995,
        "normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True, "user_defined_symbols": ["\n"], "max_sentence_length": 1 << 16,
        "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1, "num_threads": 1, "minloglevel": 2,
    }  # fmt: skip
    try:
        with _ended_by_ctrl_c():
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **options)
    except RuntimeError as error:
        raise _refusal(str(error), vocab_size) from error
    write_atomically(Path(path), model.getvalue())
    return SentencePieceTokenizer(path)


def _refusal(reason: str, vocab_size: int) -> DataError:
    """Translate an error of sentencepiece's trainer into the terms of `data tokenizer`."""
    if most := re.search(r"set it to a value <= (\d+)", reason):
        fix = f"set --vocab-size to at most {most[1]}, or give more text"
        return DataError(f"the text gives at most {most[1]} pieces, fewer than --vocab-size {vocab_size}", fix)
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", reason):
        fix = f"set --vocab-size to at least {least[1]}"
        return DataError(
            f"--vocab-size {vocab_size} is too small: all bytes and the characters of the text need {least[1]} pieces",
            fix,
        )
    return DataError(
        f"sentencepiece failed: {reason.rpartition('] ')[2]}",
        fix="give other text, or another --vocab-size",
    )


def train_huggingface(
    texts: Iterable[str],
    path: str | Path,
    vocab_size: int,
    sample_bytes: int = SAMPLE_BYTES,
) -> HuggingFaceTokenizer:
    """Train a lossless byte-level byte-pair tokenizer (GPT-2's kind) and write `tokenizer.json` to `path`.

    Training reads about `sample_bytes` of the texts. Raises DataError for an empty corpus.
    """
    from tokenizers import models, pre_tokenizers, trainers

    texts = _some(take_bytes(texts, sample_bytes))
    model = _byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    with _ended_by_ctrl_c():
        model.train_from_iterator(texts, trainer)
    write_atomically(Path(path), model.to_str(pretty=True))  # model.save raises a bare Exception on a full disk
    return HuggingFaceTokenizer(path)


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once.

    Training is one call into C++ or Rust, during which Python handles no signal for up to half a minute. No file has
    been written at this time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _some(texts: Iterable[str]) -> Iterator[str]:
    """Return the texts. Raises DataError if there are none, because the error of the trainer would not mention the
    inputs.
    """
    texts = iter(texts)
    first = next(texts, None)
    if first is None:
        raise DataError("the inputs contain no text", fix="check the input paths")
    return itertools.chain([first], texts)
