"""Thousands of layouts as a table of columns, and folds over what they compute, done once for each distinct case.

A formula in numpy reads the same for a `Layout` and for `Layouts`: both have the same fields. What a block does is folded in plain
Python; a search's 60,000 layouts share some hundreds of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import numpy as np

from frontier_llm.blueprint.layout import Layout
from frontier_llm.schedule import rule

Number = Any  # int, float or a numpy array of them; arrays broadcast against each other


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """A table of layouts: the fields of `Layout` as columns of one length; what all share stays a name."""

    tp: np.ndarray
    cp: np.ndarray
    pp: np.ndarray
    dp: np.ndarray
    ep: np.ndarray
    chunks: np.ndarray
    schedule: np.ndarray
    micro_batch: np.ndarray
    microbatches: np.ndarray
    sequence_parallel: np.ndarray
    recompute: np.ndarray
    sharding: np.ndarray
    data_shard: np.ndarray
    axis_order: np.ndarray
    context_attention: np.ndarray
    expert_nodes: np.ndarray
    dtype: str = "bf16"
    gradient_wire: str = "full"
    optimizer: str = "adamw"
    validated: str = "before"
    etp: int = 1
    imbalance: float = 1.0
    tensor_chunks: int = 1

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def devices(self) -> np.ndarray:
        """tp · cp · pp · dp."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def replicas(self) -> np.ndarray:
        """Ranks that hold the same weights."""
        return self.dp * self.cp

    @property
    def shards(self) -> np.ndarray:
        """Of them, those that share out what is cut."""
        return np.where(self.data_shard > 0, self.data_shard, self.replicas)

    @property
    def edp(self) -> np.ndarray:
        """Replicas of each expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def global_batch(self) -> np.ndarray:
        """Sequences of one step over all replicas."""
        return self.micro_batch * self.microbatches * self.dp

    def where(self, rows: np.ndarray) -> Layouts:
        """The layouts at a mask or at indices."""
        return replace(self, **{name: column[rows] for name, column in vars(self).items() if isinstance(column, np.ndarray)})

    def row(self, index: int) -> Layout:
        """One layout."""
        return Layout(**{name: column[index].item() if isinstance(column, np.ndarray) else column for name, column in vars(self).items()})


def as_table(layouts: Sequence[Layout]) -> Layouts:
    """Layouts that agree in what a table does not tell apart, as a table."""
    shared = {field.name: getattr(layouts[0], field.name) for field in fields(Layouts) if field.default is not MISSING}
    columns: dict[str, Any] = {
        field.name: np.array([getattr(one, field.name) for one in layouts]) for field in fields(Layout) if field.name not in shared
    }
    return Layouts(**columns, **shared)


def over_layouts(layouts: Layout | Layouts, fold: Callable[[Layout], Any], *also: Number) -> Any:
    """`fold` of a layout; or of every layout of a table, with columns instead of numbers.

    `fold` may read what decides the work of a block, the embedding and the head: tp, cp and its way, ep, the microbatch, sequence parallelism, recomputation,
    and what the columns `also` tell apart; it is called once for each combination. It returns a named tuple of numbers, or of such tuples.
    """
    if isinstance(layouts, Layout):
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


def distinct(column: np.ndarray) -> list[Any]:
    """The few values of a column, by first occurrence; faster than sorting it."""
    values, left = [], np.ones(len(column), dtype=bool)
    while left.any():
        values.append(column[np.argmax(left)].item())
        left &= column != values[-1]
    return values


def stage_length(layers: int, layouts: Layout | Layouts) -> Number:
    """Layers of the fullest virtual stage where modes of recomputation repeat through them; 0 where it does not matter how many there are."""
    if isinstance(layouts, Layout) or not any("," in modes for modes in distinct(layouts.recompute)):
        return 0 * layouts.pp
    return np.ceil(layers / (layouts.pp * layouts.chunks))


def split(layouts: Layout | Layouts) -> Any:
    """Whether the schedule runs weight gradients as actions of their own: a bool, or a column."""
    return by_schedule(layouts, lambda name: rule(name).splits_backward)


def steps_overlap(layouts: Layout | Layouts) -> Any:
    """Whether a rank begins its next step before others have ended this one: a bool, or a column."""
    return (layouts.validated == "after") & (layouts.pp > 1) & (by_schedule(layouts, lambda name: rule(name).staggered) > 0)


def by_schedule(layouts: Layout | Layouts, of: Callable[..., Number], *columns: str, stage: Number | None = None) -> Number:
    """`of(name, ...)` of each layout's schedule, with these fields of the layout and the pipeline rank behind the name."""
    stages = () if stage is None else (stage,)
    if isinstance(layouts, Layout):
        return of(layouts.schedule, *(getattr(layouts, name) for name in columns), *stages)
    fields = np.broadcast_arrays(np.zeros(len(layouts)), *(getattr(layouts, column) for column in columns), *stages)
    result = np.zeros(fields[0].shape)  # the last axis is that of the layouts
    for name in distinct(layouts.schedule):
        rows = layouts.schedule == name
        result[..., rows] = of(name, *(field[..., rows] for field in fields[1:]))
    return result
