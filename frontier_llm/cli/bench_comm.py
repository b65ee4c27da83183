"""frontier-llm bench comm RUN [key=value …]: measured times and bandwidths of a layout's communication."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from frontier_llm.cli.arguments import (
    JSON,
    command,
    option,
    positive,
    positive_amount,
    run_options,
    show,
    size_of,
    yaml_file,
)
from frontier_llm.tables import aligned
from frontier_llm.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from frontier_llm.comm import Mesh
    from frontier_llm.config import RunConfig
    from frontier_llm.experiments.measure.links import CommunicatorMemory, LinkTime, Pair
    from frontier_llm.experiments.measure.pieces import PiecesTime
    from frontier_llm.run.launchers import RankEnv


@command(
    JSON,
    *run_options("its layout is measured; with comm.algorithms=hierarchical both algorithms are measured"),
    option(
        "--min",
        type=size_of,
        default=size_of("1KiB"),
        metavar="SIZE",
        help="smallest message (default: 1KiB)",
    ),
    option(
        "--max",
        type=size_of,
        metavar="SIZE",
        help="largest message (default: 16MiB on CPU, 4GiB on GPUs)",
    ),
    option("--no-pairs", action="store_true", help="leave out the messages between all pairs of ranks"),
    option(
        "--emit-algorithms",
        type=Path,
        metavar="FILE",
        help="write a measured algorithm table for comm.algorithms",
    ),
    option(
        "--emit-machine",
        type=yaml_file,
        metavar="FILE",
        help="write a machine file with the measured values, for `plan` and for runs",
    ),
    option(
        "--figures",
        type=Path,
        metavar="FILE",
        help="draw the bandwidth of all pairs into an HTML page",
    ),
    option(
        "--hang-test",
        action="store_true",
        help=(
            "do not measure, but run training steps under a watchdog to find the modes of comm.in_flight that do not "
            "hang here"
        ),
    ),
    option(
        "--steps",
        type=positive,
        default=200,
        metavar="N",
        help="steps of each mode of the hang test (default: 200)",
    ),
    option(
        "--step-limit",
        type=positive_amount,
        default=30.0,
        metavar="S",
        help="seconds after which a step of the hang test has hung (default: 30)",
    ),
    option("--mode", help=argparse.SUPPRESS),
    line="collectives and messages of a layout: time, bandwidth, slow links",
    about="Measure collectives and messages of a layout: time, bandwidth, slow links.",
    examples=(
        "frontier-llm bench comm train_small --max 16MiB",
        "frontier-llm bench comm train_small --emit-machine mine.yaml",
    ),
)
def comm(args: argparse.Namespace) -> int:
    """Measure communication in the run's layout, on a launcher's ranks or on local ranks."""
    from frontier_llm.cli.ranks import measure_on_ranks

    if args.hang_test:
        from frontier_llm.cli.hang_test import hang_test

        return hang_test(args)

    def measure(config: RunConfig, place: RankEnv | None) -> None:
        from frontier_llm.errors import LayoutError

        if place is None:
            raise LayoutError(
                "a layout of one rank has no communication",
                "add e.g. parallel.tensor=2, or start the command with srun",
                "bench comm",
            )
        from frontier_llm.blueprint.layout import layout_of
        from frontier_llm.experiments.measure import links
        from frontier_llm.experiments.measure.pieces import bench_pieces
        from frontier_llm.training.join import joined

        with joined(config, place) as (_, mesh, device):
            largest = args.max or size_of("4GiB" if device.type == "cuda" else "16MiB")
            measurements = links.bench_comm(mesh, device, links.sizes_between(min(args.min, largest), largest))
            pieces = bench_pieces(mesh, config.model, layout_of(config, mesh.world.size), device)
            pairs = [] if args.no_pairs else links.bench_pairs(mesh, device)
            memory = links.communicator_memory(mesh, device)
            if mesh.world.rank == 0:
                measured = _Measured(measurements, pieces, pairs, memory, place.local_world_size)
                _write_files(args, config, mesh, measured)
                _report(args, config, measured)

    return measure_on_ranks(args, measure)


class _Measured(NamedTuple):
    """Results of `bench comm` on rank 0."""

    links: list[LinkTime]
    pieces: list[PiecesTime]
    pairs: list[Pair]
    memory: CommunicatorMemory | None
    per_node: int  # ranks on a node


def _write_files(args: argparse.Namespace, config: RunConfig, mesh: Mesh, measured: _Measured) -> None:
    """Write the table of algorithms and the machine file that the user requested."""
    import platform

    from frontier_llm import log
    from frontier_llm.errors import LayoutError
    from frontier_llm.experiments.measure.link_tables import algorithm_rules, node_tables
    from frontier_llm.experiments.measure.machine_file import write_machine, write_yaml
    from frontier_llm.machine.load import load_machine, own_stack

    where = f"frontier-llm bench comm on {platform.node()}"
    if args.emit_algorithms:
        nodes = {
            axis.name: len({rank // measured.per_node for rank in axis.ranks})
            for axis in (mesh.tp, mesh.cp, mesh.dp, mesh.pp, mesh.world)
        }
        rules = algorithm_rules(measured.links, nodes, where)
        write_yaml(args.emit_algorithms, {"title": "measured", "rules": rules})
        log.info(
            f"wrote {len(rules)} rules to {args.emit_algorithms}: use them with comm.algorithms={args.emit_algorithms}"
        )
    if args.emit_machine:
        try:
            tables = node_tables(measured.links, measured.per_node, where)
        except ValueError as error:
            raise LayoutError(
                str(error),
                "measure a layout whose tensor-parallel ranks fit into a node",
                "--emit-machine",
            ) from error
        base = config.machine
        content: dict[str, Any] = {
            "base": base,
            "title": f"{base}, collectives measured",
            "node": {"collectives": tables},
        }
        if numbers := stack_numbers(measured.pieces, measured.memory, where):
            content["stacks"] = {own_stack(load_machine(base)): numbers}
        write_machine(args.emit_machine, content)
        log.info(
            f"wrote {args.emit_machine} ({where}): use it with `frontier-llm plan MODEL --machine {args.emit_machine}`"
        )


def stack_numbers(pieces: list[PiecesTime], memory: CommunicatorMemory | None, where: str) -> dict[str, dict[str, Any]]:
    """Return the measured constants of this package's stack, as a machine file has them. `where` is their source."""
    from frontier_llm.experiments.measure.machine_file import rounded
    from frontier_llm.experiments.measure.pieces import chunk_overlap

    measured: dict[str, float] = {}
    if pieces:
        measured["chunk_overlap"] = chunk_overlap(pieces)
    if memory is not None:
        measured["reserve_gib"] = memory.measured_bytes / GIB
    return {key: {"value": rounded(value), "tag": "measured", "source": where} for key, value in measured.items()}


def _report(args: argparse.Namespace, config: RunConfig, measured: _Measured) -> None:
    from frontier_llm.experiments.measure.link_tables import contention, draw_pairs, link_kind, slow_links
    from frontier_llm.machine.load import load_machine

    pairs = measured.pairs
    kind = link_kind(measured.per_node, load_machine(config.machine).node.links)
    slow = slow_links(pairs, kind)
    names = ("axis", "operation", "bytes", "slowdown")
    content = {
        "rows": [measurement.as_json() for measurement in measured.links],
        "contention": [dict(zip(names, row, strict=True)) for row in contention(measured.links)],
        "pieces": [one.as_json() for one in measured.pieces],
        "pairs": [{**vars(pair), "kind": kind(pair.a, pair.b)} for pair in pairs],
        "slow_links": [vars(pair) for pair in slow],
        "memory": None if measured.memory is None else vars(measured.memory),
    }
    lines = [*_lines(measured.links, pairs, slow, kind), *_piece_lines(measured.pieces), *memory_lines(measured.memory)]
    show(args, content, lambda: "\n".join(lines))
    if args.figures and pairs:  # drawn last, because a missing plotting package must not prevent the output above
        draw_pairs(args.figures, pairs)


def memory_lines(memory: CommunicatorMemory | None) -> Iterator[str]:
    """Yield a line with the device memory of the communicators, if it was measured."""
    if memory is not None:
        before, warm, measured = (
            format_bytes(size) for size in (memory.before_bytes, memory.warm_bytes, memory.measured_bytes)
        )
        yield (
            f"device memory outside torch: {before} before the first use of {memory.communicators} communicators, "
            f"{warm} after it, {measured} after the measurements: "
            f"{format_bytes(round(memory.per_communicator_bytes))} per communicator"
        )


def _piece_lines(pieces: list[PiecesTime]) -> Iterator[str]:
    for one in pieces:
        alone = f"{format_seconds(one.product_s)} product and {format_seconds(one.collective_s)} {one.operation} each"
        yield (
            f"a matrix product of tp in {one.pieces} pieces ({alone}): {format_seconds(one.together_s)} if overlapped, "
            f"{100 * one.overlap:.0f} % of the communication hidden"
        )


def _lines(
    measurements: list[LinkTime],
    pairs: list[Pair],
    slow: list[Pair],
    kind: Callable[[int, int], str],
) -> Iterator[str]:
    from statistics import median

    head = ("axis", ">ranks", "operation", "algorithm", "groups", ">bytes", ">time", ">algbw GB/s", ">busbw GB/s")
    rows = [
        (
            one.axis,
            one.ranks,
            one.operation,
            one.algorithm,
            one.mode,
            format_bytes(one.bytes),
            format_seconds(one.seconds),
            f"{one.algorithm_gbps:.3f}",
            f"{one.bus_gbps:.3f}",
        )
        for one in measurements
    ]
    yield aligned(head, rows)
    for name in dict.fromkeys(kind(pair.a, pair.b) for pair in pairs):
        rates = [pair.gbps for pair in pairs if kind(pair.a, pair.b) == name]
        yield (
            f"{len(rates)} pairs of ranks, {name}: {min(rates):.3f} to {max(rates):.3f} GB/s one way, median "
            f"{median(rates):.3f}"
        )
    for pair in slow:
        yield f"slow link: global ranks {pair.a} and {pair.b} ({kind(pair.a, pair.b)}): {pair.gbps:.3f} GB/s"
