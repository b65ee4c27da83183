"""Simulates step time and memory by schedule: with equal passes beside the papers' closed forms, and for models on
Frontier.

Writes the tables of docs/benchmarks/schedules.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

from benchmarks.harness import MEASURED, parse_arguments, write_measured
from frontier_llm.config import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.search import Plan, search
from frontier_llm.schedule import Action, Kind, build, one_end, peak_in_flight, simulate
from frontier_llm.units import GIB

PAGE = MEASURED / "schedules.md"
UNIT = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}
SCHEDULES = ("1f1b", "interleaved", "interleaved-zb", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "v-half", "v-min")
# Closed forms. The first two values are bubbles: of the step, and between a rank's first and last action. Their unit is
# (stages - 1) forward passes of a stage. The third value is the activation memory relative to 1F1B.
CLOSED = {
    "1f1b": ("3", "3", "1"),
    "interleaved": ("3/v", "3/v", "1 + (p-1)/(pv)"),
    "interleaved-zb": ("1/v", "", "1 + (p-1)/(pv)"),
    "zb-h1": ("1", "1", "1"),
    "zb-h2": ("1", "0", "2 - 1/p"),
    "zb-v": ("1/2", "", "1"),
    "dualpipe-v": ("1", "", "1 + 1/(2p)"),
    "v-half": ("3/2", "", "1/2 + O(1/p)"),
    "v-min": ("2", "", "1/3 + O(1/p)"),
}
# These schedules store most activations. Their search and simulation take a minute for this model.
LEFT_OUT = {"gpt-1t": ("interleaved-zb", "zb-h2")}
MODELS = (("gpt-22b", 16, 1024), ("gpt-175b", 128, 2048), ("gpt-1t", 384, 9600))


def unit_cost(chunks: int) -> Callable[[int, Action], float]:
    """Return the cost F = I = W = 1 per stage, divided by its number of chunks."""
    return lambda _, action: UNIT[action.kind] / chunks


def equal_passes(stages: int, microbatches: int) -> Iterator[str]:
    """Yield the table with F = I = W = 1 per stage."""
    yield "| schedule | bubble / (p - 1) | papers | within a rank / (p - 1) | papers | activations of 1F1B's | papers |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for name in SCHEDULES:
        chunks = 2 if name.startswith("interleaved") or one_end(name) else 1
        timeline = simulate(build(name, stages, microbatches, chunks), unit_cost(chunks))
        work = 3 * microbatches
        inside = max(timeline.end_s[rank][-1] - timeline.start_s[rank][0] for rank in range(stages)) - work
        held = (
            max(
                float(
                    peak_in_flight(
                        name,
                        stages,
                        chunks,
                        microbatches,
                        rank,
                    )
                )
                for rank in range(stages)
            )
            / chunks
            / stages
        )
        step, rank, memory = CLOSED[name]
        yield (
            f"| {name} | {(timeline.makespan_s - work) / (stages - 1):.2f} | {step} | {inside / (stages - 1):.2f} | "
            f"{rank} "
            f"| {held:.2f} | {memory} |"
        )


def on_frontier(models: Sequence[str]) -> Iterator[str]:
    """Yield a table with the planner's choice for each schedule."""
    yield (
        "| model | schedule | layout | recompute | step, s | against 1F1B | fullest rank, GiB | of which activations |"
    )
    yield "|---|---|---|---|--:|--:|--:|--:|"
    numbers = rates(load_machine("frontier"))
    for model, nodes, batch in MODELS:
        if model not in models:
            continue
        reference = 0.0
        for name in SCHEDULES:
            if name in LEFT_OUT.get(model, ()):
                continue
            found = search(
                load_model(model),
                numbers,
                nodes,
                batch,
                {"schedule": name},
            ).plans
            plans = [plan for plan in found if plan.layout.pp > 1]
            if not plans:
                yield f"| {model} | {name} | nothing fits | | | | | |"
                continue
            plan = plans[0]
            reference = reference or plan.step_s
            yield f"| {model} | {name} | {row(plan)} | {100 * (plan.step_s / reference - 1):+.1f} % | {memory(plan)} |"


def row(plan: Plan) -> str:
    """Return the cells for layout, recomputation and seconds."""
    one = plan.layout
    layout = (
        f"TP{one.tp} PP{one.pp}{f' x {one.chunks}' if one.chunks > 1 else ''} DP{one.dp}, {one.micro_batch} x "
        f"{one.microbatches}"
    )
    return f"{layout} | {one.recompute} | {plan.step_s:.1f}"


def memory(plan: Plan) -> str:
    """Return the cells for the memory of the fullest rank and its activations, in GiB."""
    lines = max(plan.memory, key=lambda lines: sum(lines.values()))
    return f"{sum(lines.values()) / GIB:.1f} | {lines['activations'] / GIB:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name, _, _ in MODELS]
    parser.add_argument(
        "--models",
        nargs="+",
        choices=names,
        default=names,
        help="models of the table for Frontier",
    )
    options = parse_arguments(parser, smoke=["--models", "gpt-22b"])
    lines = [
        "## Equal passes",
        "",
        "8 stages, 32 microbatches, F = I = W = 1, messages free; v = 2. Simulated, beside the papers' closed forms:",
        "",
        *equal_passes(8, 32),
        "",
        "## On Frontier",
        "",
        "The planner's fastest layout with a pipeline for each schedule, 64 GiB per GCD. All values are simulated; no "
        "value was measured on Frontier:",
        "",
        *on_frontier(options.models),
        "",
    ]
    write_measured(PAGE, __file__, "\n".join(lines), options.smoke)


if __name__ == "__main__":
    main()
