"""frontier-llm bench step|ops|comm: measurements as text or JSON."""

from __future__ import annotations

import argparse
import importlib

from frontier_llm.cli.arguments import add_json, examples

# bench → (module, one line of help); each module has add_arguments(parser) and run(args) -> int
BENCHES = {
    "step": ("frontier_llm.cli.bench_step", "the training step against this device's own matrix-product rate"),
    "comm": ("frontier_llm.cli.bench_comm", "collectives and messages of a layout: time, bandwidth, slow links"),
    "ops": ("frontier_llm.cli.bench_ops", "each fused op against eager torch, in one interleaved run"),
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command and its benches."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the training step, the ops or the communication",
        description="Measure on this machine; under srun, mpirun or torchrun with its ranks, alone with local ones.",
        epilog=examples("frontier-llm bench step quickstart --json", "frontier-llm bench comm train_small --max 1MiB"),
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, (module, line) in BENCHES.items():
        bench = benches.add_parser(name, help=line, description=f"Measure {line}.")
        add_json(bench)
        importlib.import_module(module).add_arguments(bench)


def run(args: argparse.Namespace) -> int:
    """Run the chosen bench."""
    return int(importlib.import_module(BENCHES[args.bench][0]).run(args))
