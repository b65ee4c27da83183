"""How fast the data room is on this machine: documents per second of the sample index, samples per second of the loader.

    python scripts/bench_data.py [--documents 100000000] [--sequence-length 2048]

Index: document lengths 1 … 1999 in memory (4 bytes per document), one epoch's index built with all cores of this process, then
random lookups. Loader: a real .bin/.idx in a temporary directory, random samples read as the training loop reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from frontier_llm.data.indexed import IndexedDataset, IndexedWriter
from frontier_llm.data.loader import Batches
from frontier_llm.data.native import call
from frontier_llm.data.samples import BLOCK, DocumentSamples


def bench_index(documents: int, sequence_length: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 2000, documents, dtype=np.int32)
    prefix = np.empty(-(-documents // BLOCK) + 1, np.uint64)
    pointers = np.zeros(documents, np.int64)  # lookups only copy them
    threads = len(os.sched_getaffinity(0))
    started_s = time.perf_counter()
    call("fl_build", lengths, None, documents, 1, BLOCK, threads, prefix)
    build_s = time.perf_counter() - started_s
    assert int(prefix[-1]) == int(lengths.sum(dtype=np.int64))
    out = np.empty((4, sequence_length + 1), np.int64)
    places = generator.integers(0, int(prefix[-1]) - sequence_length - 1, 2000)
    started_s = time.perf_counter()
    for place in places.tolist():
        call("fl_pieces", lengths, None, pointers, documents, 1, BLOCK, prefix, place, sequence_length + 1, *out)
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


def bench_loader(sequence_length: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        with IndexedWriter(Path(directory) / "d", "u2") as writer:
            for length in generator.integers(1, 2000, 20000).tolist():
                writer.add_document(generator.integers(0, 50000, length, dtype=np.uint16))
        samples = DocumentSamples(IndexedDataset(Path(directory) / "d"), sequence_length, seed=1)
        batches = Batches(samples, 8, 8, vocab_size=65536, read_ahead=0)
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
    args = parser.parse_args()
    print(json.dumps({"index": bench_index(args.documents, args.sequence_length), "loader": bench_loader(args.sequence_length)}, indent=1))


if __name__ == "__main__":
    main()
