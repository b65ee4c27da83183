"""`frontier-llm data tokenizer|tokenize`: train a tokenizer on text, and make datasets from text."""

from __future__ import annotations

import argparse
import subprocess
from dataclasses import asdict
from pathlib import Path

from frontier_llm import log
from frontier_llm.cli.arguments import JSON, command, dataset_prefix, option, positive, show
from frontier_llm.units import plural

INPUTS = option(
    "inputs",
    nargs="+",
    metavar="INPUT",
    help="files, directories, URLs, dataset://NAME: text, JSONL(.gz/.zst), parquet, MDS",
)
BOUND = option(
    "--max-mib",
    type=positive,
    default=128,
    metavar="N",
    help="largest accepted line or unpacked MDS shard, in MiB (default: 128)",
)
OVERWRITE = option("--overwrite", action="store_true", help="replace an existing dataset")
TEXT_OPTIONS = (
    option(
        "--text-key",
        default="text",
        metavar="NAME",
        help="JSON field or parquet column (default: text)",
    ),
    option(
        "--documents",
        choices=("file", "line"),
        default="file",
        help="a document is a whole text file, or each line (default: file)",
    ),
    option(
        "--skip-damaged",
        action="store_true",
        help="skip damaged inputs and list them, instead of stopping at the first",
    ),
    BOUND,
)


@command(
    INPUTS,
    option(
        "--output",
        required=True,
        metavar="FILE",
        help="NAME.model (sentencepiece) or NAME.json (Hugging Face)",
    ),
    option(
        "--vocab-size",
        type=positive,
        default=32000,
        metavar="N",
        help="ids (default: 32000)",
    ),
    option(
        "--sample-mib",
        type=positive,
        default=64,
        metavar="N",
        help="MiB of text to train on (default: 64)",
    ),
    option(
        "--overwrite",
        action="store_true",
        help="replace an existing tokenizer of that name, even if datasets were made with it",
    ),
    JSON,
    *TEXT_OPTIONS,
    line="train a tokenizer on text files",
    examples=("frontier-llm data tokenizer books/ --output books.model --vocab-size 16000",),
)
def train_tokenizer(args: argparse.Namespace) -> int:
    """Train a tokenizer. A different tokenizer with the same name is not replaced, unless --overwrite is given."""
    from frontier_llm.data.tokenize import TokenizeOptions, training_text
    from frontier_llm.data.tokenizer import train_huggingface, train_sentencepiece
    from frontier_llm.errors import DataError

    if not args.output.endswith((".model", ".json")):
        raise DataError(
            f"--output {args.output} does not end in .model or .json, so the kind of tokenizer is unknown",
            fix="end it in .model (sentencepiece) or .json (Hugging Face)",
        )
    train = train_sentencepiece if args.output.endswith(".model") else train_huggingface
    options = TokenizeOptions(args.text_key, args.documents, args.skip_damaged, max_bytes=args.max_mib << 20)
    texts = training_text(args.inputs, options, args.sample_mib << 20)
    output = Path(args.output)
    beside = output.with_stem(f"{output.stem}.new") if output.exists() and not args.overwrite else output
    trained = train(texts, beside, args.vocab_size, args.sample_mib << 20)
    if beside != output:
        if beside.read_bytes() != output.read_bytes():
            fix = f"use the new tokenizer, which was written to {beside}, or replace the old one with --overwrite"
            raise DataError(
                "already contains another tokenizer, and datasets may have been made with it",
                where=args.output,
                fix=fix,
            )
        beside.unlink()
    if trained.vocab_size < args.vocab_size:
        log.warn(
            f"the text gives only {trained.vocab_size} of the {args.vocab_size} ids; set model.vocab_size accordingly"
        )
    if trained.vocab_size > args.vocab_size:
        log.warn(
            f"{args.vocab_size} ids are too few for every byte and the end of a document: the tokenizer has "
            f"{trained.vocab_size}"
        )
    content = {
        "tokenizer": str(output),
        "vocab_size": trained.vocab_size,
        "end_of_document": trained.eod,
        "sha256": trained.digest,
    }
    text = f"{output}: {trained.vocab_size} ids, end of document {trained.eod}, sha256 {trained.digest}"
    show(args, content, lambda: text)
    return 0


@command(
    INPUTS,
    option(
        "--output",
        required=True,
        type=dataset_prefix,
        metavar="PREFIX",
        help="path without .bin/.idx",
    ),
    option(
        "--tokenizer",
        required=True,
        help="a .model or tokenizer.json file, its directory, hf://OWNER/NAME, or `bytes`",
    ),
    option(
        "--workers",
        type=positive,
        metavar="N",
        help="processes (default: one per core)",
    ),
    option(
        "--shard-mib",
        type=positive,
        default=32,
        metavar="N",
        help="MiB of input per resumable part (default: 32)",
    ),
    OVERWRITE,
    option(
        "--prompt-key",
        metavar="NAME",
        help="JSON field that comes before the text; its tokens are read but do not count in the loss",
    ),
    option(
        "--in-job",
        action="store_true",
        help="in a job's batch shell: every node of the job tokenizes some of the parts (slurm/tokenize.sbatch)",
    ),
    # used only by the processes that --in-job starts
    option("--job-step", choices=("plan", "share"), help=argparse.SUPPRESS),
    JSON,
    *TEXT_OPTIONS,
    line="make PREFIX.bin/.idx from text; run it again to resume",
    examples=("frontier-llm data tokenize a.jsonl.gz --tokenizer books.model --output data/a",),
)
def tokenize_text(args: argparse.Namespace) -> int:
    """Under a launcher with several tasks, each task makes a part of the shards, and does not join them."""
    from frontier_llm.data.tokenize import TokenizeOptions, make_dataset, make_share, missing_dataset, plan_dataset
    from frontier_llm.run.rank_env import discover

    if args.in_job:
        return _tokenize_in_job(args)
    options = TokenizeOptions(
        text_key=args.text_key,
        documents=args.documents,
        skip_damaged=args.skip_damaged,
        shard_bytes=args.shard_mib << 20,
        prompt_key=args.prompt_key,
        max_bytes=args.max_mib << 20,
    )
    plan = plan_dataset(args.inputs, args.output, args.tokenizer, options)
    if args.job_step == "plan":
        print(missing_dataset(plan, args.overwrite) or "")
        return 0
    place = discover()
    if place is not None and (place.world_size > 1 or args.job_step == "share"):
        parts = make_share(plan, args.workers, args.overwrite, index=place.rank, count=place.world_size)
        log.info(f"{args.output}: {place.hostname} has finished its share, {plural(parts, 'part')}")
        return 0
    meta = make_dataset(plan, args.workers, args.overwrite)
    show(args, asdict(meta), lambda: f"{args.output}: {meta.documents} documents, {meta.tokens} tokens")
    return 0


def _tokenize_in_job(args: argparse.Namespace) -> int:
    """Cut the inputs into shards here, tokenize the shards on every node of the job, and join the results here. Return
    the exit code.

    The Python of the ranks runs each step, because this process's Python may have no library of the tokenizer.
    """
    from frontier_llm.cluster.node_tasks import run_here, run_on_nodes
    from frontier_llm.data.tokenize import shares_of

    action = args.typed[:2]
    words = [word for word in args.typed[2:] if word != "--in-job"]
    planned = run_here([*action, "--job-step=plan", *words], stdout=subprocess.PIPE)
    if planned.returncode != 0:
        return planned.returncode
    if digest := planned.stdout.strip():
        with shares_of(args.output, digest):
            run_on_nodes([*action, "--job-step=share", *words])
    return run_here([*action, *words]).returncode
