"""`frontier-llm data plan|show`: the data that a run reads, by phase and by step."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import JSON, command, option, positive, run_options, show
from frontier_llm.tables import aligned
from frontier_llm.units import format_count

if TYPE_CHECKING:
    from frontier_llm.data.plan import PlannedSource


@command(
    option("run", metavar="RUN_DIR", help="a run directory"),
    option(
        "--step",
        type=positive,
        required=True,
        metavar="N",
        help="counted from 1, as the log does",
    ),
    option(
        "--samples",
        type=positive,
        default=8,
        metavar="N",
        help="samples to show (default: 8)",
    ),
    option(
        "--characters",
        type=positive,
        default=60,
        metavar="N",
        help="characters to show of each sample's text (default: 60)",
    ),
    JSON,
    line="print source, sample number, documents and text of the samples that a step has read",
    examples=("frontier-llm data show runs/quickstart --step 100",),
)
def show_step(args: argparse.Namespace) -> int:
    """Print the samples of one step."""
    from frontier_llm.cluster.status import require_run_dir
    from frontier_llm.config import RunConfig, build
    from frontier_llm.config.load import read_yaml
    from frontier_llm.data.inspect import samples_of_step
    from frontier_llm.data.recorded import before_step

    directory = Path(args.run)
    require_run_dir(directory)
    config = build(RunConfig, read_yaml(directory / "config.yaml"), str(directory / "config.yaml"))
    position, global_batch = before_step(directory, args.step)
    samples = list(samples_of_step(config, position, global_batch, args.samples, args.characters))
    content = {"step": args.step, "samples_of_step": global_batch, "samples": [asdict(sample) for sample in samples]}

    def text() -> str:
        head = (">sample", "source", ">index", ">length", "documents", "text")
        rows = [
            (
                sample.number,
                sample.source,
                sample.index,
                sample.sequence_length,
                _documents(sample.documents),
                repr(sample.text or ""),
            )
            for sample in samples
        ]
        return f"step {args.step} read {global_batch} samples\n{aligned(head, rows)}"

    show(args, content, text)
    return 0


def _documents(documents: tuple[int, ...]) -> str:
    more = f" and {len(documents) - 4} more" if len(documents) > 4 else ""
    return ", ".join(map(str, documents[:4])) + more


def _plan_row(source: PlannedSource) -> tuple[object, ...]:
    size = format_count(source.dataset_tokens) if source.dataset_tokens else "-"
    epochs = "-" if source.epochs is None else f"{source.epochs:.3g}"
    epochs_by_then = "-" if source.epochs_by_then is None else f"{source.epochs_by_then:.3g}"
    return (
        source.phase,
        f"{source.first_step}-{source.last_step}",
        source.path,
        size,
        source.tokenizer or "-",
        source.sequence_length,
        f"{source.share:.3g}",
        format_count(source.tokens),
        epochs,
        epochs_by_then,
    )


@command(
    *run_options(),
    JSON,
    line="print sources, tokens, tokenizers and epochs of each phase, and the data that is read twice or left out",
    examples=(
        "frontier-llm data plan quickstart",
        "frontier-llm data plan quickstart train.steps=2000",
    ),
)
def plan(args: argparse.Namespace) -> int:
    """Print the data that each phase of a run reads."""
    from frontier_llm.config import load_run
    from frontier_llm.data.plan import data_plan
    from frontier_llm.data.position import START
    from frontier_llm.data.recorded import as_it_stands, recorded_position

    config = as_it_stands(load_run(args.run, args.overrides))
    planned = data_plan(config, recorded_position(Path(config.train.run_dir)) or START)

    def text() -> str:
        head = (
            ">phase",
            "steps",
            "source",
            ">its tokens",
            "tokenizer",
            ">length",
            ">share",
            ">read",
            ">epochs",
            ">by then",
        )
        rows = [_plan_row(source) for source in planned.sources]
        begin = [f"from the checkpoint after step {planned.after_step} on"] if planned.after_step else []
        return "\n".join([*begin, aligned(head, rows), *planned.notes])

    show(args, asdict(planned), text)
    return 0
