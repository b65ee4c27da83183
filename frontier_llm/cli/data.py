"""`frontier-llm data tokenizer|tokenize|import|index|inspect|stdlib`: from text to a dataset that `train` reads."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from frontier_llm import log
from frontier_llm.cli.arguments import add_action, add_json, add_run, dataset_prefix, examples, natural, positive
from frontier_llm.units import printable


def add_parser(subparsers: Any) -> None:
    """Add the `data` command and its subcommands to an argparse subparsers object."""
    data = subparsers.add_parser(
        "data",
        help="train tokenizers, tokenize text, inspect datasets",
        description="From text, or tokens in another format, to the .bin/.idx datasets that train reads (Megatron's format).",
        epilog=examples(
            "frontier-llm data tokenizer books/ --output books.model --vocab-size 16000",
            "frontier-llm data tokenize books/ --tokenizer books.model --output data/books",
            "frontier-llm data inspect data/books",
        ),
    )
    commands = data.add_subparsers(dest="data_command", required=True, metavar="ACTION")

    tokenizer = add_action(commands, "tokenizer", "train a tokenizer on text files")
    _inputs(tokenizer)
    tokenizer.add_argument("--output", required=True, metavar="FILE", help="NAME.model (sentencepiece) or NAME.json (Hugging Face)")
    tokenizer.add_argument("--vocab-size", type=positive, default=32000, metavar="N", help="ids (default: 32000)")
    tokenizer.add_argument("--sample-mib", type=positive, default=64, metavar="N", help="MiB of text to train on (default: 64)")
    _text_options(tokenizer)

    tokenize = add_action(commands, "tokenize", "make PREFIX.bin/.idx from text; run it again to resume")
    _inputs(tokenize)
    tokenize.add_argument("--output", required=True, type=dataset_prefix, metavar="PREFIX", help="path without .bin/.idx")
    tokenize.add_argument("--tokenizer", required=True, help="a .model or tokenizer.json file, its directory, or `bytes`")
    tokenize.add_argument("--workers", type=positive, metavar="N", help="processes (default: one per core)")
    tokenize.add_argument("--shard-mib", type=positive, default=32, metavar="N", help="MiB of input per resumable part (default: 32)")
    tokenize.add_argument("--overwrite", action="store_true", help="replace a dataset that was made from other inputs")
    add_json(tokenize)
    _text_options(tokenize)

    importer = add_action(commands, "import", "make PREFIX.bin/.idx from tokens: MDS, OLMo .npy, nanoGPT .bin")
    importer.add_argument("inputs", nargs="+", metavar="INPUT", help="files, joined in this order, or directories of .mds/.npy/.bin")
    importer.add_argument("--output", required=True, type=dataset_prefix, metavar="PREFIX", help="path without .bin/.idx")
    importer.add_argument("--tokenizer", required=True, help="the one that made the tokens")
    importer.add_argument("--dtype", choices=("uint16", "uint32", "int32", "int64"), help="of files without a header, of MDS bytes columns")
    _bound(importer)
    importer.add_argument("--column", default="tokens", metavar="NAME", help="MDS column (default: tokens)")

    add_run(add_action(commands, "index", "build a run's sample indices ahead of it, without its ranks"))

    inspect = add_action(commands, "inspect", "counts, token histogram and decoded samples of a dataset; checks all of its index")
    inspect.add_argument("prefix", type=dataset_prefix, metavar="PREFIX", help="path without .bin/.idx")
    inspect.add_argument("--tokenizer", help="to decode with (default: the one that made the data)")
    inspect.add_argument("--samples", type=natural, default=3, metavar="N", help="documents to show (default: 3)")
    inspect.add_argument("--top", type=natural, default=20, metavar="N", help="most frequent tokens to show (default: 20)")
    add_json(inspect)

    stdlib = add_action(commands, "stdlib", "tokenizer and datasets from this Python's own standard library; no download")
    stdlib.add_argument("directory", metavar="DIR", help="where to write them")
    stdlib.add_argument("--vocab-size", type=positive, default=4096, metavar="N", help="ids (default: 4096)")
    stdlib.add_argument("--tokenizer", help="use this one, e.g. `bytes`, instead of training one")
    stdlib.add_argument("--workers", type=positive, metavar="N", help="processes (default: one per core)")
    add_json(stdlib)


def _inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files or directories: text, JSONL(.gz/.zst), parquet, Mosaic MDS")


def _text_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text-key", default="text", metavar="NAME", help="JSON field or parquet column (default: text)")
    parser.add_argument(
        "--documents", choices=("file", "line"), default="file", help="a document is a whole text file, or each line (default: file)"
    )
    parser.add_argument("--skip-damaged", action="store_true", help="leave damaged inputs out and name them, instead of stopping")
    _bound(parser)


def _bound(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-mib", type=positive, default=128, metavar="N", help="of a line or an unpacked MDS shard (default: 128)")


def run(args: argparse.Namespace) -> int:
    """Run one subcommand; errors are FrontierErrors."""
    commands = {
        "tokenizer": _tokenizer, "tokenize": _tokenize, "import": _import, "index": _index, "inspect": _inspect, "stdlib": _stdlib,
    }  # fmt: skip
    return commands[args.data_command](args)


def _tokenizer(args: argparse.Namespace) -> int:
    from frontier_llm.data.tokenize import TokenizeOptions
    from frontier_llm.data.tokenizer import train_huggingface, train_sentencepiece
    from frontier_llm.data.training_text import training_text
    from frontier_llm.errors import DataError

    if not args.output.endswith((".model", ".json")):
        raise DataError(f"--output {args.output} names no kind", fix="end it in .model (sentencepiece) or .json (Hugging Face)")
    train = train_sentencepiece if args.output.endswith(".model") else train_huggingface
    options = TokenizeOptions(args.text_key, args.documents, args.skip_damaged, max_bytes=args.max_mib << 20)
    texts = training_text(args.inputs, options, args.sample_mib << 20)
    trained = train(texts, args.output, args.vocab_size, args.sample_mib << 20)
    if trained.vocab_size < args.vocab_size:
        log.warn(f"the text yields no more than {trained.vocab_size} of the {args.vocab_size} ids; set model.vocab_size accordingly")
    if trained.vocab_size > args.vocab_size:
        log.warn(f"{args.vocab_size} ids are too few for every byte and the end of a document: it has {trained.vocab_size}")
    print(f"{trained.name}: {trained.vocab_size} ids, end of document {trained.eod}, sha256 {trained.digest}")
    return 0


def _tokenize(args: argparse.Namespace) -> int:
    from frontier_llm.data.tokenize import TokenizeOptions, tokenize

    options = TokenizeOptions(args.text_key, args.documents, args.skip_damaged, args.shard_mib << 20, args.max_mib << 20)
    meta = tokenize(args.inputs, args.output, args.tokenizer, options, args.workers, args.overwrite)
    print(json.dumps(asdict(meta), indent=1) if args.json else f"{args.output}: {meta.documents} documents, {meta.tokens} tokens")
    return 0


def _import(args: argparse.Namespace) -> int:
    from frontier_llm.data.importing import import_tokens

    meta = import_tokens(args.inputs, args.output, args.tokenizer, args.dtype, args.column, args.max_mib << 20)
    print(f"{args.output}: {meta.documents} documents, {meta.tokens} tokens")
    return 0


def _index(args: argparse.Namespace) -> int:
    from frontier_llm.config import load_run
    from frontier_llm.data.loader import data_problems, prepare_indices
    from frontier_llm.errors import DataError

    run_config = load_run(args.run, args.overrides)
    problems = data_problems(run_config)
    if problems:
        raise DataError(problems)
    prepare_indices(run_config)
    print("the sample indices are ready")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from frontier_llm.data.inspect import inspect

    report = inspect(args.prefix, args.tokenizer, args.samples, args.top)
    if args.json:
        json.dump(report, sys.stdout, indent=1)
        print()
        return 0
    _show(report)
    return 0


def _show(report: dict[str, Any]) -> None:
    """Tables for people."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    facts = Table("", "", title=escape(printable(report["prefix"])), show_header=False)
    for key, value in report.items():
        if key not in ("prefix", "top_tokens", "samples"):
            text = "  ".join(f"{name} {size}" for name, size in value.items()) if isinstance(value, dict) else str(value)
            text = f"{value:.4f}" if isinstance(value, float) else text
            facts.add_row(key.replace("_", " "), escape(printable(text)))
    console.print(facts)
    if not report["tokens"]:
        return
    frequent = Table("id", "text", "count", "share", "", title="most frequent tokens")
    largest = report["top_tokens"][0]["count"]
    for token in report["top_tokens"]:
        share = f"{token['count'] / report['tokens']:.2%}"
        text = "" if token["text"] is None else escape(repr(token["text"]))
        frequent.add_row(str(token["id"]), text, str(token["count"]), share, "█" * max(1, round(20 * token["count"] / largest)))
    console.print(frequent)
    for sample in report["samples"]:
        body = sample["text"] if sample["text"] is not None else " ".join(map(str, sample["first_ids"]))
        console.rule(f"document {sample['document']}, {sample['tokens']} tokens")
        console.print(escape(printable(body)), highlight=False)


def _stdlib(args: argparse.Namespace) -> int:
    from frontier_llm.data.stdlib_corpus import prepare

    corpus = prepare(args.directory, args.vocab_size, workers=args.workers, tokenizer=args.tokenizer)
    if args.json:
        print(json.dumps(asdict(corpus), indent=1, default=str))
        return 0
    for split, meta in ((corpus.train, corpus.train_meta), (corpus.validation, corpus.validation_meta)):
        print(f"{split}: {meta.documents} documents, {meta.tokens} tokens, {meta.text_bytes} bytes of text")
    print(f"train with: data.tokenizer={corpus.tokenizer} data.train={corpus.train} data.validation={corpus.validation}")
    return 0
