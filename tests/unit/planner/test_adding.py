"""Predicted time of the method with which the installed torch adds weight gradients to their fp32 buffers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.blueprint.expert_work import EXPERTS
from frontier_llm.blueprint.items import ADDING, PRODUCTS, Item, Pass, Phase, Product, Software
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.work import block_work
from frontier_llm.config import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner import report
from frontier_llm.planner.breakdown import adding_prices
from frontier_llm.planner.search import Plan, simulate_layout

FRONTIER = rates(load_machine("frontier"))
MOE = load_model("moe-tiny")
EXPLAINED = "method of adding weight gradients to fp32: "


def plan(numbers: object = FRONTIER) -> Plan:
    return simulate_layout(load_model("gpt-22b"), Layout(tp=8, dp=2, microbatches=16), numbers)  # type: ignore[arg-type]


def weight_items(software: Software, cause: str) -> tuple[list[Item], float]:
    """Return the weight gradients of a cause, and the bytes of the passes that add all weight gradients."""
    items = [item for item in block_work(MOE, Layout(), software) if item.phase is Phase.W]
    passes = sum(item.work.moved_bytes for item in items if item.cause == ADDING and isinstance(item.work, Pass))
    return [item for item in items if item.cause == cause], passes


@pytest.mark.parametrize(
    ("method", "bytes_in_product", "bytes_after"),
    [("in-product", 6, 0), ("fp32-product", 0, 14), ("rounded-product", 0, 10)],
)
def test_each_method_moves_its_bytes(method: str, bytes_in_product: int, bytes_after: int) -> None:
    software = Software(weight_gradients=method)  # type: ignore[arg-type]
    dense, passes = weight_items(software, PRODUCTS)
    products = [item.work for item in dense if isinstance(item.work, Product)]
    assert products
    assert passes == bytes_after * sum(product.m * product.n for product in products)
    for product in products:
        assert product.added_bytes == bytes_in_product * product.m * product.n


def test_the_kernel_of_the_experts_adds_its_product_with_every_torch() -> None:
    experts, _ = weight_items(Software(weight_gradients="fp32-product"), EXPERTS)
    products = [item.work for item in experts if isinstance(item.work, Product)]
    assert len(products) == 2
    for product in products:
        assert product.added_bytes == 6 * product.m * product.n * product.batch


def test_measured_products_include_the_addition() -> None:
    software = Software(weight_gradients="fp32-product", accumulate_bytes=0.0)
    assert weight_items(software, PRODUCTS)[1] == 0
    assert adding_prices(plan(), replace(FRONTIER, accumulate_bytes=0.0)) == {}


def test_a_plan_explains_which_method_it_assumes_and_the_price_of_the_others(tmp_path: Path) -> None:
    """A machine file without the key must not be read as the fastest method."""
    frontier = load_machine("frontier")
    unknown = report.explain(plan(), frontier, None, FRONTIER)
    assert f"{EXPLAINED}not known for the installed torch" in unknown
    assert "frontier-llm doctor --emit-machine FILE" in unknown
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: frontier\nstacks: {frontier-llm: {weight_gradients: fp32-product}}\n")
    machine = load_machine(str(mine))
    numbers = rates(machine)
    chosen = plan(numbers)
    assert f"{EXPLAINED}fp32-product" in report.explain(chosen, machine, None, numbers)
    seconds = adding_prices(chosen, numbers)
    assert seconds["fp32-product"] == pytest.approx(chosen.step_s)
    assert seconds["in-product"] < seconds["rounded-product"] < seconds["fp32-product"]
    assert EXPLAINED not in report.explain(plan(), frontier, "megatron-deepspeed", FRONTIER)
