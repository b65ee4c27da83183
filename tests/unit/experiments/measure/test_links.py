"""The communication bench: definitions, a slow link, contention, and a measured table that the mesh accepts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest.mock import patch

import pytest
import torch
import yaml

from frontier_llm.cli.arguments import size_of
from frontier_llm.cli.bench_comm import memory_lines, stack_numbers
from frontier_llm.cli.main import main
from frontier_llm.comm import Axis, build_mesh, load_algorithms, serial_mesh
from frontier_llm.comm.group_memory import GroupMemory, outside_allocator_bytes
from frontier_llm.config import CommConfig
from frontier_llm.experiments.measure import links, timing
from frontier_llm.experiments.measure.link_tables import algorithm_rules, contention, link_kind, node_tables, slow_links
from frontier_llm.experiments.measure.links import (
    OPERATIONS,
    CommunicatorMemory,
    LinkTime,
    Pair,
    bench_comm,
    bench_pairs,
    communicator_memory,
    sizes_between,
)
from frontier_llm.experiments.measure.machine_file import write_machine
from frontier_llm.machine.load import OWN_STACK, load_machine, rates
from frontier_llm.topology.grid import Grid
from frontier_llm.units import GIB
from tests.harness.pool import RankPool


def test_bandwidths_are_those_of_rccl_tests() -> None:
    def bus(operation: str) -> float:
        return LinkTime("dp", operation, 8, "flat", "together", 2_000_000_000, 0.5).bus_gbps

    assert [bus(name) for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "message")] == [
        7.0,
        3.5,
        3.5,
        4.0,
        4.0,
    ]


def test_sizes() -> None:
    assert sizes_between(1024, 70_000) == [1024, 4096, 16_384, 65_536, 70_000]
    assert sizes_between(5, 5) == [5]
    assert (size_of("64KiB"), size_of("4gib"), size_of("17")) == (65_536, 4 << 30, 17)
    for wrong in ("4GB", "0", "-1", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
            size_of(wrong)


def test_a_slow_link_is_one_among_its_like() -> None:
    pairs = [
        Pair(0, 1, 1.0, 100.0),
        Pair(2, 3, 1.0, 99.0),
        Pair(4, 5, 1.0, 60.0),
        Pair(0, 2, 1.0, 40.0),
        Pair(1, 3, 1.0, 41.0),
        Pair(1, 2, 1.0, 39.0),
    ]
    kinds = {(0, 1): "package", (2, 3): "package", (4, 5): "package"}
    assert slow_links(pairs, lambda a, b: kinds.get((a, b), "far")) == [pairs[2]]


def test_kinds_of_links_are_the_machines() -> None:
    kind = link_kind(8, "mi250x")
    assert kind(0, 1) == kind(14, 15) == "200 GB/s of Infinity Fabric" and kind(0, 6) == "100 GB/s of Infinity Fabric"
    assert (
        kind(0, 3) == "routed over other GCDs"
        and kind(7, 8) == "between nodes"
        and link_kind(8, None)(0, 3) == "inside a node"
    )


def test_a_machine_file_takes_the_groups_of_a_node(tmp_path: Path) -> None:
    def row(
        axis: str,
        operation: str,
        ranks: int,
        size: int,
        seconds: float,
        mode: str = "together",
        algorithm: str = "flat",
    ) -> LinkTime:
        return LinkTime(axis, operation, ranks, algorithm, mode, size, seconds)

    operations = ("all_reduce", "reduce_scatter", "all_gather")
    rows = [
        row(axis, o, n, size, n * size * 1e-9)
        for axis, n in (("tp", 2), ("dp", 4), ("world", 8))
        for o in operations
        for size in (1000, 2000)
    ]
    rows += [
        row("tp", "all_reduce", 2, 3000, 1.0),
        row("tp", "all_reduce", 2, 1000, 9.0, mode="alone"),
        row("tp", "broadcast", 2, 1000, 9.0),
    ]
    rows += [row("dp", o, 4, 1000, 9.0, algorithm="hierarchical") for o in operations]
    tables = node_tables(rows, 4, "a test")
    assert tables["message_bytes"] == [1000, 2000]
    assert tables["time_us"] == {o: {2: [2.0, 4.0], 4: [4.0, 8.0]} for o in operations}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"base": "local", "node": {"collectives": tables}}))
    assert rates(load_machine(str(path))).node_tables["all_reduce"].seconds == ((2e-6, 4e-6), (4e-6, 8e-6))
    with pytest.raises(ValueError, match="no axis"):
        node_tables(rows, 1, "a test")


def test_a_measured_table_says_what_was_measured(tmp_path: Path) -> None:
    def row(size: int, algorithm: str, seconds: float) -> LinkTime:
        return LinkTime("dp", "reduce_scatter", 8, algorithm, "together", size, seconds)

    measured = [
        row(1000, "flat", 1.0),
        row(1000, "hierarchical", 2.0),
        row(2000, "flat", 4.0),
        row(2000, "hierarchical", 2.0),
    ]
    measured += [
        row(3000, "flat", 5.0),
        row(3000, "hierarchical", 2.0),
        row(4000, "flat", 5.0),
        row(4000, "hierarchical", 6.0),
    ]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"rules": algorithm_rules(measured, {"dp": 4}, "here")}))
    table = load_algorithms(str(path))
    choices = [table.choose("reduce_scatter", 4, size) for size in (1000, 2000, 3000, 4000)]
    assert choices == ["flat", "hierarchical", "hierarchical", "flat"]
    assert table.choose("reduce_scatter", 2, 2000) == "flat" and table.choose("all_gather", 4, 2000) == "flat"
    assert {rule.tag for rule in table.rules} == {"measured"}


def test_contention_compares_together_with_alone() -> None:
    rows = [
        LinkTime("tp", "all_reduce", 2, "flat", mode, 100, seconds)
        for mode, seconds in (("alone", 2.0), ("together", 5.0))
    ]
    assert contention(rows) == [("tp", "all_reduce", 100, 2.5)]


class _Clock:
    """Stands in for `time`: only messages take time."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


def _measure(rank: int) -> tuple[list[LinkTime], list[Pair], int]:
    """Measure two pretended nodes, each with a pair of tp. Messages between ranks 1 and 2 take three times as long as
    others.
    """
    grid = Grid(2, 1, 2)
    mesh = build_mesh(grid, rank, timeout_s=30.0, comm=CommConfig(algorithms="hierarchical"), ranks_per_node=2)
    measurements = bench_comm(mesh, torch.device("cpu"), [4096, 100_000], seconds_per_size=0.01)
    busy = mesh.ledger.calls["tp", "all_reduce"]
    ping_pong = links._ping_pong
    clock = _Clock()

    def timed(x: torch.Tensor, world: Axis, peer: int, first: bool) -> Callable[[], None]:
        def run() -> None:
            ping_pong(x, world, peer, first)()
            clock.now_s += 0.06 if {rank, peer} == {1, 2} else 0.02

        return run

    with patch.object(timing, "time", clock), patch.object(links, "_ping_pong", timed):
        return measurements, bench_pairs(mesh, torch.device("cpu")), busy


def test_a_mesh_is_measured_and_its_slow_link_named(ranks: RankPool) -> None:
    (measurements, pairs, busy), *_, (_, _, busy_in_the_other_group) = ranks.run(4, _measure)
    assert 0 < busy_in_the_other_group < busy, "it rests while the first group is measured alone"
    operations = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "message"}
    ways = [
        ("tp", "flat", "alone"),
        ("tp", "flat", "together"),
        ("world", "flat", "together"),
        ("world", "hierarchical", "together"),
    ]
    ways += [("dp", algorithm, mode) for algorithm in ("flat", "hierarchical") for mode in ("alone", "together")]
    for axis, algorithm, mode in ways:
        seen = [m.operation for m in measurements if (m.axis, m.algorithm, m.mode) == (axis, algorithm, mode)]
        assert sorted(seen) == sorted([*operations - ({"message"} if algorithm == "hierarchical" else set())] * 2), (
            "both sizes"
        )
    assert len(measurements) == 2 * sum(6 if algorithm == "flat" else 5 for _, algorithm, _ in ways)
    assert {(axis, operation) for axis, operation, _, _ in contention(measurements)} == {
        (a, o) for a in ("tp", "dp") for o in operations
    }
    assert all(m.seconds > 0 and m.bytes in (4096, 100_000) for m in measurements)
    assert [(pair.a, pair.b) for pair in pairs] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert [(pair.a, pair.b, round(pair.seconds, 6)) for pair in slow_links(pairs, lambda a, b: "any")] == [
        (1, 2, 0.03)
    ]


def test_memory_of_communicators_is_measured_and_written_as_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a driver with 64 GiB, of which torch has reserved 3 GiB."""
    used_gib = [3.5]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int((64 - used_gib[0]) * GIB), 64 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    device = torch.device("cuda", 0)
    memory = GroupMemory(lambda: outside_allocator_bytes(device))
    for name, gib in (("tp", 0.25), ("dp", 1.0)):
        with memory.first_use(name):
            used_gib[0] += gib
    assert memory.by_group == {"tp": GIB // 4, "dp": GIB}
    used_gib[0] += 0.75  # large messages need more buffers
    mesh = serial_mesh()
    mesh.ledger.memory = memory
    monkeypatch.setattr(links.torch, "tensor", lambda values, device: torch.as_tensor(values))
    measured = communicator_memory(mesh, device)
    assert measured == CommunicatorMemory(GIB // 2, GIB * 7 // 4, GIB * 5 // 2, 2)
    assert measured.per_communicator_bytes == GIB
    assert communicator_memory(mesh, torch.device("cpu")) is None
    machine = tmp_path / "mine.yaml"
    content = {"base": "frontier", "title": "measured", "stacks": {OWN_STACK: stack_numbers([], measured, "a test")}}
    write_machine(machine, content)
    reserve = load_machine(str(machine)).stacks[OWN_STACK].reserve_gib
    assert (reserve.value, reserve.tag, reserve.source) == (2.5, "measured", "a test")
    assert "512.0 MiB before the first use of 2 communicators" in next(memory_lines(measured))
    assert list(memory_lines(None)) == []


@pytest.mark.thorough
def test_the_command_prints_json_and_draws(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "pairs.html"
    arguments = [
        "bench",
        "comm",
        "bench",
        "parallel.tensor=2",
        f"train.run_dir={tmp_path}/run",
        "--min",
        "64KiB",
        "--max",
        "128KiB",
    ]
    machine = tmp_path / "mine.yaml"
    assert main([*arguments, "--json", "--figures", str(figure), "--emit-machine", str(machine)]) == 0
    measured = load_machine(str(machine))
    assert rates(measured).node_tables["all_gather"].sizes_bytes == (65_536.0, 131_072.0)
    result = json.loads(capfd.readouterr().out)
    assert {(row["operation"], row["pieces"]) for row in result["pieces"]} == {("all_reduce", 2), ("all_reduce", 4)}
    overlap = measured.stacks["frontier-llm"].chunk_overlap
    assert overlap.tag == "measured" and overlap.value == pytest.approx(
        median(row["overlap"] for row in result["pieces"]), rel=1e-4
    )
    assert {row["operation"] for row in result["rows"]} == {*OPERATIONS}
    assert {pair["kind"] for pair in result["pairs"]} == {"inside a node"}
    assert (
        all(row["busbw_gbps"] > 0 and row["bytes"] in (65_536, 131_072) for row in result["rows"])
        and len(result["pairs"]) == 1
    )
    assert '"type": "heatmap"' in figure.read_text()
