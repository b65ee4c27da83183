"""`<prefix>.meta.json`: which tokenizer made a dataset and what went in, so that a mismatch is refused before ranks
start.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from frontier_llm.errors import DataError
from frontier_llm.files import write_atomically
from frontier_llm.units import format_bytes, strict_json

MAXIMUM_BYTES = 16 << 20  # of a record; a hundred damaged inputs by name take kilobytes


@dataclass(frozen=True)
class DatasetMeta:
    """What is recorded beside a dataset. `text_bytes` (UTF-8, before tokenization) turns a loss per token into bits
    per byte.
    """

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
    largest_id: int | None = None  # of its tokens; None of datasets from before it was recorded
    format: Literal[1] = 1
    __pydantic_config__ = {"extra": "forbid", "strict": True}  # noqa: RUF012  # of reading one

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
        raise DataError(
            f"is larger than {format_bytes(MAXIMUM_BYTES)}: no record of ours",
            where=str(path),
            fix="tokenize the text again",
        )
    from pydantic import TypeAdapter, ValidationError  # tokenization workers start without it

    from frontier_llm.config.fields import first_fault

    try:
        return TypeAdapter(DatasetMeta).validate_json(path.read_bytes())
    except ValidationError as error:
        fix = "tokenize the text again, or delete it to use the data unchecked"
        raise DataError(f"is damaged: {first_fault(error)}", where=str(path), fix=fix) from None
