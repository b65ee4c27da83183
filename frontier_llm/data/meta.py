"""Read and write `<prefix>.meta.json`, the record of the tokenizer and the inputs that made a dataset.

The checks before a run refuse a dataset whose record does not match the run's tokenizer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from frontier_llm.errors import DataError
from frontier_llm.files import write_atomically
from frontier_llm.units import format_bytes, strict_json

MAXIMUM_BYTES = 16 << 20  # size limit of a record; the names of 100 damaged inputs take only kilobytes


@dataclass(frozen=True)
class DatasetMeta:
    """Record beside a dataset.

    `text_bytes` (UTF-8, before tokenization) converts a loss per token into bits per byte.
    """

    tokenizer: str  # path, hf:// name or "bytes"; only the digest is compared
    tokenizer_digest: str
    vocab_size: int
    eod: int
    documents: int
    tokens: int  # including end-of-document tokens
    text_bytes: int
    damaged: int = 0  # number of inputs left out with --skip-damaged
    damaged_examples: tuple[str, ...] = ()
    inputs_digest: str = ""  # digest of files, sizes, tokenizer and options
    largest_id: int | None = None  # largest token id; None in records of older versions
    format: Literal[1] = 1
    __pydantic_config__ = {"extra": "forbid", "strict": True}  # noqa: RUF012  # used when a record is parsed

    @property
    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes of text per token. Bits per byte = loss in nats / ln 2 / bytes_per_token."""
        return self.text_bytes / self.tokens


def meta_path(prefix: str | Path) -> Path:
    """Return the path of a dataset's record."""
    return Path(f"{prefix}.meta.json")


def write_meta(prefix: str | Path, meta: DatasetMeta) -> None:
    """Write a dataset's record atomically."""
    write_atomically(meta_path(prefix), strict_json(asdict(meta)))


def read_meta(prefix: str | Path) -> DatasetMeta | None:
    """Return a dataset's record. None if there is none, for example because another program made the dataset.

    Raises DataError if the record is damaged.
    """
    path = meta_path(prefix)
    if not path.exists():
        return None
    if path.stat().st_size > MAXIMUM_BYTES:
        raise DataError(
            f"has {format_bytes(path.stat().st_size)}, more than the limit of {format_bytes(MAXIMUM_BYTES)} for "
            f"the record of a dataset",
            where=str(path),
            fix="tokenize the text again with --overwrite",
        )
    from pydantic import TypeAdapter, ValidationError  # imported here, so that tokenization workers start without it

    from frontier_llm.config.fields import first_fault

    try:
        return TypeAdapter(DatasetMeta).validate_json(path.read_bytes())
    except ValidationError as error:
        fix = "tokenize the text again with --overwrite, or delete the file to use the data without checks"
        raise DataError(f"is damaged: {first_fault(error)}", where=str(path), fix=fix) from None
