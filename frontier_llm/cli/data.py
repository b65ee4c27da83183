"""`frontier-llm data tokenizer|tokenize|import|index|inspect|check|plan|show|stdlib`: make and inspect datasets that
`train` reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frontier_llm.cli.arguments import (
    JSON,
    Command,
    command,
    dataset_prefix,
    natural,
    option,
    positive,
    run_options,
    show,
)
from frontier_llm.cli.data_plan import plan, show_step
from frontier_llm.cli.data_text import BOUND, OVERWRITE, tokenize_text, train_tokenizer
from frontier_llm.tables import aligned

if TYPE_CHECKING:
    from frontier_llm.data.ids import IdScan


@command(
    option(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=".mds, .npy or .bin files (joined in this order), or directories or URLs with such files",
    ),
    option(
        "--output",
        required=True,
        type=dataset_prefix,
        metavar="PREFIX",
        help="path without .bin/.idx",
    ),
    option("--tokenizer", required=True, help="tokenizer that made the tokens"),
    option(
        "--dtype",
        choices=("uint16", "uint32", "int32", "int64"),
        help="type of the numbers in files without a header and in bytes columns of MDS",
    ),
    BOUND,
    option(
        "--column",
        default="tokens",
        metavar="NAME",
        help="MDS column (default: tokens)",
    ),
    OVERWRITE,
    line="make PREFIX.bin/.idx from tokens: MDS, OLMo .npy, nanoGPT .bin",
    examples=("frontier-llm data import shards/ --tokenizer bytes --output data/mine",),
)
def _import(args: argparse.Namespace) -> int:
    from frontier_llm.data.importing import import_tokens

    bound = args.max_mib << 20
    meta = import_tokens(
        inputs=args.inputs,
        prefix=args.output,
        tokenizer=args.tokenizer,
        dtype=args.dtype,
        column=args.column,
        max_bytes=bound,
        overwrite=args.overwrite,
    )
    print(f"{args.output}: {meta.documents} documents, {meta.tokens} tokens")
    return 0


@command(
    *run_options(),
    line="build the sample indices of a run before the run starts, in one process",
    examples=("frontier-llm data index pretrain_22b",),
)
def _index(args: argparse.Namespace) -> int:
    from frontier_llm.config import load_run
    from frontier_llm.data.loader import data_problems, prepare_indices
    from frontier_llm.data.position import START
    from frontier_llm.data.recorded import as_it_stands, recorded_position
    from frontier_llm.errors import DataError

    config = as_it_stands(load_run(args.run, args.overrides))
    position = recorded_position(Path(config.train.run_dir)) or START
    if problems := data_problems(config, position):
        raise DataError(problems)
    prepare_indices(config, position)
    print("the sample indices are ready")
    return 0


@command(
    option(
        "prefix",
        type=dataset_prefix,
        metavar="PREFIX",
        help="path without .bin/.idx",
    ),
    option("--tokenizer", help="tokenizer for decoding (default: the one that made the data)"),
    option(
        "--samples",
        type=natural,
        default=3,
        metavar="N",
        help="documents to show (default: 3)",
    ),
    option(
        "--top",
        type=natural,
        default=20,
        metavar="N",
        help="most frequent tokens to show (default: 20)",
    ),
    option(
        "--sequence-length",
        type=natural,
        default=0,
        metavar="N",
        help="also count the tokens that are separated from the beginning of their document if samples have N tokens",
    ),
    JSON,
    line="print counts, a token histogram and decoded samples of a dataset, and check its complete index",
    examples=("frontier-llm data inspect data/books --samples 5",),
)
def _inspect(args: argparse.Namespace) -> int:
    from frontier_llm.data.inspect import inspect

    report = inspect(args.prefix, args.tokenizer, args.samples, args.top, sequence_length=args.sequence_length)
    show(args, report, lambda: "\n".join(_tables(report)))
    return 0


@command(
    option(
        "prefixes",
        nargs="+",
        type=dataset_prefix,
        metavar="PREFIX",
        help="paths without .bin/.idx",
    ),
    option(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="number of ids in the model's vocabulary (default: that of the tokenizer in the dataset's record)",
    ),
    JSON,
    line="read every token and index entry of datasets; report the first id that is outside the vocabulary",
    examples=("frontier-llm data check data/books data/news --vocab-size 32000",),
)
def _check(args: argparse.Namespace) -> int:
    """Return exit code 1 if an id is outside of its vocabulary."""
    from frontier_llm.cli.arguments import ProgressBar
    from frontier_llm.data.ids import scan

    progress = ProgressBar()
    scans = [scan(prefix, args.vocab_size, progress.on(prefix, "tokens")) for prefix in args.prefixes]
    progress.close()
    show(args, [asdict(one) for one in scans], lambda: "\n".join(_scan_lines(scans)))
    return 0 if all(one.is_sound for one in scans) else 1


def _scan_lines(scans: Sequence[IdScan]) -> Iterator[str]:
    rows = [
        (
            one.prefix,
            f"{one.documents:,}",
            f"{one.tokens:,}",
            *map(_known, (one.smallest_id, one.largest_id, one.vocab_size)),
        )
        for one in scans
    ]
    yield aligned(("dataset", ">documents", ">tokens", ">smallest id", ">largest id", ">vocabulary"), rows)
    for one in scans:
        if one.outside is not None:
            yield (
                f"{one.prefix}: {one.outside}, which is outside the vocabulary of {_known(one.vocab_size)}; train with "
                f"the tokenizer that made the data"
            )


def _known(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _tables(report: dict[str, Any]) -> Iterator[str]:
    facts = (
        (key.replace("_", " "), _words(value))
        for key, value in report.items()
        if key not in ("prefix", "top_tokens", "samples")
    )
    yield aligned(("dataset", report["prefix"]), facts)
    if tokens := report["top_tokens"]:
        counts = [token["count"] for token in tokens]
        texts = ["" if token["text"] is None else repr(token["text"]) for token in tokens]
        shares = [f"{count / report['tokens']:.2%}" for count in counts]
        bars = ["█" * max(1, round(20 * count / counts[0])) for count in counts]
        yield "most frequent tokens"
        rows = zip(
            (token["id"] for token in tokens),
            texts,
            counts,
            shares,
            bars,
            strict=True,
        )
        yield aligned((">id", "text", ">count", ">share", ""), rows, indent="  ")
    for sample in report["samples"]:
        body = sample["text"] if sample["text"] is not None else " ".join(map(str, sample["first_ids"]))
        yield f"--- document {sample['document']}, {sample['tokens']} tokens\n{body}"


def _words(value: Any) -> str:
    words = [f"{name} {size}" for name, size in value.items()] if isinstance(value, dict) else [value]
    return "  ".join(f"{word:.4f}" if isinstance(word, float) else str(word) for word in words)


@command(
    option("directory", metavar="DIR", help="directory to write to"),
    option(
        "--vocab-size",
        type=positive,
        default=4096,
        metavar="N",
        help="ids (default: 4096)",
    ),
    option("--tokenizer", help="use this tokenizer, e.g. `bytes`, instead of training one"),
    option(
        "--workers",
        type=positive,
        metavar="N",
        help="processes (default: one per core)",
    ),
    JSON,
    line="make a tokenizer and datasets from this Python's own standard library, without a download",
    examples=("frontier-llm data stdlib data/stdlib --vocab-size 4096",),
)
def _stdlib(args: argparse.Namespace) -> int:
    from frontier_llm.data.stdlib_corpus import prepare

    corpus = prepare(args.directory, args.vocab_size, workers=args.workers, tokenizer=args.tokenizer)
    sets = ((corpus.train, corpus.train_meta), (corpus.validation, corpus.validation_meta))
    lines = [
        f"{split}: {meta.documents} documents, {meta.tokens} tokens, {meta.text_bytes} bytes of text"
        for split, meta in sets
    ]
    lines.append(
        f"train with: data.tokenizer={corpus.tokenizer} data.train={corpus.train} data.validation={corpus.validation}"
    )
    show(args, asdict(corpus), lambda: "\n".join(lines))
    return 0


data = Command(
    about="From text, or tokens in another format, to the .bin/.idx datasets that train reads (Megatron's format).",
    examples=(
        "frontier-llm data tokenizer books/ --output books.model --vocab-size 16000",
        "frontier-llm data tokenize books/ --tokenizer books.model --output data/books",
        "frontier-llm data inspect data/books",
    ),
    actions={
        "tokenizer": train_tokenizer,
        "tokenize": tokenize_text,
        "import": _import,
        "index": _index,
        "inspect": _inspect,
        "check": _check,
        "plan": plan,
        "show": show_step,
        "stdlib": _stdlib,
    },
)
