"""frontier-llm report RUN_DIR …: write one self-contained page about one or several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from frontier_llm.cli.arguments import JSON, PLUGIN, command, option, show


@command(
    option(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="run directory; the curves of several runs share the axes",
    ),
    option(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: report.html in the first run directory",
    ),
    option(
        "--sample",
        type=Path,
        metavar="FILE",
        help="text that is shown as a generated sample",
    ),
    option("--machine", help="show predicted step times (from this machine file) beside the measured ones"),
    PLUGIN,
    JSON,
    option(
        "--next",
        dest="next_command",
        metavar="COMMAND",
        help="command that the page suggests at its end",
    ),
    about="Write one self-contained page: curves, speed, the layout and its stages, the runs compared.",
    examples=(
        "frontier-llm report runs/quickstart",
        "frontier-llm report runs/a runs/b --output both.html",
    ),
)
def report(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from frontier_llm.experiments.measure.report import write_report

    sample = args.sample.read_text(encoding="utf-8") if args.sample else None
    output = args.output or args.runs[0] / "report.html"
    page = write_report(
        args.runs,
        output,
        sample,
        args.next_command,
        plugins=args.plugin,
        machine=args.machine,
    )
    content = {"page": str(page), "runs": [str(run) for run in args.runs]}
    show(args, content, lambda: str(page))
    return 0
