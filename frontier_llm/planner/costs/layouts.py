"""Tables of layouts: thousands of layouts as numpy columns, so that one formula computes the costs of all of them.

The same formula accepts one `Layout` or a table. Only the work lists of a transformer block are summed in plain Python,
once for each distinct block. The 60,000 layouts of a search have only some hundreds of distinct blocks.

The module also computes how many ranks of each parallel axis share a node (`RanksPerNode`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from frontier_llm.blueprint.layout import SHARDING, Layout, layer_kinds
from frontier_llm.config import ModelConfig
from frontier_llm.machine.rates import Number as Number
from frontier_llm.machine.rates import Rates
from frontier_llm.schedule import rule


@dataclass(frozen=True, kw_only=True)
class Layouts(Layout):
    """A table of layouts: a `Layout` whose fields are numpy columns of one length.

    A field that is equal for all layouts of the table may be a single string or number instead of a column. Functions
    with a parameter `layouts` accept one `Layout` or a table. Properties that depend on columns, for example `devices`,
    are columns.
    """

    def __len__(self) -> int:
        return np.size(self.tp)

    @property
    def shards(self) -> Any:
        """Number of replicas that together hold one copy of the sharded state, as a column."""
        return np.where(np.asarray(self.data_shard) > 0, self.data_shard, self.replicas)

    def where(self, rows: Number) -> Layouts:
        """Return the table of the layouts that a mask or an array of indices selects."""
        columns: dict[str, Any] = {
            name: column[rows] for name, column in vars(self).items() if isinstance(column, np.ndarray)
        }
        return replace(self, **columns)

    def row(self, index: int) -> Layout:
        """Return the layout at `index`."""
        return Layout(
            **{
                name: column[index].item() if isinstance(column, np.ndarray) else column
                for name, column in vars(self).items()
            }
        )


def as_table(layouts: Sequence[Layout]) -> Layouts:
    """Return a table of the layouts. The fields in `alike` are not columns, and must be equal for all layouts."""
    alike = ("dtype", "gradient_wire", "optimizer", "etp", "imbalance", "tensor_chunks")
    shared = {name: getattr(layouts[0], name) for name in alike}
    columns: dict[str, Any] = {
        field.name: np.array([getattr(one, field.name) for one in layouts])
        for field in fields(Layout)
        if field.name not in shared
    }
    return Layouts(**columns, **shared)


def over_layouts(layouts: Layout, fold: Callable[[Layout], Any], *also: Number) -> Any:
    """Return `fold(layout)`, or for a table its results for every layout, with columns instead of numbers.

    `fold` is called once for each combination of the fields on which the work of a block, the embedding and the head
    depends. These are tp, ep, expert_nodes, cp and its attention algorithm, the microbatch size, sequence parallelism
    and recomputation. `also` has the columns of further fields. `fold` must not depend on other fields. It returns a
    named tuple of numbers, or of such tuples.
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
    """Convert a sequence of tuples of one type to one tuple of columns."""
    if isinstance(results[0], tuple):
        return type(results[0])(*(_columns(values, inverse) for values in zip(*results, strict=True)))
    return np.array(results, dtype=float)[inverse]


def distinct(column: Any) -> list[Any]:
    """Return the distinct values of a column, in the order of their first occurrence.

    For a few values this is faster than sorting the column.
    """
    values = []
    left = np.ones(len(column), dtype=bool)
    while left.any():
        values.append(column[np.argmax(left)].item())
        left &= column != values[-1]
    return values


def stage_length(model: ModelConfig, layouts: Layout) -> Number:
    """Return the number of layers of the fullest virtual stage, if the work of an average layer depends on it.

    It does if layouts of a table alternate recomputation modes, or if only some layers have experts. Otherwise the
    result is 0.
    """
    if not isinstance(layouts, Layouts):
        return 0 * layouts.pp
    if len(layer_kinds(model)) == 1 and not any("," in modes for modes in distinct(layouts.recompute)):
        return 0 * layouts.pp
    return np.ceil(model.layers / (layouts.pp * layouts.chunks))


def split(layouts: Layout) -> Any:
    """Return whether the schedule runs weight gradients as separate actions: a bool, or a column."""
    return by_schedule(layouts, lambda name: rule(name).splits_backward)


def by_schedule(layouts: Layout, of: Callable[..., Number], *columns: str, stage: Number | None = None) -> Number:
    """Return `of(name, ...)` for the schedule of each layout.

    The arguments after the name are the fields `columns` of the layout and, if given, the pipeline rank `stage`.
    """
    stages = () if stage is None else (stage,)
    if not isinstance(layouts, Layouts):
        return of(layouts.schedule, *(getattr(layouts, name) for name in columns), *stages)
    fields = np.broadcast_arrays(np.zeros(len(layouts)), *(getattr(layouts, column) for column in columns), *stages)
    result = np.zeros(fields[0].shape)  # the last axis is the index of the layout
    for name in distinct(layouts.schedule):
        rows = layouts.schedule == name
        result[..., rows] = of(name, *(field[..., rows] for field in fields[1:]))
    return result


@dataclass(frozen=True)
class RanksPerNode:
    """How many ranks of each axis share a node, and how many groups of ranks share the NICs of a node."""

    cp_per_node: Number
    replicas_per_node: Number  # Number of ranks of dp x cp in a node.
    replicas_sharing: Number  # Number of groups of replicas of one node that reduce at the same time.
    pp_inside: Number  # True if pipeline neighbours are in the same node.
    pp_sharing: Number  # Number of devices of a node that send pipeline messages at the same time.


def ranks_per_node(layouts: Layout, rates: Rates) -> RanksPerNode:
    """Return the placement of ranks on nodes.

    Consecutive ranks share a node. tp is the innermost axis, then cp, then dp (axis order tp-dp-pp) or pp (tp-pp-dp).
    """
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
    return RanksPerNode(cp_inside, replicas, np.maximum(per_node / replicas, 1.0), stages_inside > 1, per_node)


def cut(layouts: Layout, stage: int) -> Number:
    """Return whether the layout shards at least what ZeRO `stage` shards: 1 optimizer state, 2 gradients, 3 weights."""
    if not isinstance(layouts, Layouts):
        return SHARDING[layouts.sharding] >= stage
    return np.logical_or.reduce([layouts.sharding == name for name, reached in SHARDING.items() if reached >= stage])
