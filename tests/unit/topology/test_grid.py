"""Rank ↔ coordinates is a bijection in every order, and the groups of every axis partition the world."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.errors import ConfigError
from frontier_llm.topology.grid import (
    AXES,
    AXIS_ORDERS,
    Grid,
)

grids = st.builds(
    Grid,
    tp=st.integers(1, 8),
    pp=st.integers(1, 6),
    dp=st.integers(1, 6),
    order=st.sampled_from(AXIS_ORDERS),
    cp=st.integers(1, 4),
)


def groups_of(grid: Grid, axis: str) -> list[tuple[int, ...]]:
    return sorted({grid.group(axis, rank) for rank in range(grid.world_size)})


@given(grids)
def test_coordinates_are_a_bijection(grid: Grid) -> None:
    places = [grid.coordinates(rank) for rank in range(grid.world_size)]
    assert (
        len({tuple(sorted(place.items())) for place in places})
        == grid.world_size
        == grid.tp * grid.cp * grid.pp * grid.dp
    )
    for rank, place in enumerate(places):
        assert all(0 <= place[axis] < grid.degree(axis) for axis in AXES)
        assert grid.global_rank(place) == rank


@given(grids, st.sampled_from(AXES))
def test_groups_partition_the_world(grid: Grid, axis: str) -> None:
    groups = groups_of(grid, axis)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    assert {len(group) for group in groups} == {grid.degree(axis)}


@given(grids, st.sampled_from(AXES))
def test_a_group_varies_its_own_axis_alone(grid: Grid, axis: str) -> None:
    for group in groups_of(grid, axis):
        places = [grid.coordinates(rank) for rank in group]
        assert [place[axis] for place in places] == list(range(grid.degree(axis)))
        assert all(place[other] == places[0][other] for place in places for other in AXES if other != axis)
        assert all(grid.group(axis, rank) == group for rank in group)


@given(grids)
def test_tensor_parallel_ranks_are_neighbours(grid: Grid) -> None:
    for group in groups_of(grid, "tp"):
        assert group == tuple(range(group[0], group[0] + grid.tp))


def test_the_second_axis_of_the_order_has_the_smaller_stride() -> None:
    assert Grid(2, 2, 3, "tp-dp-pp").group("dp", 0) == (0, 2, 4)
    assert Grid(2, 2, 3, "tp-dp-pp").group("pp", 0) == (0, 6)
    assert Grid(2, 2, 3, "tp-pp-dp").group("pp", 0) == (0, 2)
    assert Grid(2, 2, 3, "tp-pp-dp").group("dp", 0) == (0, 4, 8)


def test_an_order_without_tp_innermost_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp-dp-pp") as caught:
        Grid(1, 1, 1, "dp-tp-pp")
    assert caught.value.problems[0].where == "parallel.axis_order"


def test_context_stands_beside_tensor_and_replicas_are_both() -> None:
    grid = Grid(tp=2, pp=2, dp=2, cp=3)
    assert grid.group("cp", 0) == (0, 2, 4) and grid.group("dp", 0) == (0, 6) and grid.group("pp", 0) == (0, 12)
    assert grid.replicas == "dp.cp" and grid.group("dp.cp", 2) == (0, 2, 4, 6, 8, 10) and grid.degree("dp.cp") == 6
    assert sorted(rank for group in groups_of(grid, "dp.cp") for rank in group) == list(range(24))
    assert Grid(2, 1, 2).replicas == "dp"
