"""Thousands of layouts as a table of columns, and folds over what they compute, done once for each distinct case.

A formula in numpy reads the same for one `Layout` and for a table of them. What a block does is folded in plain
Python; a search's 60,000 layouts share some hundreds of blocks.

Also how many ranks of an axis share a node (`Seats`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from frontier_llm.blueprint.layout import SHARDING, Layout
from frontier_llm.machine.rates import Number as Number
from frontier_llm.machine.rates import Rates
from frontier_llm.schedule import rule


@dataclass(frozen=True, kw_only=True)
class Layouts(Layout):
    """A table of layouts: a `Layout` whose fields are numpy columns of one length, and a name or a number where all
    share it.

    Whatever takes a `Layout` and says `layouts` takes a table too; what follows from columns, `devices` say, is a
    column.
    """

    def __len__(self) -> int:
        return np.size(self.tp)

    @property
    def shards(self) -> Any:
        """See Layout."""
        return np.where(np.asarray(self.data_shard) > 0, self.data_shard, self.replicas)

    def where(self, rows: Number) -> Layouts:
        """The layouts at a mask or at indices."""
        columns: dict[str, Any] = {
            name: column[rows] for name, column in vars(self).items() if isinstance(column, np.ndarray)
        }
        return replace(self, **columns)

    def row(self, index: int) -> Layout:
        """One layout."""
        return Layout(
            **{
                name: column[index].item() if isinstance(column, np.ndarray) else column
                for name, column in vars(self).items()
            }
        )


def as_table(layouts: Sequence[Layout]) -> Layouts:
    """Layouts that agree in what a table does not tell apart, as a table."""
    alike = ("dtype", "gradient_wire", "optimizer", "etp", "imbalance", "tensor_chunks")
    shared = {name: getattr(layouts[0], name) for name in alike}
    columns: dict[str, Any] = {
        field.name: np.array([getattr(one, field.name) for one in layouts])
        for field in fields(Layout)
        if field.name not in shared
    }
    return Layouts(**columns, **shared)


def over_layouts(layouts: Layout, fold: Callable[[Layout], Any], *also: Number) -> Any:
    """`fold` of a layout; or of every layout of a table, with columns instead of numbers.

    `fold` may read what decides the work of a block, the embedding and the head: tp, cp and its way, ep, the
    microbatch, sequence parallelism, recomputation, and what the columns `also` tell apart; it is called once for each
    combination. It returns a named tuple of numbers, or of such tuples.
    """
    if not isinstance(layouts, Layouts):
        return fold(layouts)
    codes = np.zeros(len(layouts), dtype=np.int64)
    for column in (
        layouts.tp,
        layouts.ep,
        layouts.expert_nodes,
        layouts.cp,
        layouts.context_attention,
        layouts.micro_batch,
        layouts.sequence_parallel,
        layouts.recompute,
        *also,
    ):
        values = distinct(column)
        codes = codes * len(values) + sum(index * (column == value) for index, value in enumerate(values))
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    return _columns([fold(layouts.row(index)) for index in first], inverse)


def _columns(results: Sequence[Any], inverse: np.ndarray) -> Any:
    """A sequence of equal tuples as one tuple of columns."""
    if isinstance(results[0], tuple):
        return type(results[0])(*(_columns(values, inverse) for values in zip(*results, strict=True)))
    return np.array(results, dtype=float)[inverse]


def distinct(column: Any) -> list[Any]:
    """The few values of a column, by first occurrence; faster than sorting it."""
    values = []
    left = np.ones(len(column), dtype=bool)
    while left.any():
        values.append(column[np.argmax(left)].item())
        left &= column != values[-1]
    return values


def stage_length(layers: int, layouts: Layout) -> Number:
    """Layers of the fullest virtual stage where modes of recomputation repeat through them; 0 where it does not
    matter how many there are.
    """
    if not isinstance(layouts, Layouts) or not any("," in modes for modes in distinct(layouts.recompute)):
        return 0 * layouts.pp
    return np.ceil(layers / (layouts.pp * layouts.chunks))


def split(layouts: Layout) -> Any:
    """Whether the schedule runs weight gradients as actions of their own: a bool, or a column."""
    return by_schedule(layouts, lambda name: rule(name).splits_backward)


def by_schedule(layouts: Layout, of: Callable[..., Number], *columns: str, stage: Number | None = None) -> Number:
    """`of(name, ...)` of each layout's schedule, with these fields of the layout and the pipeline rank behind the
    name.
    """
    stages = () if stage is None else (stage,)
    if not isinstance(layouts, Layouts):
        return of(layouts.schedule, *(getattr(layouts, name) for name in columns), *stages)
    fields = np.broadcast_arrays(np.zeros(len(layouts)), *(getattr(layouts, column) for column in columns), *stages)
    result = np.zeros(fields[0].shape)  # the last axis is that of the layouts
    for name in distinct(layouts.schedule):
        rows = layouts.schedule == name
        result[..., rows] = of(name, *(field[..., rows] for field in fields[1:]))
    return result


@dataclass(frozen=True)
class Seats:
    """Where the ranks of each axis sit: how many share a node, and who shares the NICs."""

    cp_per_node: Number
    replicas_per_node: Number  # of dp x cp
    replicas_sharing: Number  # groups of replicas of one node that reduce at the same time
    pp_inside: Number  # 1 = pipeline neighbours sit in the same node
    pp_sharing: Number  # devices of a node that send at the same time


def seats(layouts: Layout, rates: Rates) -> Seats:
    """tp innermost, then cp; then dp (tp-dp-pp) or pp (tp-pp-dp). A node is filled in that order."""
    node = rates.node_devices
    tp = layouts.tp
    cp = layouts.cp
    pp = layouts.pp
    dp = layouts.dp
    tp_inside = np.minimum(tp, node)
    cp_inside = np.minimum(cp, np.maximum(node / tp_inside, 1.0))
    room = np.maximum(node / (tp_inside * cp_inside), 1.0)
    dp_outer = layouts.axis_order == "tp-pp-dp"
    stages_inside = np.where(
        dp_outer,
        np.minimum(pp, room),
        np.where(tp * cp * dp < node, np.minimum(pp, node / (tp * cp * dp)), 1.0),
    )
    replicas = np.where(dp_outer, np.maximum(np.minimum(dp, room / stages_inside), 1.0), np.minimum(dp, room))
    replicas = replicas * cp_inside
    per_node = np.minimum(node, tp * cp * pp * dp)
    return Seats(cp_inside, replicas, np.maximum(per_node / replicas, 1.0), stages_inside > 1, per_node)


def cut(layouts: Layout, stage: int) -> Number:
    """Whether replicas share out what this stage of ZeRO does: 1 optimizer state, 2 gradients, 3 weights."""
    if not isinstance(layouts, Layouts):
        return SHARDING[layouts.sharding] >= stage
    return np.logical_or.reduce([layouts.sharding == name for name, reached in SHARDING.items() if reached >= stage])
