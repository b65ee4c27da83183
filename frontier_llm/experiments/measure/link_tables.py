"""Evaluation of `measure.links`: slow links, contention, and tables for machine files and `comm.algorithms`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from frontier_llm.experiments.measure.calibration import tables_of
from frontier_llm.experiments.measure.links import LinkTime, Pair
from frontier_llm.experiments.measure.machine_file import collectives
from frontier_llm.machine.affinity import link_gbps
from frontier_llm.pages import Chart, figure, write_page

PLANNED = ("all_reduce", "reduce_scatter", "all_gather")  # operations that have tables in a machine file
SLOW_LINK = 0.7  # pairs of ranks below this share of the median bandwidth are reported


def slow_links(pairs: list[Pair], kind: Callable[[int, int], str]) -> list[Pair]:
    """Return pairs whose bandwidth is below SLOW_LINK times the median of all pairs with the same `kind`."""
    by_kind: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_kind.setdefault(kind(pair.a, pair.b), []).append(pair)
    return [
        pair
        for alike in by_kind.values()
        for pair in alike
        if pair.gbps < SLOW_LINK * median(other.gbps for other in alike)
    ]


def link_kind(ranks_per_node: int, links: str | None) -> Callable[[int, int], str]:
    """Return a function that names the kind of link between two global ranks. Links of one kind should be equally fast.

    `links` is the machine file's `node.links`.
    """

    def kind(a: int, b: int) -> str:
        if a // ranks_per_node != b // ranks_per_node:
            return "between nodes"
        if links != "mi250x":
            return "inside a node"
        direct = link_gbps(a % ranks_per_node, b % ranks_per_node)
        if direct:
            return f"{direct:g} GB/s of Infinity Fabric"
        return "routed over other GCDs"

    return kind


def node_tables(measurements: list[LinkTime], ranks_per_node: int, source: str) -> dict[str, Any]:
    """Return the content of `node.collectives` of a machine file, which the planner reads.

    It has the times of flat collectives in groups inside a node, measured with all groups active at the same time.
    Raises ValueError if no axis lies inside a node.
    """
    inside = [
        (m.operation, m.ranks, m.bytes, m.seconds)
        for m in measurements
        if m.algorithm == "flat" and m.mode == "together" and m.ranks <= ranks_per_node and m.operation in PLANNED
    ]
    if not inside:
        raise ValueError("no axis of this layout lies inside a node")
    return collectives(tables_of(inside), {"tag": "measured", "source": source})


def contention(measurements: list[LinkTime]) -> list[tuple[str, str, int, float]]:
    """Return (axis, operation, bytes, time with all groups active / time with one group active) for each case that has
    both times.
    """
    alone = {(m.axis, m.operation, m.algorithm, m.bytes): m.seconds for m in measurements if m.mode == "alone"}
    return [
        (m.axis, m.operation, m.bytes, m.seconds / alone[key])
        for m in measurements
        if m.mode == "together" and (key := (m.axis, m.operation, m.algorithm, m.bytes)) in alone
    ]


def algorithm_rules(measurements: list[LinkTime], nodes: dict[str, int], where: str) -> list[dict[str, Any]]:
    """Return rows of an algorithm table (configs/algorithms) from measured flat and hierarchical times.

    A row gives a message size from which another algorithm is faster. `nodes[axis]` is the number of nodes that the
    axis spans. `where` names machine and date as the source.
    """
    times = {(m.axis, m.operation, m.bytes, m.algorithm): m.seconds for m in measurements if m.mode == "together"}
    rows: list[dict[str, Any]] = []
    for axis, operation in sorted({(m.axis, m.operation) for m in measurements if m.algorithm == "hierarchical"}):
        chosen = "flat"
        for size in sorted({size for a, o, size, _ in times if (a, o) == (axis, operation)}):
            flat = times[axis, operation, size, "flat"]
            staged = times[axis, operation, size, "hierarchical"]
            better = "hierarchical" if staged < flat else "flat"
            if better != chosen:
                gain = max(flat, staged) / min(flat, staged)
                source = f"{where}: axis {axis}, {gain:.1f} times faster at {size} bytes"
                rule = {"operation": operation, "nodes_from": nodes[axis], "bytes_from": size, "algorithm": better}
                rows.append({**rule, "tag": "measured", "source": source})
                chosen = better
    return sorted(rows, key=lambda row: (row["operation"], row["nodes_from"], row["bytes_from"]))


def draw_pairs(path: Path, pairs: list[Pair]) -> None:
    """Write a page with a heat map of the bandwidth between all pairs of ranks."""
    ranks = sorted({rank for pair in pairs for rank in (pair.a, pair.b)})
    rates = {frozenset((pair.a, pair.b)): pair.gbps for pair in pairs}
    square = [[rates.get(frozenset((a, b))) for b in ranks] for a in ranks]
    names = [str(rank) for rank in ranks]
    colors = {"colorscale": "Viridis", "zmin": 0, "colorbar": {"title": {"text": "GB/s, one way"}}}
    trace = {
        "type": "heatmap",
        "x": names,
        "y": names,
        "z": square,
        **colors,
        "hovertemplate": "ranks %{x} and %{y}: %{z:.3g} GB/s<extra></extra>",
    }
    layout = {"xaxis": {"type": "category"}, "yaxis": {"type": "category", "scaleanchor": "x"}}
    chart = Chart(
        "Messages between pairs of ranks",
        "global rank",
        "global rank",
        [trace],
        height_px=560,
        layout=layout,
    )
    write_page(path, "Links", f"{len(pairs)} pairs of {len(ranks)} ranks, one at a time.", [figure(chart)])
