"""What a step of a run read: each sample's source, documents and text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from frontier_llm.config import RunConfig
from frontier_llm.data.best_fit import PackedSamples
from frontier_llm.data.inspect import recorded_tokenizer
from frontier_llm.data.loader import open_stream
from frontier_llm.data.meta import read_meta
from frontier_llm.data.position import SYNTHETIC, Position
from frontier_llm.data.samples import DocumentSamples
from frontier_llm.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class ReadSample:
    """One sample of a run."""

    number: int  # in the run, from 0
    source: str
    index: int  # in its stream
    sequence_length: int
    documents: tuple[int, ...]
    text: str | None  # its beginning; None without the tokenizer that made the data


def samples_of_step(
    run: RunConfig, position: Position, global_batch: int, most: int, characters: int
) -> Iterator[ReadSample]:
    """The first `most` samples of the step that follows `position`. Raises DataError for data that cannot be read."""
    codecs: dict[str, Tokenizer | None] = {}
    for offset in range(min(most, global_batch)):
        place, index = position.sample(offset)
        stream = position.current[place]
        samples = open_stream(run, stream)
        documents: tuple[int, ...] = ()
        text = None
        if isinstance(samples, DocumentSamples | PackedSamples):
            codec = codecs.setdefault(stream.path, _codec(stream.path))
            parts = list(samples.parts(index))
            documents = tuple(samples.dataset.document_at(start) for start, _ in parts)
            if codec is not None:
                start, length = parts[0]
                text = codec.decode(samples.dataset.read(start, min(length, characters)).tolist())[:characters]
        source = stream.path if stream.dataset != SYNTHETIC else SYNTHETIC
        yield ReadSample(position.samples + offset, source, index, stream.sequence_length, documents, text)


def _codec(prefix: str) -> Tokenizer | None:
    meta = read_meta(prefix)
    spec = recorded_tokenizer(prefix, meta.tokenizer) if meta is not None else None
    if meta is None or spec is None:
        return None
    codec = load_tokenizer(spec)
    return codec if codec.digest == meta.tokenizer_digest else None
