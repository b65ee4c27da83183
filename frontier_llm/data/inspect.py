"""Describe a dataset (counts, lengths, frequent tokens, beginnings of documents) and the samples of a run's step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from frontier_llm.config import RunConfig
from frontier_llm.data.best_fit import PackedSamples
from frontier_llm.data.indexed import READ_ONLY, IndexedDataset, bin_path
from frontier_llm.data.loader import open_stream
from frontier_llm.data.meta import read_meta
from frontier_llm.data.position import SYNTHETIC, Position, order_key
from frontier_llm.data.samples import DocumentSamples
from frontier_llm.data.tokenizer import Tokenizer, load_tokenizer
from frontier_llm.errors import DataError

CHUNK_TOKENS = 1 << 24
SAMPLE_CHARACTERS = 200  # characters of a document that are shown
PERCENTILES = (0, 25, 50, 75, 99, 100)


def inspect(
    prefix: str,
    tokenizer: str | None = None,
    samples: int = 3,
    top: int = 20,
    sequence_length: int = 0,
) -> dict[str, Any]:
    """Return a JSON-ready description of a dataset. Every entry of the index is checked.

    If `tokenizer` is None, the tokenizer that the dataset's record names is used, if it still exists. With a
    `sequence_length`, the results of `truncation` and `best_fit` are included. Raises DataError for damage, and for a
    tokenizer that did not make the data.
    """
    dataset = IndexedDataset(prefix, scan=True)
    dataset.check_token_ids()
    meta = read_meta(prefix)
    spec = tokenizer or (recorded_tokenizer(prefix, meta.tokenizer) if meta is not None else None)
    codec = load_tokenizer(spec) if spec else None
    if codec is not None and meta is not None and codec.digest != meta.tokenizer_digest:
        raise DataError(
            f"is not the tokenizer of {prefix}, which was made with {meta.tokenizer}",
            where=codec.name,
            fix=f"give --tokenizer {meta.tokenizer}",
        )
    counts = _histogram(dataset)
    shares = counts[counts > 0] / max(dataset.token_count, 1)
    order = np.argsort(-counts, kind="stable")[:top]
    frequent = [int(token) for token in order if counts[token]]
    lengths = np.diff(dataset.document_starts())
    count = dataset.document_count
    documents = sorted({number * count // samples for number in range(samples)}) if count else []
    report: dict[str, Any] = {
        "prefix": prefix,
        "dtype": str(dataset.dtype),
        "documents": dataset.document_count,
        "sequences": dataset.sequence_count,
        "tokens": dataset.token_count,
        "bin_bytes": bin_path(prefix).stat().st_size,
        "distinct_tokens": int((counts > 0).sum()),
        "largest_token": int(np.flatnonzero(counts)[-1]) if dataset.token_count else None,
        "unigram_entropy_bits": float(-(shares * np.log2(shares)).sum()),
        "document_lengths": {f"p{p}": int(np.percentile(lengths, p)) for p in PERCENTILES} if lengths.size else {},
        "top_tokens": [
            {"id": token, "count": int(counts[token]), "text": codec.decode([token]) if codec else None}
            for token in frequent
        ],
        "samples": [_sample(dataset, document, codec) for document in documents],
    }
    if dataset.modes is not None:
        report["learnt_tokens"] = int(dataset.sequence_lengths[dataset.modes != READ_ONLY].sum(dtype=np.int64))
    if sequence_length:
        report["truncated"] = truncation(lengths, sequence_length)
        report["best_fit"] = best_fit(dataset, lengths, sequence_length)
    if meta is not None:
        report |= {
            "tokenizer": meta.tokenizer,
            "tokenizer_digest": meta.tokenizer_digest,
            "vocab_size": meta.vocab_size,
            "eod": meta.eod,
            "damaged": meta.damaged,
        }
        if meta.text_bytes:  # 0 for imported tokens, whose text is not known
            report |= {"text_bytes": meta.text_bytes, "bytes_per_token": meta.bytes_per_token}
            report["bits_per_byte_of_one_nat"] = 1 / (math.log(2) * meta.bytes_per_token)
    return report


def truncation(lengths: np.ndarray[Any, Any], sequence_length: int) -> dict[str, Any]:
    """Return the number of tokens whose sample does not contain the beginning of their document, for this sequence
    length.

    Training concatenates documents and cuts every S tokens. All places of a cut are equally likely. Token p of a
    document is therefore separated from the beginning with probability p / S (`expected_tokens`). The tokens after the
    first S tokens of a document are separated from the beginning with any packing (`unavoidable_tokens`).
    """
    S = sequence_length
    lengths = lengths.astype(np.float64)
    total = max(float(lengths.sum()), 1.0)
    within = np.minimum(lengths, S)
    beyond = np.maximum(lengths - S, 0.0)
    expected = float((within * (within - 1) / (2 * S) + beyond).sum())
    unavoidable = float(beyond.sum())
    return {
        "sequence_length": S,
        "longer_documents": int((lengths > S).sum()),
        "expected_tokens": round(expected),
        "expected_share": expected / total,
        "unavoidable_tokens": round(unavoidable),
        "unavoidable_share": unavoidable / total,
    }


def best_fit(dataset: IndexedDataset, lengths: np.ndarray[Any, Any], sequence_length: int) -> dict[str, Any]:
    """Return the counts of `truncation` for `data.packing: best-fit`, and its padding.

    Best-fit packing cuts only documents longer than a sequence. The counts are computed for one seed. Other seeds give
    almost the same counts.
    """
    if not dataset.token_count:
        return {}
    samples = PackedSamples(dataset, sequence_length, order_key("best-fit", 0, 0))
    capacity = samples.samples_per_epoch * (sequence_length + 1)
    repeated = samples.piece_count - int((lengths > 0).sum())  # tokens that two pieces share
    padding = capacity - dataset.token_count - repeated
    parted = int(np.maximum(lengths - (sequence_length + 1), 0).sum())
    return {
        "sequences": samples.samples_per_epoch,
        "split_documents": int((lengths > sequence_length + 1).sum()),
        "parted_tokens": parted,
        "parted_share": parted / dataset.token_count,
        "padding_tokens": padding,
        "padding_share": padding / capacity,
    }


def recorded_tokenizer(prefix: str, name: str) -> str | None:
    """Return the path or name of the tokenizer in a dataset's record, or None if it is not available.

    The tokenizer may be at its recorded path, beside the dataset if both were moved, or in the local cache of the
    Hugging Face Hub. The Hub is never contacted, because the record may come from an untrusted source.
    """
    if name.startswith("hf://"):
        from frontier_llm.data.hub import cached_tokenizer

        if find_spec("huggingface_hub") is None or cached_tokenizer(name) is None:
            return None
        return name
    if name == "bytes":
        return name
    candidates = (name, str(Path(prefix).parent / Path(name).name))
    return next((path for path in candidates if Path(path).is_file()), None)


def _histogram(dataset: IndexedDataset) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of occurrences of each id."""
    counts = np.zeros(1, np.int64)
    for start in range(0, dataset.token_count, CHUNK_TOKENS):
        chunk = dataset.tokens[start : start + CHUNK_TOKENS]
        if chunk.min() < 0:
            at = start + int(np.argmin(chunk))
            offset = at * dataset.dtype.itemsize
            raise DataError(
                f"at byte {offset}: token id {chunk.min()} is negative",
                where=str(bin_path(dataset.prefix)),
                fix="tokenize the text again",
            )
        more = np.bincount(chunk, minlength=counts.size)
        more[: counts.size] += counts
        counts = more
    return counts


def _sample(dataset: IndexedDataset, document: int, codec: Tokenizer | None) -> dict[str, Any]:
    tokens = dataset.document(document)
    ids = tokens[:SAMPLE_CHARACTERS].tolist()
    text = codec.decode(ids)[:SAMPLE_CHARACTERS] if codec else None
    return {"document": document, "tokens": tokens.size, "first_ids": ids[:16], "text": text}


@dataclass(frozen=True)
class ReadSample:
    """One sample of a run."""

    number: int  # number of the sample in the run, counted from 0
    source: str
    index: int  # index of the sample in its stream
    sequence_length: int
    documents: tuple[int, ...]
    text: str | None  # first characters of the sample; None without the tokenizer that made the data


def samples_of_step(
    run: RunConfig,
    position: Position,
    global_batch: int,
    most: int,
    characters: int,
) -> Iterator[ReadSample]:
    """Yield the first `most` samples of the step that follows `position`. Raises DataError for unreadable data."""
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
        yield ReadSample(
            number=position.samples + offset,
            source=source,
            index=index,
            sequence_length=stream.sequence_length,
            documents=documents,
            text=text,
        )


def _codec(prefix: str) -> Tokenizer | None:
    meta = read_meta(prefix)
    spec = recorded_tokenizer(prefix, meta.tokenizer) if meta is not None else None
    if meta is None or spec is None:
        return None
    codec = load_tokenizer(spec)
    return codec if codec.digest == meta.tokenizer_digest else None
