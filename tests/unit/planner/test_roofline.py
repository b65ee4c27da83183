"""The roofline of a plan: kernels below the limits of memory and matrix units, by their FLOPs per byte."""

from __future__ import annotations

import pytest

from frontier_llm.blueprint.items import FlashCore, Product
from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.figures import roofline_chart
from frontier_llm.planner.search import simulate_layout

FRONTIER = rates(load_machine("frontier"))


def test_a_square_product_has_a_third_of_its_side_in_flops_per_byte() -> None:
    product = Product(4096, 4096, 4096)
    attention = FlashCore(1, 16, 2048, 2048, 128)
    assert product.flops / product.moved_bytes == pytest.approx(4096 / 3)
    assert attention.flops / attention.moved_bytes == pytest.approx(2048 / 2), "scores never leave the chip"


@pytest.mark.parametrize("name", ["gpt-22b", "gpt-1t"])
def test_everything_lies_under_the_roof_and_the_block_where_matrix_units_bound_it(name: str) -> None:
    layout = Layout(tp=8, pp=8, dp=2, microbatches=16, sequence_parallel=True)
    chart = roofline_chart(simulate_layout(load_model(name), layout, FRONTIER), FRONTIER)
    *kernels, block, roof = chart.traces
    for trace in (*kernels, block):
        for x, y in zip(trace["x"], trace["y"], strict=True):
            assert 0 < y * 1e12 <= min(FRONTIER.peak_flops, x * FRONTIER.hbm_bytes_s)
    assert {trace["name"] for trace in kernels} == {"matrix products", "attention"}
    assert block["x"][0] > FRONTIER.peak_flops / FRONTIER.hbm_bytes_s, "ORNL: not bound by memory"
    assert block["y"][0] < max(y for trace in kernels for y in trace["y"])
    assert max(roof["y"]) == FRONTIER.peak_flops / 1e12
