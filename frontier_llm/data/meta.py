"""`<prefix>.meta.json`: which tokenizer made a dataset and what went in, so that a mismatch is refused before ranks start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from frontier_llm.errors import DataError
from frontier_llm.files import write_atomically
from frontier_llm.units import format_bytes, strict_json

FORMAT = 1
MAXIMUM_BYTES = 16 << 20  # of a record; a hundred damaged inputs by name take kilobytes


@dataclass(frozen=True)
class DatasetMeta:
    """What is recorded beside a dataset. `text_bytes` (UTF-8, before tokenization) turns a loss per token into bits per byte."""

    tokenizer: str  # file name, for people
    tokenizer_digest: str
    vocab_size: int
    eod: int
    documents: int
    tokens: int  # end-of-document tokens included
    text_bytes: int
    damaged: int = 0  # inputs left out under --skip-damaged
    damaged_examples: tuple[str, ...] = ()
    inputs_digest: str = ""  # of the plan: files, sizes, options
    format: int = field(default=FORMAT)

    @property
    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes of text per token; bits per byte = loss in nats / ln 2 / bytes_per_token."""
        return self.text_bytes / self.tokens


def meta_path(prefix: str | Path) -> Path:
    """Where the record of a dataset lies."""
    return Path(f"{prefix}.meta.json")


def write_meta(prefix: str | Path, meta: DatasetMeta) -> None:
    """Write atomically."""
    write_atomically(meta_path(prefix), strict_json(asdict(meta)))


def read_meta(prefix: str | Path) -> DatasetMeta | None:
    """The record, or None for a dataset made elsewhere. Raises DataError when it is there but not readable."""
    path = meta_path(prefix)
    if not path.exists():
        return None
    if path.stat().st_size > MAXIMUM_BYTES:
        raise DataError(f"is larger than {format_bytes(MAXIMUM_BYTES)}: no record of ours", where=str(path), fix="tokenize the text again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format") != FORMAT:
            raise DataError(f"has format {content.get('format')!r}, expected {FORMAT}", where=str(path), fix="tokenize the text again")
        meta = DatasetMeta(**{**content, "damaged_examples": tuple(content["damaged_examples"])})
        for entry in fields(meta):
            if type(value := getattr(meta, entry.name)).__name__ != str(entry.type).partition("[")[0]:
                raise TypeError(f"{entry.name} is {value!r}")
        return meta
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"is damaged: {error}", where=str(path), fix="tokenize the text again, or delete it to use the data unchecked"
        ) from error
