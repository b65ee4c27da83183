"""Compares the algorithms of context parallelism: the milliseconds that each adds to a layer, forward and backward
(simulated), and the remaining time of the layer.

    python -m benchmarks.planner.context_algorithms [--models llama-3-8b llama-2-7b] [--tokens 131072]
    [--machine frontier] [--page]
"""

from __future__ import annotations

import argparse
from itertools import product

from benchmarks.harness import MEASURED, parse_arguments, write_measured
from frontier_llm.blueprint.items import EXCHANGE
from frontier_llm.blueprint.layout import Layout, context_way
from frontier_llm.blueprint.work import block_work
from frontier_llm.config.load import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.candidates import context_degrees, context_ways
from frontier_llm.planner.costs.seconds import by_cause


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-3-8b", "llama-2-7b"])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--machine", default="frontier")
    parser.add_argument("--page", action="store_true", help="write the table into docs/benchmarks/long_context.md")
    arguments = parse_arguments(parser, smoke=["--models", "llama-2-7b"])
    numbers = rates(load_machine(arguments.machine))
    lines = [
        "| model | tp | cp | gather | ring | heads | all else of the layer | by bytes |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, tp, cp in product(arguments.models, (1, 2, 4, 8), (2, 4, 8, 16)):
        model = load_model(name, {"sequence_length": arguments.tokens})
        ways = context_ways(model, tp, cp) if cp in context_degrees(model, cp) else []
        shown: dict[str, float] = {}
        else_s = 0.0
        for way in ways:
            layout = Layout(tp=tp, cp=cp, sequence_parallel=tp > 1, context_attention=way)
            seconds = {
                cause: sum(pair)
                for cause, pair in by_cause(block_work(model, layout, numbers), layout, numbers).items()
            }
            shown[way] = seconds.pop(EXCHANGE)
            else_s = sum(seconds.values())
        cells = [
            f"{'**' if shown[way] == min(shown.values()) else ''}{1e3 * shown[way]:.0f}" if way in shown else ""
            for way in ("gather", "ring", "heads")
        ]
        cells = [f"{cell}**" if cell.startswith("**") else cell for cell in cells]
        lines.append(
            f"| {name} | {tp} | {cp} | {' | '.join(cells)} | {1e3 * else_s:.0f} | {context_way(model, tp, cp)} |"
        )
    if arguments.page:
        write_measured(MEASURED / "long_context.md", __file__, "\n".join(lines) + "\n")
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
