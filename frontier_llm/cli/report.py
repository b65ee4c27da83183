"""frontier-llm report RUN_DIR …: one self-contained page over one or several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from frontier_llm.cli.arguments import examples


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "report",
        help="write a run directory's report.html",
        description="Write one self-contained page: curves, speed, the layout and its stages, the runs compared.",
        epilog=examples("frontier-llm report runs/quickstart", "frontier-llm report runs/a runs/b --output both.html"),
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="the curves of several share the axes")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the first run directory")
    parser.add_argument("--sample", type=Path, metavar="FILE", help="text that is shown as a generated sample")
    parser.add_argument("--next", dest="next_command", metavar="COMMAND", help="what to suggest at the end of the page")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from frontier_llm.measure.report import write_report

    sample = args.sample.read_text(encoding="utf-8") if args.sample else None
    print(write_report(args.runs, args.output or args.runs[0] / "report.html", sample, args.next_command))
    return 0
