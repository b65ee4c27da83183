"""Tests two-stage collectives on simulated nodes: values, gradients, reproducibility, and the numbers of bytes and
messages against closed forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest.mock import patch

import numpy as np
import pytest
import torch

from frontier_llm.comm import (
    AlgorithmTable,
    Axis,
    all_gather,
    all_reduce_,
    barrier,
    broadcast_,
    build_mesh,
    hierarchical,
    load_algorithms,
    reduce_scatter,
    single,
    start_all_gather_into,
    start_all_to_all_into,
    start_reduce_scatter_into,
)
from frontier_llm.comm.hierarchical import halving_skips
from frontier_llm.config import CommConfig
from frontier_llm.config.load import available
from frontier_llm.errors import ConfigError
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.costs.collectives import (
    flat_s,
    hierarchical_s,
    rail_bytes,
    rail_rounds,
)
from frontier_llm.topology.grid import Grid
from tests.harness.pool import RankPool

Transport = Literal["auto", "torch"]
LAYOUTS = [(2, 2), (3, 2), (4, 2), (2, 4), (5, 1), (7, 1)]  # (nodes, ranks per node); some node counts are odd


def _axis(rank: int, nodes: int, per_node: int, transport: Transport = "auto") -> Axis:
    grid = Grid(1, 1, nodes * per_node)
    return build_mesh(
        grid,
        rank,
        timeout_s=30.0,
        comm=CommConfig(transport=transport, algorithms="hierarchical"),
        ranks_per_node=per_node,
    ).dp


def _contribution(rank: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank * 31 + elements), dtype=torch.float64)


def _exchange(
    rank: int, nodes: int, per_node: int, chunk_bytes: int, transport: Transport = "auto"
) -> dict[str, object]:
    """Run every collective once. Return the errors against sums computed here, and the ledger."""
    axis = _axis(rank, nodes, per_node, transport)
    assert axis.group is not None and axis.hierarchical is not None
    axis.hierarchical._chunk_bytes = chunk_bytes  # type: ignore[attr-defined]
    size = axis.size
    part = 1001
    whole = [_contribution(peer, part * size) for peer in range(size)]
    total = torch.stack(whole).sum(0)
    errors = {}
    scattered = reduce_scatter(whole[rank], axis)
    errors["reduce_scatter"] = float((scattered - total.view(size, part)[rank]).abs().max())
    gathered = all_gather(whole[rank][:part], axis)
    assert torch.equal(gathered, torch.cat([other[:part] for other in whole]))
    ledger = {key: (axis.ledger.calls[key], size) for key, size in axis.ledger.bytes.items()}
    arriving = torch.empty_like(whole[rank])
    start_all_to_all_into(arriving, whole[rank], axis).wait()
    assert torch.equal(arriving, torch.cat([other.view(size, part)[rank] for other in whole]))
    odd = [other[:777] for other in whole]
    errors["all_reduce"] = float((all_reduce_(odd[rank].clone(), axis) - torch.stack(odd).sum(0)).abs().max())
    assert torch.equal(all_reduce_(odd[rank].clone(), axis, "max"), torch.stack(odd).amax(0))
    for source in range(size):
        assert torch.equal(broadcast_(odd[rank].clone(), axis, source), odd[source])
    buffer = whole[rank].clone()
    own = buffer.view(size, part)[rank]
    start_reduce_scatter_into(own, buffer, axis).wait()
    start_all_gather_into(buffer, own, axis).wait()
    errors["in place"] = float((buffer - total).abs().max())
    barrier(axis)
    again = reduce_scatter(whole[rank], axis)
    assert torch.equal(again, scattered), "not reproducible"
    return {"errors": errors, "ledger": ledger, "sum": buffer}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("nodes", "per_node", "transport"), [*((*layout, "auto") for layout in LAYOUTS), (3, 2, "torch")]
)
def test_values_bytes_and_messages(ranks: RankPool, nodes: int, per_node: int, transport: Transport) -> None:
    size = nodes * per_node
    tensor_bytes = 1001 * nodes * per_node * 8
    chunk_bytes = 8 * 400 * nodes  # three chunks of 400, 400 and 201 elements
    replies = ranks.run(size, _exchange, nodes, per_node, chunk_bytes, transport)
    for reply in replies:
        assert max(reply["errors"].values()) < 1e-12, reply["errors"]
        assert torch.equal(reply["sum"], replies[0]["sum"]), "ranks have different bits"
        ledger = reply["ledger"]
        assert ledger["dp", "reduce_scatter"] == (1, tensor_bytes) and ledger["dp", "all_gather"] == (1, tensor_bytes)
        if per_node > 1:
            assert ledger["dp.node", "reduce_scatter"] == (3, tensor_bytes)
            assert ledger["dp.node", "all_gather"] == (3, tensor_bytes)
        sent = (2 * 3 * int(rail_rounds(nodes)), 2 * int(rail_bytes(nodes, per_node, tensor_bytes)))
        assert ledger["dp.rail", "send"] == ledger["dp.rail", "recv"] == sent


@pytest.fixture(scope="module")
def sixteen() -> Iterator[RankPool]:
    pool = RankPool(16)
    yield pool
    pool.stop()


@pytest.mark.thorough
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 8), (4, 4), (8, 2)])
def test_sixteen_ranks(sixteen: RankPool, nodes: int, per_node: int) -> None:
    replies = sixteen.run(16, _exchange, nodes, per_node, hierarchical.CHUNK_BYTES)
    assert all(max(reply["errors"].values()) < 1e-12 for reply in replies)
    assert all(reply["ledger"]["dp.rail", "send"][0] == 2 * int(rail_rounds(nodes)) for reply in replies)


@pytest.mark.parametrize("size", [*range(1, 40), 127, 128, 129, 9408])
def test_halving_covers_every_block_in_the_fewest_rounds(size: int) -> None:
    rounds = halving_skips(size)
    assert len(rounds) == (size - 1).bit_length() == int(rail_rounds(size))
    assert sum(before - skip for before, skip in rounds) == size - 1
    assert all(before - skip <= skip < before for before, skip in rounds)


def _one_level(rank: int) -> list[bool]:
    """Check that three kinds of axes use no two-stage collectives: inside a node, uneven over nodes, and with
    comm.algorithms=flat.
    """
    inside = build_mesh(
        Grid(1, 1, 3), rank, timeout_s=30.0, comm=CommConfig(algorithms="hierarchical"), ranks_per_node=8
    ).dp
    uneven = build_mesh(
        Grid(1, 1, 3), rank, timeout_s=30.0, comm=CommConfig(algorithms="hierarchical"), ranks_per_node=2
    ).dp
    flat = build_mesh(Grid(1, 1, 3), rank, timeout_s=30.0, ranks_per_node=1).dp
    return [axis.hierarchical is None for axis in (inside, uneven, flat)]


def test_one_level_is_used_where_there_is_only_one(ranks: RankPool) -> None:
    assert all(map(all, ranks.run(3, _one_level)))


def test_the_shipped_table_follows_the_costs() -> None:
    """If the estimate says that one algorithm is 1.5 times faster than the other, the table must choose it (8 ranks per
    node).
    """
    machine = rates(load_machine("frontier"))
    table = load_algorithms("frontier")
    assert "frontier" in available("algorithms")
    sizes = 2.0 ** np.arange(20, 32)
    for operation in ("reduce_scatter", "all_gather", "all_reduce"):
        for nodes in (2, 4, 16, 64, 256, 1024, 9408):
            flat_by_size, staged_by_size = (
                price(machine, 8 * nodes, 8, 1, sizes, operation) for price in (flat_s, hierarchical_s)
            )
            for size, flat, staged in zip(sizes, flat_by_size, staged_by_size, strict=True):
                best = "hierarchical" if staged < flat else "flat"
                if flat > 1.5 * staged or staged > 1.6 * flat:
                    assert table.choose(operation, nodes, int(size)) == best, (operation, nodes, size, flat / staged)
    assert table.choose("reduce_scatter", 1, 1 << 20) == "flat"


def test_hierarchical_seconds_have_their_limits() -> None:
    machine = rates(load_machine("frontier"))
    one_node = hierarchical_s(machine, 8, 8, 1, 1e8, "all_gather")
    assert one_node == hierarchical_s(machine, 8, 8, 8, 1e8, "all_gather"), "NICs do not matter inside a node"
    more, less = (hierarchical_s(machine, 8 * nodes, 8, 1, 0.0, "all_gather") for nodes in (1024, 512))
    assert more - less == pytest.approx(machine.network_latency_s), "doubling the nodes adds one round"


def test_a_damaged_table_is_refused_with_every_violation(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "rules:\n"
        "  - {operation: reduce_scater, nodes_from: 2, bytes_from: -1, algorithm: ring, tag: measured, source: me}\n"
        "  - {operation: all_gather}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_algorithms(str(path))
    text = str(caught.value)
    assert "did you mean 'reduce_scatter'" in text and "'ring'" in text and "-1" in text and "rules.1" in text
    with pytest.raises(ConfigError, match="frontier"):
        load_algorithms("fronteer")
    assert load_algorithms("flat") == AlgorithmTable(rules=())


class _Device:
    """Replaces `torch.cuda` and records the calls on streams and events. 'main' is the caller's stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = self.stream_named("main")
        self.made = 0
        self.events = 0

    def stream_named(self, name: str) -> SimpleNamespace:
        stream = SimpleNamespace(name=name, device="cuda:0")
        stream.wait_stream = lambda other: self.log.append(f"{name} waits for all of {other.name}")
        stream.record_event = lambda: self.event(name)
        return stream

    def event(self, name: str) -> SimpleNamespace:
        self.events += 1
        number = self.events
        return SimpleNamespace(wait=lambda: self.log.append(f"{self.current.name} waits for event {number} of {name}"))

    def Stream(self, device: object, priority: int) -> SimpleNamespace:
        self.made += 1
        return self.stream_named(f"side {self.made} ({priority})")

    def current_stream(self, device: object) -> SimpleNamespace:
        return self.current

    @contextmanager
    def stream(self, chosen: SimpleNamespace) -> Iterator[None]:
        before = self.current
        self.current = chosen
        yield
        self.current = before


def test_on_a_gpu_all_is_queued_on_one_side_stream_and_each_wait_covers_its_own_call() -> None:
    device = _Device()
    group = hierarchical.HierarchicalGroup(single("dp.node"), single("dp.rail"))
    x = SimpleNamespace(is_cuda=True, device="cuda:0")

    def start(name: str) -> hierarchical._Staged:
        stage = lambda number: (  # noqa: E731
            lambda chunk, *_: device.log.append(f"{device.current.name}: {name}, stage {number} of chunk {chunk}")
        )
        return hierarchical._Staged(stage(1), stage(2), 2, group._stream(x))  # type: ignore[arg-type]

    with patch.object(torch, "cuda", device):
        one = start("a")
        two = start("b")
        one.wait()
        two.wait()
    side = "side 1 (-1)"
    assert device.made == 1
    for name, place in (("a", 0), ("b", 5)):
        assert device.log[place : place + 5] == [
            f"{side} waits for all of main",
            f"{side}: {name}, stage 1 of chunk 0",
            f"{side}: {name}, stage 1 of chunk 1",  # in flight while chunk 0 is in its second stage
            f"{side}: {name}, stage 2 of chunk 0",
            f"{side}: {name}, stage 2 of chunk 1",
        ]
    assert device.log[10:] == [f"main waits for event 1 of {side}", f"main waits for event 2 of {side}"]


def _nodes_that_split_pairs(rank: int) -> list[float]:
    """Three ranks per node and tp of two. The middle tp pair spans both nodes, and the other pairs do not. The groups
    of dp are created after the pairs.
    """
    mesh = build_mesh(
        Grid(2, 1, 3),
        rank,
        timeout_s=10.0,
        comm=CommConfig(transport="torch", algorithms="hierarchical"),
        ranks_per_node=3,
    )
    return [float(all_reduce_(torch.tensor([10.0**rank]), axis)) for axis in (mesh.tp, mesh.dp, mesh.world)]


def test_groups_of_an_axis_may_span_nodes_or_not(ranks: RankPool) -> None:
    found = ranks.run(6, _nodes_that_split_pairs)
    assert [pair for pair, _, _ in found] == [11, 11, 1100, 1100, 110000, 110000]
    assert {(tail, whole) for _, tail, whole in found} == {(10101, 111111), (101010, 111111)}
