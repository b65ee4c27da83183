"""frontier-llm evaluate MODEL: held-out loss, perplexity, bits per byte, and in-context tasks from local files."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import JSON, ProgressBar, command, dataset_prefix, natural, option, positive, show
from frontier_llm.cli.ranks import MODEL_OPTIONS, inference_model, on_ranks, verification
from frontier_llm.errors import ConfigError
from frontier_llm.files import write_atomically
from frontier_llm.tables import aligned
from frontier_llm.units import strict_json

if TYPE_CHECKING:
    from frontier_llm.config import RunConfig
    from frontier_llm.inference.evaluate import TaskResult
    from frontier_llm.inference.heldout import HeldOut
    from frontier_llm.inference.needle import Recall
    from frontier_llm.inference.open import OpenedModel
    from frontier_llm.inference.tasks import Task


@command(
    *MODEL_OPTIONS,
    JSON,
    option(
        "--data",
        type=dataset_prefix,
        action="append",
        metavar="PREFIX",
        help="a .bin/.idx dataset (default: the run's data.validation)",
    ),
    option(
        "--windows",
        type=natural,
        default=0,
        metavar="N",
        help="context windows per dataset, evenly spaced; 0 = all (default)",
    ),
    option(
        "--task",
        action="append",
        metavar="NAME=FILE",
        help="arc_easy, arc_challenge, boolq, hellaswag, piqa, winogrande, wsc273, or any name for a file in LLM "
        "Foundry's format",
    ),
    option(
        "--shots",
        type=natural,
        default=0,
        metavar="N",
        help="solved examples before each question (default: 0)",
    ),
    option(
        "--shots-from",
        action="append",
        metavar="NAME=FILE",
        help="file of a task's solved examples (default: the task's own file)",
    ),
    option(
        "--limit",
        type=natural,
        default=0,
        metavar="N",
        help="questions per task; 0 = all (default)",
    ),
    option(
        "--batch-size",
        type=positive,
        default=8,
        metavar="N",
        help="sequences scored at once (default: 8)",
    ),
    option(
        "--positions",
        type=positive,
        default=1,
        metavar="N",
        help="also print the loss in N equal parts of the context window (default: 1)",
    ),
    option("--figures", metavar="FILE", help="draw the loss against the position in the window (with --positions)"),
    option(
        "--needles",
        type=natural,
        default=0,
        metavar="N",
        help="hide N needles of random tokens at each of 5 depths, and count those that the model can repeat",
    ),
    option(
        "--output",
        metavar="FILE",
        help="also write the JSON there; with --follow, a folder for one file per checkpoint (default: "
        "RUN/evaluations)",
    ),
    option(
        "--follow",
        action="store_true",
        help="evaluate each checkpoint of a run, also later ones, until the run ends (slurm/evaluate.sbatch)",
    ),
    about="Held-out loss, perplexity and bits per byte of token datasets, and accuracy on multiple-choice tasks. "
    "Needs no network: "
    "task files are JSONL in the format of LLM Foundry (eval/local_data) or of the data sets that "
    "lm-evaluation-harness uses.",
    examples=(
        "frontier-llm evaluate runs/quickstart",
        "frontier-llm evaluate runs/train_22b parallel.tensor=8 --task piqa=piqa.jsonl",
        "frontier-llm evaluate runs/quickstart --follow",
    ),
)
def evaluate(args: argparse.Namespace) -> int:
    """Return exit code 0 if all data sets and tasks were scored."""
    from frontier_llm.inference.tasks import requests

    # every file is checked here in one process before ranks start, including the output, which is written last
    if args.output and not args.follow:
        _check_writable(args.output, "--output")
    if args.figures:
        _check_writable(args.figures, "--figures")
        _check_ending(args.figures)
    for _, task, pool in _tasks(args):
        requests(task, args.shots, pool)
    return _follow(args) if args.follow else on_ranks(args, _evaluate)


def _check_writable(path: str, flag: str) -> None:
    if Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK):
        raise ConfigError(
            f"{path} cannot be written",
            where=flag,
            fix="give a file in a directory that exists and is writable",
        )


def _check_ending(path: str) -> None:
    """Raise ConfigError if matplotlib writes no file with this ending."""
    from matplotlib.backend_bases import FigureCanvasBase

    endings = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in endings:
        raise ConfigError(
            f"{path} has no ending of a figure",
            where="--figures",
            fix=f"valid: .{', .'.join(sorted(endings))}",
        )


def _follow(args: argparse.Namespace) -> int:
    """Evaluate the checkpoints of a run until it has ended. In a batch shell, requeue the job at its walltime."""
    from frontier_llm.cluster import slurm
    from frontier_llm.cluster.follow import Follower, LocalEvaluator, SlurmEvaluator, WalltimeReached
    from frontier_llm.cluster.sites import load_site
    from frontier_llm.cluster.supervisor import requeue
    from frontier_llm.run.evaluations import FOLDER
    from frontier_llm.run.rank_env import discover, environ

    directory = Path(args.model)
    if discover() is not None:
        raise ConfigError("starts its own ranks", where="--follow", fix="start the command in the batch shell")
    if args.figures:
        raise ConfigError("draws one evaluation", where="--figures", fix="leave out --figures or --follow")
    at = args.typed.index(args.model)
    words = tuple(word for word in [*args.typed[1:at], *args.typed[at + 1 :]] if word != "--follow")
    evaluator: LocalEvaluator | SlurmEvaluator = LocalEvaluator(words)
    if environ("SLURM_JOB_ID") and environ("SLURMD_NODENAME"):
        evaluator = SlurmEvaluator(
            words=words,
            directory=directory,
            site=load_site(),
            allocation=slurm.Allocation.from_environment(),
        )
    try:
        Follower(directory, Path(args.output or directory / FOLDER).absolute(), evaluator).run()
    except WalltimeReached:
        requeue(str(environ("SLURM_JOB_ID")))
    return 0


def _named(words: list[str] | None, flag: str) -> dict[str, str]:
    for word in words or []:
        if not re.fullmatch("[^=]+=.+", word):
            raise ConfigError(f"{word!r} is not NAME=FILE", where=flag, fix=f"write e.g. {flag} piqa=data/piqa.jsonl")
    return dict(word.split("=", 1) for word in words or [])


def _tasks(args: argparse.Namespace) -> Iterator[tuple[str, Task, Task | None]]:
    """Yield (name, task, pool). The pool is the task of another file that gives the solved examples, or None."""
    from frontier_llm.inference.tasks import read_task

    pools = _named(args.shots_from, "--shots-from")
    for name, path in _named(args.task, "--task").items():
        pool = read_task(name, pools[name]) if name in pools else None
        yield name, read_task(name, path, args.limit), pool


def _evaluate(args: argparse.Namespace) -> int:
    from frontier_llm.data.indexed import IndexedDataset
    from frontier_llm.inference.evaluate import evaluate_task
    from frontier_llm.inference.heldout import draw_by_position, held_out
    from frontier_llm.inference.needle import needles
    from frontier_llm.inference.open import check_dataset, open_model, open_tokenizer

    opened = open_model(args.model, plugins=args.plugin)
    # Missing data and files are reported before the weights are read.
    datasets = args.data or ([] if args.task else _validation(opened.run))
    if args.needles and not datasets:
        raise ConfigError(
            "needs held-out text in which the needles are hidden, but no dataset is given",
            where="--needles",
            fix="give --data PREFIX",
        )
    if not datasets and not args.task:
        raise ConfigError("there is nothing to evaluate", fix="give --data PREFIX or --task NAME=FILE")
    tokenizer = open_tokenizer(opened, args.tokenizer) if args.task or args.tokenizer or opened.tokenizer_spec else None
    for prefix in datasets:
        IndexedDataset(prefix)
        if tokenizer is not None:
            check_dataset(prefix, tokenizer)
    with inference_model(args, opened) as (model, prints):
        progress = ProgressBar(prints)
        losses = [
            held_out(
                model=model,
                prefix=prefix,
                windows=args.windows,
                batch_size=args.batch_size,
                on_batch=progress.on(prefix, "batches"),
                positions=args.positions,
            )
            for prefix in datasets
        ]
        if args.needles:
            recalls = needles(model, datasets[0], args.needles, args.batch_size, progress.on("needles", "batches"))
        else:
            recalls = []
        results = []
        for name, task, pool in _tasks(args):
            assert tokenizer is not None
            results.append(
                evaluate_task(
                    model=model,
                    tokenizer=tokenizer,
                    task=task,
                    shots=args.shots,
                    pool=pool,
                    batch_size=args.batch_size,
                    on_batch=progress.on(name, "batches"),
                )
            )
        progress.close()
        if prints:
            try:
                _report(args, opened, losses, recalls, results)
            finally:
                if args.figures:
                    draw_by_position(losses, model.config.sequence_length, Path(args.figures))
    return 0


def _validation(run: RunConfig | None) -> list[str]:
    blends = [] if run is None else run.data.held_out.values()
    return [source.path for blend in blends if not isinstance(blend, str) for source in blend]


def _report(
    args: argparse.Namespace,
    opened: OpenedModel,
    losses: list[HeldOut],
    recalls: list[Recall],
    results: list[TaskResult],
) -> None:
    content = {
        "model": str(opened.path),
        "verification": verification(args, opened),
        "held_out": [{**vars(entry), "perplexity": entry.perplexity} for entry in losses],
        "needles": [vars(entry) for entry in recalls],
        "tasks": [{**vars(entry), "stderr": entry.stderr} for entry in results],
    }
    notes = [f"{opened.path}: {verification(args, opened)}"] if args.no_verify else []
    if losses and opened.run is not None and opened.run.data.validation and not (args.windows or args.data):
        notes.append(
            f"every window of the data counts; training scores {opened.run.train.eval_samples} samples of it "
            "(train.eval_samples), so its held-out loss differs"
        )
    try:  # an error of the terminal or of the disk does not lose the other result
        show(args, content, lambda: "\n".join([*_tables(losses, recalls, results, args.positions > 1), *notes]))
    finally:
        if args.output:
            write_atomically(Path(args.output), strict_json(content) + "\n")


def _tables(
    losses: list[HeldOut],
    recalls: list[Recall],
    results: list[TaskResult],
    by_position: bool,
) -> Iterator[str]:
    if losses:
        rows = [
            (
                one.dataset[-32:],
                f"{one.tokens:,}",
                f"{one.loss:.4f}",
                f"{one.perplexity:.2f}",
                _digits(one.bits_per_byte),
            )
            for one in losses
        ]
        yield aligned(("held-out data", ">tokens", ">loss", ">perplexity", ">bits/byte"), rows)
    for entry in losses if by_position else ():
        yield f"loss by position in {entry.dataset[-32:]}: {' '.join(f'{loss:.4f}' for loss in entry.by_position)}"
    if recalls:
        needles = [
            (f"{one.depth:.0%}", f"{one.length:,}", one.needles, f"{one.found:.2f}", f"{one.loss:.4f}")
            for one in recalls
        ]
        yield aligned(("needles at", ">of length", ">needles", ">found", ">loss"), needles)
    if results:
        scores = [
            (
                one.task,
                one.shots,
                one.items,
                *map(_digits, (one.acc, one.stderr, one.acc_norm, one.acc_token)),
                one.format,
            )
            for one in results
        ]
        yield aligned(("task", ">shots", ">items", ">acc", ">±", ">acc_norm", ">acc_token", "format"), scores)


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
