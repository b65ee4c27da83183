"""The figure of memory per pipeline rank: each part has a colour of its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.figures import memory_chart
from frontier_llm.planner.search import simulate_layout

FRONTIER = rates(load_machine("frontier"))
MUON = Layout(tp=8, pp=2, dp=2, microbatches=4, sequence_parallel=True, optimizer="muon")


def lightness(color: str) -> float:
    """Return the CIELAB lightness of '#rrggbb', from 0 to 100: the grey of a print without colours."""
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 116 * luminance ** (1 / 3) - 16


def test_the_parts_of_memory_have_colours_that_differ_in_grey_too() -> None:
    plan = simulate_layout(load_model("gpt-22b"), MUON, FRONTIER)
    full = replace(plan, memory=tuple(dict.fromkeys(lines, 2.0**30) for lines in plan.memory))
    greys = [lightness(trace["marker"]["color"]) for trace in memory_chart(full).traces if trace["type"] == "bar"]
    assert len(greys) == len(plan.memory[0]) >= 11, "also the parts of an optimizer of matrices"
    assert min(after - before for before, after in pairwise(sorted(greys))) > 5
    assert min(abs(above - below) for below, above in pairwise(greys)) > 25, "neighbours in the stack"
