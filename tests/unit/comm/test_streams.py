"""The number of a rank's GPU streams equals the communicators and streams of the mesh that the rank builds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from frontier_llm.comm import Mesh, build_mesh
from frontier_llm.comm.axis import Axis
from frontier_llm.config import CommConfig, RunConfig, load_run
from frontier_llm.machine.env import DEFAULT_QUEUES, MOST_QUEUES, QUEUES
from frontier_llm.machine.load import load_machine
from frontier_llm.schedule import Placement, rule
from frontier_llm.topology.grid import Grid
from frontier_llm.topology.plan import plan_problems
from frontier_llm.topology.rank_variables import run_variables
from frontier_llm.topology.streams import most_streams, streams_of_rank


def communicators(axis: Axis) -> Iterator[str]:
    """Yield the names of the communicators and side streams of an axis."""
    if axis.size == 1:
        return
    yield axis.name
    levels = axis.levels or ()
    if axis.hierarchical is not None:
        yield f"{axis.name} in two stages"
        levels = (axis.hierarchical._node, axis.hierarchical._rail)  # type: ignore[attr-defined]
    for level in levels:
        yield from communicators(level)


def built(mesh: Mesh, placement: Placement, experts: bool) -> list[str]:
    """Return the streams that a mesh uses on a GPU."""
    axes = {axis.name: axis for field in fields(mesh) if isinstance(axis := getattr(mesh, field.name), Axis)}
    streams = ["compute", "numbers of rows"] if experts else ["compute"]
    for name, axis in axes.items():
        if name != "pp":
            streams += communicators(axis)
    for channel, pairs in placement.streams.items():
        axis = mesh.channels[channel.value]
        streams += [f"{axis.name} {pair}" for pair in pairs if axis.rank in pair]
    return streams


GRIDS = {
    "one node": (Grid(2, 2, 2), "1f1b", 1, 8, {}),
    "four nodes": (Grid(2, 4, 2), "1f1b", 1, 4, {"tied": True}),
    "V": (Grid(1, 4, 2), "zb-v", 2, 4, {"tied": True}),
    "interleaved": (Grid(1, 4, 2), "interleaved", 2, 4, {}),
    "context": (Grid(2, 1, 4, cp=2), "1f1b", 1, 4, {}),
    "experts in two stages": (Grid(1, 2, 8, ep=8), "1f1b", 1, 4, {"experts": True, "by_node": True}),
}


@pytest.mark.parametrize("two_stages", [False, True])
@pytest.mark.parametrize("name", GRIDS)
def test_counted_streams_are_those_of_the_mesh(name: str, two_stages: bool) -> None:
    grid, schedule, chunks, per_node, options = GRIDS[name]
    placement = rule(schedule).placement(grid.pp, chunks)
    options = {"tied": False, "experts": False, "by_node": False, **options}
    comm = CommConfig(transport="torch", algorithms="hierarchical" if two_stages else "flat")
    for rank in range(0, grid.world_size, 3):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.world_size)
        try:
            mesh = build_mesh(
                grid,
                rank,
                placement,
                tied_embeddings=options["tied"],
                comm=comm,
                ranks_per_node=per_node,
                experts=options["experts"],
                by_node=options["by_node"],
            )
        finally:
            dist.destroy_process_group()
        counted = streams_of_rank(grid, placement, rank, per_node, in_two_stages=two_stages, **options)
        assert sorted(counted) == sorted(built(mesh, placement, options["experts"]))


def queues(config: RunConfig, nodes: int) -> int:
    return int(next(variable.value for variable in run_variables(config, nodes) if variable.name == QUEUES))


def test_the_variable_has_a_queue_for_each_stream_if_many_may_be_in_flight() -> None:
    settings = ["machine=frontier", "comm.algorithms=hierarchical"]
    many = load_run("train_175b", [*settings, "comm.in_flight=many"])
    assert queues(many, 64) == 14
    assert queues(load_run("train_175b", settings), 64) == DEFAULT_QUEUES  # on gfx90a, comm.in_flight=auto means one
    assert queues(load_run("train_175b", ["machine=frontier", "comm.in_flight=many"]), 64) == 8
    assert queues(many, 1) == DEFAULT_QUEUES  # `doctor` on fewer nodes than the layout needs


def test_more_streams_than_queues_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run("train_175b", ["machine=frontier", "comm.algorithms=hierarchical", "comm.in_flight=many"])
    assert load_machine("frontier").device.vendor == "amd"
    assert plan_problems(config, 512) == []
    monkeypatch.setattr("frontier_llm.topology.streams.MOST_QUEUES", 13)
    [problem] = plan_problems(config, 512)
    assert problem.where == "comm.in_flight" and "14 streams of a rank, but a device has only 13" in problem.what
    one = config.model_copy(update={"comm": config.comm.model_copy(update={"in_flight": "one"})})
    assert plan_problems(one, 512) == []


def test_fsdp_and_experts_add_streams() -> None:
    experts = load_run("moe_small", ["comm.in_flight=many"])
    grid = Grid(1, 1, 4, ep=4)
    assert most_streams(experts, grid, rule("1f1b").placement(1, 1), 4) == len(
        ["compute", "dp", "world", "ep", "numbers of rows"]
    )
    fsdp = load_run("quickstart", ["parallel.data_mode=fsdp"])
    zero = load_run("quickstart", [])
    grid = Grid(1, 1, 4)
    counts = [most_streams(config, grid, rule("1f1b").placement(1, 1), 4) for config in (zero, fsdp)]
    assert counts == [3, 9] and counts[1] < MOST_QUEUES
