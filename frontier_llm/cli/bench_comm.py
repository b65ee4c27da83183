"""frontier-llm bench comm RUN [key=value …]: what the links of a layout deliver."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frontier_llm.config import RunConfig

from frontier_llm.cli.arguments import add_run, size_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the bench."""
    add_run(parser, "its layout is measured, with comm.algorithms=hierarchical both algorithms")
    parser.add_argument("--min", type=size_of, default=size_of("1KiB"), metavar="SIZE", help="smallest message (default: 1KiB)")
    parser.add_argument("--max", type=size_of, metavar="SIZE", help="largest message (default: 16MiB on CPU, 4GiB on GPUs)")
    parser.add_argument("--no-pairs", action="store_true", help="leave out the messages between all pairs of ranks")
    parser.add_argument("--emit", type=Path, metavar="FILE", help="write a measured algorithm table for comm.algorithms")
    parser.add_argument("--machine-file", type=Path, metavar="FILE", help="write a machine file with the measured collectives for `plan`")
    parser.add_argument("--heatmap", type=Path, metavar="FILE", help="draw the bandwidth of all pairs (PNG, SVG or PDF)")


def run(args: argparse.Namespace) -> int:
    """Measure in the run's layout; joins a launcher's ranks or starts local ones."""
    from frontier_llm.cli.checks import check
    from frontier_llm.cli.local_ranks import local_world_size, start_local_ranks
    from frontier_llm.cluster.rank_env import discover
    from frontier_llm.config import load_run
    from frontier_llm.errors import LayoutError

    config = load_run(args.run, args.overrides)
    place = discover()
    if place is None:
        world_size = local_world_size(config)
        check(config, world_size, saves=False)
        if world_size == 1:
            raise LayoutError("a layout of one rank moves nothing", "add e.g. parallel.tensor=2, or start it with srun", "bench comm")
        return start_local_ranks(config, world_size, ["bench", "comm", args.run, *args.overrides, *_flags(args)])
    from frontier_llm.measure import links
    from frontier_llm.train.join import joined

    with joined(config, place) as (_, mesh, device):
        largest = args.max or size_of("4GiB" if device.type == "cuda" else "16MiB")
        measurements = links.bench_comm(mesh, device, links.sizes_between(min(args.min, largest), largest))
        pairs = [] if args.no_pairs else links.bench_pairs(mesh, device)
        if mesh.world.rank == 0:
            nodes = {axis.name: _nodes(axis.ranks, place.local_world_size) for axis in (mesh.tp, mesh.dp, mesh.pp, mesh.world)}
            _report(args, config, measurements, pairs, nodes, place.local_world_size)
    return 0


def _flags(args: argparse.Namespace) -> list[str]:
    flags = ["--min", str(args.min), *(["--max", str(args.max)] if args.max else [])]
    flags += [flag for flag, given in (("--json", args.json), ("--no-pairs", args.no_pairs)) if given]
    for flag, path in (("--emit", args.emit), ("--machine-file", args.machine_file), ("--heatmap", args.heatmap)):
        flags += [flag, str(path.resolve())] if path else []
    return flags


def _nodes(ranks: tuple[int, ...], ranks_per_node: int) -> int:
    return len({rank // ranks_per_node for rank in ranks})


def _report(
    args: argparse.Namespace, config: RunConfig, measurements: list[Any], pairs: list[Any], nodes: dict[str, int], per_node: int
) -> None:
    import platform
    from dataclasses import asdict

    from frontier_llm.machine import load_machine
    from frontier_llm.measure import link_tables as measured

    kind = measured.link_kind(per_node, load_machine(config.machine).node.links)
    slow, where = measured.slow_links(pairs, kind), f"frontier-llm bench comm on {platform.node()}"
    if args.emit:
        _emit(args.emit, measured.algorithm_rules(measurements, nodes, where))
    if args.machine_file:
        _write_machine(args.machine_file, config.machine, where, lambda: measured.node_tables(measurements, per_node, where))
    if args.heatmap and pairs:
        _draw(args.heatmap, pairs)
    if args.json:
        names = ("axis", "operation", "bytes", "slowdown")
        content = {
            "rows": [measurement.as_json() for measurement in measurements],
            "contention": [dict(zip(names, row, strict=True)) for row in measured.contention(measurements)],
            "pairs": [{**asdict(pair), "kind": kind(pair.a, pair.b)} for pair in pairs],
            "slow_links": [asdict(pair) for pair in slow],
        }
        print(json.dumps(content, indent=1))
        return
    _print(measurements, pairs, slow, kind)


def _print(measurements: list[Any], pairs: list[Any], slow: list[Any], kind: Callable[[int, int], str]) -> None:
    from statistics import median

    from frontier_llm.units import format_bytes, format_seconds

    what = f"{'axis':<7}{'ranks':>6}  {'operation':<15}{'algorithm':<13}{'groups':<9}"
    print(f"{what}{'bytes':>10}{'time':>10}{'algbw GB/s':>12}{'busbw GB/s':>12}")
    for m in measurements:
        what = f"{m.axis:<7}{m.ranks:>6}  {m.operation:<15}{m.algorithm:<13}{m.mode:<9}"
        print(f"{what}{format_bytes(m.bytes):>10}{format_seconds(m.seconds):>10}{m.algorithm_gbps:>12.3f}{m.bus_gbps:>12.3f}")
    for name in dict.fromkeys(kind(pair.a, pair.b) for pair in pairs):
        rates = [pair.gbps for pair in pairs if kind(pair.a, pair.b) == name]
        print(f"{len(rates)} pairs of ranks, {name}: {min(rates):.3f} to {max(rates):.3f} GB/s one way, median {median(rates):.3f}")
    for pair in slow:
        print(f"slow link: global ranks {pair.a} and {pair.b} ({kind(pair.a, pair.b)}): {pair.gbps:.3f} GB/s")


def _emit(path: Path, rules: list[dict[str, Any]]) -> None:
    import yaml

    from frontier_llm import log

    path.write_text(yaml.safe_dump({"title": "measured", "rules": rules}, sort_keys=False, width=200), encoding="utf-8")
    log.info(f"wrote {len(rules)} rules to {path}: use them with comm.algorithms={path}")


def _write_machine(path: Path, base: str, where: str, tables: Callable[[], dict[str, Any]]) -> None:
    import yaml

    from frontier_llm import log
    from frontier_llm.errors import LayoutError
    from frontier_llm.machine import load_machine

    try:
        content = {"base": base, "title": f"{base}, collectives measured", "node": {"collectives": tables()}}
    except ValueError as error:
        raise LayoutError(str(error), "measure a layout whose tensor degree fits a node", "--machine-file") from error
    path.write_text(yaml.safe_dump(content, sort_keys=False, width=200), encoding="utf-8")
    load_machine(str(path))
    log.info(f"wrote {path} ({where}): use it with `frontier-llm plan MODEL --machine {path}`")


def _draw(path: Path, pairs: list[Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = sorted({rank for pair in pairs for rank in (pair.a, pair.b)})
    place = {rank: index for index, rank in enumerate(ranks)}
    matrix = [[float("nan")] * len(ranks) for _ in ranks]
    for pair in pairs:
        matrix[place[pair.a]][place[pair.b]] = matrix[place[pair.b]][place[pair.a]] = pair.gbps
    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    image = axes.imshow(matrix, cmap="viridis", vmin=0)
    figure.colorbar(image, label="GB/s, one way")
    axes.set(title="messages between pairs of ranks", xlabel="global rank", ylabel="global rank")
    axes.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    figure.savefig(path)
    pyplot.close(figure)
