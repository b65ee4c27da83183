"""Measures the data package on this machine: tokenizing text to .bin/.idx, building the sample index, and reading
samples.

    python -m benchmarks.data.loader [--documents 100000000] [--sequence-length 2048] [--text-mb 4] [--repeats 5]

Tokenizing: JSONL of this Python's standard library, in one process, with a tokenizer of each kind. In alternation, the
tokenizer's library alone encodes the same texts in memory (`encode` of tokenizers and of sentencepiece), without
reading or writing. Index: document lengths 1 … 1999 in memory (4 bytes per document), one epoch's index built with all
cores of this process, then random lookups. Loader: a real .bin/.idx in a temporary directory, with random samples read
in the same way as by the training loop.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import parse_arguments
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.inputs import cut
from frontier_llm.data.loader import Batches
from frontier_llm.data.native import call
from frontier_llm.data.samples import BLOCK, DocumentSamples
from frontier_llm.data.tokenize import ShardWork, TokenizeOptions, make_part
from frontier_llm.data.tokenizer import train_huggingface, train_sentencepiece


def bench_index(documents: int, sequence_length: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 2000, documents, dtype=np.int32)
    prefix = np.empty(-(-documents // BLOCK) + 1, np.uint64)
    pointers = np.zeros(documents, np.int64)  # lookups only copy the pointers
    threads = len(os.sched_getaffinity(0))
    started_s = time.perf_counter()
    call(
        "fl_build",
        lengths,
        None,
        documents,
        1,
        BLOCK,
        threads,
        prefix,
    )
    build_s = time.perf_counter() - started_s
    assert int(prefix[-1]) == int(lengths.sum(dtype=np.int64))
    out = np.empty((4, sequence_length + 1), np.int64)
    places = generator.integers(0, int(prefix[-1]) - sequence_length - 1, 2000)
    started_s = time.perf_counter()
    for place in places.tolist():
        call(
            "fl_pieces",
            lengths,
            None,
            pointers,
            documents,
            1,
            BLOCK,
            prefix,
            place,
            sequence_length + 1,
            *out,
        )
    lookup_s = time.perf_counter() - started_s
    return {
        "documents": documents,
        "threads": threads,
        "build_s": build_s,
        "documents_per_s": documents / build_s,
        "billion_documents_s": 1e9 / (documents / build_s),
        "index_bytes_per_document": prefix.nbytes / documents,
        "lookup_us": lookup_s / len(places) * 1e6,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2,
    }


def bench_tokenize(text_mb: int, repeats: int) -> dict[str, dict[str, float]]:
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        if sum(map(len, texts)) > text_mb * 1e6:
            break
    size_mb = sum(len(text.encode()) for text in texts) / 1e6
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "text.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        pieces = tuple(cut(source, "file", 1 << 40))
        for kind, train in (("tokenizer.json", train_huggingface), ("tokenizer.model", train_sentencepiece)):
            codec = train(iter(texts), Path(directory) / kind, 4096)
            job = ShardWork(
                pieces,
                f"{directory}/part",
                codec.name,
                codec.digest,
                TokenizeOptions(),
            )
            make_part(job)
            alone = codec._model.encode
            ours_s = []
            theirs_s = []
            for _ in range(repeats):
                started_s = time.perf_counter()
                make_part(job)
                ours_s.append(time.perf_counter() - started_s)
                started_s = time.perf_counter()
                for text in texts:
                    alone(text)
                theirs_s.append(time.perf_counter() - started_s)
            results[kind] = {
                "ours_mb_per_s": size_mb / statistics.median(ours_s),
                "library_alone_mb_per_s": size_mb / statistics.median(theirs_s),
                "ours_to_library": statistics.median(
                    theirs / ours for ours, theirs in zip(ours_s, theirs_s, strict=True)
                ),
            }
    return results


def bench_loader(sequence_length: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        with IndexedWriter(Path(directory) / "d", "u2") as writer:
            for length in generator.integers(1, 2000, 20000).tolist():
                writer.add_document(generator.integers(0, 50000, length, dtype=np.uint16))
        samples = DocumentSamples(IndexedDataset(Path(directory) / "d"), sequence_length, key=1)
        batches = Batches(
            samples,
            8,
            8,
            vocab_size=65536,
            read_ahead=0,
        )
        batches.microbatch(0, 0)
        started_s = time.perf_counter()
        for step in range(1, 251):
            batches.microbatch(step, 0)
        elapsed_s = time.perf_counter() - started_s
    return {"samples_per_s": 2000 / elapsed_s, "tokens_per_s": 2000 * sequence_length / elapsed_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--text-mb", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    args = parse_arguments(parser, smoke=["--documents", "10000", "--text-mb", "1", "--repeats", "1"])
    results = {
        "tokenize": bench_tokenize(args.text_mb, args.repeats),
        "index": bench_index(args.documents, args.sequence_length),
        "loader": bench_loader(args.sequence_length),
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
