"""Text to train a tokenizer on: a fair sample of the inputs, read under the same damage policy as tokenization."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from frontier_llm import log
from frontier_llm.data.documents import DAMAGE_FIX, Damage, read
from frontier_llm.data.inputs import cut, find_inputs
from frontier_llm.data.keys import derive_key
from frontier_llm.data.remote import located
from frontier_llm.data.tokenize import TokenizeOptions
from frontier_llm.errors import DataError

PIECE_BYTES = 1 << 20


def training_text(inputs: Iterable[str | Path], options: TokenizeOptions, limit_bytes: int) -> Iterator[str]:
    """Documents of the inputs; with more than `limit_bytes` of input, from pieces in a fixed pseudo-random order.

    Raises DataError for missing inputs and, unless they are to be skipped, at the first damaged one.
    """
    pieces = [piece for path in find_inputs(inputs) for piece in cut(path, options.documents, PIECE_BYTES)]
    if sum(piece.size_bytes for piece in pieces) > limit_bytes:
        pieces.sort(key=lambda piece: derive_key("training text", located(piece.path).name, piece.start))
    for item in (item for piece in pieces for item in read(piece, options.text_key, options.max_bytes)):
        if not isinstance(item, Damage):
            yield item.text
        elif options.skip_damaged:
            log.warn(f"left out {item.where}: {item.why}")
        else:
            raise DataError(item.why, where=item.where, fix=DAMAGE_FIX)
