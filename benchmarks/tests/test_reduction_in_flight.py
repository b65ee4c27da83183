"""The simulation of gradient sums with one communication in flight, on lists that are short enough to do by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planner.reduction_in_flight import CASES, MODEL, Linear, backward_of_block, exposed_s
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.config import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.costs.parameters import stage_numel
from frontier_llm.planner.costs.time import gradient_reduction_s, tied_sum_s
from frontier_llm.planner.search import simulate_layout


def linear(column: bool, collective_s: float = 1.0) -> Linear:
    """Return a layer whose products take 2 s each, after 3 s of other compute, with 1 element."""
    return Linear(
        before_s=3.0,
        input_s=2.0,
        weight_s=2.0,
        column=column,
        collective_s=collective_s,
        numel=1.0,
    )


def test_a_sum_is_hidden_only_by_the_compute_before_the_next_collective() -> None:
    rows = [linear(column=False), linear(column=False)]
    # alone: 2 x (3 + 1 + 2 + 2) = 16 s. The first sum of 5 s begins at 8 s. The second collective waits for it until
    # 13 s instead of 11 s. The second sum is exposed completely.
    assert exposed_s(rows, 5.0, 1.0, pieces=False) == pytest.approx(2.0 + 5.0)
    # a bucket of both weights is summed at the end
    assert exposed_s(rows, 5.0, 2.0, pieces=False) == pytest.approx(10.0)


def test_pieces_fill_the_compute_between_collectives() -> None:
    rows = [linear(column=False), linear(column=False)]
    # the first sum: 3 s before the second collective, and 2 s beside the products after it
    assert exposed_s(rows, 5.0, 1.0, pieces=True) == pytest.approx(5.0)
    # During the products of a column-parallel layer, sums only get the time that the layer's own collectives leave: 1 s
    # and 1 s.
    mixed = [linear(column=False), linear(column=True)]
    assert exposed_s(mixed, 5.0, 1.0, pieces=True) == pytest.approx(5.0)
    assert exposed_s(mixed, 6.0, 1.0, pieces=True) == pytest.approx(7.0)


def test_the_layers_are_those_of_the_model() -> None:
    model = load_model("gpt-175b")
    layout = Layout(tp=8, pp=8, dp=16, sequence_parallel=True)
    block = backward_of_block(model, layout, rates(load_machine("frontier")))
    # down projection, up projection, attention output, query-key-value
    assert [one.column for one in block] == [False, True, False, True]
    assert sum(one.numel for one in block) * 8 * model.layers == pytest.approx(total_parameters(model), rel=0.02)
    assert all(min(one.input_s, one.weight_s, one.collective_s) > 0 for one in block)


@pytest.mark.parametrize("name", CASES)
def test_the_planner_s_price_agrees_with_the_order_that_runs(name: str) -> None:
    model = load_model(MODEL)
    numbers = rates(load_machine("frontier"))
    layout = CASES[name]
    numel = float(stage_numel(model, layout.tp, model.layers / layout.pp, False, False))
    summed_s = float(gradient_reduction_s(layout, numbers, numel)[0])
    layers = backward_of_block(model, layout, numbers) * (model.layers // layout.pp)
    shown_s = exposed_s(layers, summed_s / numel, numbers.bucket_parameters, pieces=False)
    tied_s = float(tied_sum_s(model, layout, numbers))  # follows the sums over dp
    priced_s = simulate_layout(model, layout, numbers).simulated.reduce_s - tied_s
    assert 0.9 * summed_s < shown_s < summed_s
    assert shown_s < priced_s < 1.1 * shown_s
    # with many communications in flight the last backward hides a part
    many = simulate_layout(model, layout, replace(numbers, one_in_flight=False))
    assert many.simulated.reduce_s < 0.7 * priced_s
