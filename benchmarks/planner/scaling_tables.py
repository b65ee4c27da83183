"""Writes the simulated figures of docs/benchmarks/scaling.md: walltimes, strong scaling, roofline of a block."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, parse_arguments, write_measured
from frontier_llm.cluster.sites import load_site
from frontier_llm.config import load_model, load_run
from frontier_llm.errors import ConfigError
from frontier_llm.experiments.scaling.series import MODES, Mode, Point, default_batch, find_run, make_series
from frontier_llm.experiments.scaling.walltime import with_walltime
from frontier_llm.machine.load import load_machine, own_stack, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.figures import roofline_chart
from frontier_llm.planner.published import PUBLISHED
from frontier_llm.planner.search import Plan, search, simulate_layout
from frontier_llm.topology.expert_nodes import run_layout

PAGE = ROOT / "docs" / "benchmarks" / "scaling.md"
SITE = "frontier"
STRONG = {"gpt-175b": [8, 16, 32, 64, 128], "gpt-1t": [64, 128, 192, 384]}
WALLTIMES = ("gpt-175b", [16, 32, 64, 128])
ROOFLINES = (("gpt-22b", 16, 1024), ("gpt-175b", 128, 2048), ("gpt-1t", 384, 9600))
ORNL_STACK = "megatron-deepspeed"


def points_of(mode: Mode, model: str, nodes: Sequence[int]) -> list[Point]:
    """Return a series of the shipped run of this model, with ORNL's batch."""
    config = load_run(find_run(model))
    batch = default_batch(mode, config)
    return make_series(mode, config, load_site(SITE), list(nodes), batch, Path("unused"))


def walltime_cell(point: Point) -> str:
    """Return 'steps, walltime' of a point, or 'refused'."""
    try:
        ((timed, minutes),) = with_walltime([point], load_site(SITE))
    except ConfigError:
        return "refused"
    hours, rest = divmod(minutes or 0, 60)
    return f"{timed.config.train.steps}, {hours}:{rest:02d}"


def walltimes() -> Iterator[str]:
    """Yield the table of steps and walltimes."""
    model, nodes = WALLTIMES
    yield table_row(f"{model}, nodes", *nodes)
    yield "|---|" + "---|" * len(nodes)
    for mode in MODES:
        batch = default_batch(mode, load_run(find_run(model)))
        kind = f"{batch} samples per replica" if mode == "weak" else f"batch {batch}"
        cells = [walltime_cell(point) for point in points_of(mode, model, nodes)]
        yield table_row(f"{mode}, {kind}", *cells)


def plans_of(model: str, numbers: Rates, **changes: Any) -> list[Plan]:
    """Return the simulated plans of the strong series, with changed fields of the layout."""
    plans = []
    for point in points_of("strong", model, STRONG[model]):
        layout = replace(run_layout(point.config, point.devices, numbers), **changes)
        plans.append(simulate_layout(point.config.model, layout, numbers, point.config.parallel.stage_layers))
    return plans


def efficiencies(plans: Sequence[Plan]) -> list[float]:
    """Return tokens/s per device relative to the first plan."""
    base = plans[0].tokens_per_s_per_device
    return [plan.tokens_per_s_per_device / base for plan in plans]


def strong_scaling(model: str) -> Iterator[str]:
    """Yield the table of one model. Its rows are our stack, ORNL's stack, ORNL's stack on devices of varying speed, the
    bubble alone, and ORNL's measurement.
    """
    machine = load_machine(SITE)
    ornl = rates(machine, ORNL_STACK)
    variation = rates(load_machine("mi250")).speed_variation
    ours = plans_of(model, rates(machine, own_stack(machine)))
    theirs = plans_of(model, ornl, schedule="1f1b", recompute="full")
    varied = plans_of(model, replace(ornl, speed_variation=variation), schedule="1f1b", recompute="full")
    nodes = STRONG[model]
    (published,) = [point for point in PUBLISHED if (point.mode, point.model) == ("strong", model)]
    yield table_row(f"{model}, batch {ours[0].layout.global_batch}, nodes", *nodes)
    yield "|---|" + "--:|" * len(nodes)
    for title, plans in (
        ("this package, simulated", ours),
        ("ORNL's software of 2023, simulated", theirs),
        (f"the same, devices vary by {variation}", varied),
    ):
        yield table_row(title, *(f"{100 * share:.1f} %" for share in efficiencies(plans)))
    bubbles = (f"{100 * (1 - plan.simulated.bubble) / (1 - theirs[0].simulated.bubble):.1f} %" for plan in theirs)
    yield table_row("the pipeline's bubble alone", *bubbles)
    measured = [
        f"{100 * published.efficiency:.1f} %" if plan.layout.devices == published.devices else "" for plan in ours
    ]
    yield table_row("measured by ORNL", *measured)


def rooflines(models: Sequence[str]) -> Iterator[str]:
    """Yield the table of the block's place under the roofline, for the planner's best layouts."""
    numbers = rates(load_machine(SITE))
    yield "| model | FLOPs per byte of the block | TFLOP/s of the block |"
    yield "|---|--:|--:|"
    for model, nodes, batch in ROOFLINES:
        if model in models:
            best = search(load_model(model), numbers, nodes, batch).best
            block = roofline_chart(best, numbers).traces[-2]
            yield table_row(f"{model}, {nodes} nodes", f"{block['x'][0]:.0f}", f"{block['y'][0]:.1f}")


def table_row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def tables(models: Sequence[str]) -> str:
    """Return all tables of the page. `models` limits the rooflines, which need a search each."""
    parts = [walltimes(), *(strong_scaling(model) for model in STRONG), rooflines(models)]
    return "\n" + "\n\n".join("\n".join(part) for part in parts) + "\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [model for model, _, _ in ROOFLINES]
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="models of the roofline")
    options = parse_arguments(parser, smoke=["--models", "gpt-22b"])
    write_measured(PAGE, __file__, tables(options.models), options.smoke)


if __name__ == "__main__":
    main()
