"""What a layer's experts compute, send and keep, as `blueprint/work.py` says it of everything else.

How many rows a rank gets is the routers' doing: the lists take the even share, times `imbalance` where the busiest rank counts, or the rows
that were routed (`Rows`), for which the ledger must agree. Letters: T tokens of a microbatch, of which a tensor rank routes T / tp;
each makes top_k x etp rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from frontier_llm.blueprint.items import ADDING, FULL, Collective, Item, Keep, Pass, Phase, Product, Software, rank_tokens
from frontier_llm.blueprint.layout import DTYPE_BYTES, Layout, statistics_bytes
from frontier_llm.config import ModelConfig

ROUTING, EXPERTS, DISPATCH = "router", "experts' products", "tokens to experts and back"
COUNT_BYTES = 8


class Rows(NamedTuple):
    """Of one microbatch and layer on one rank, those included that nobody reads (expert_parallel.dispatch)."""

    sent: float
    received: float  # of which the experts compute `computed`
    computed: float


def even_rows(model: ModelConfig, layout: Layout) -> Rows:
    """Where every expert is chosen equally often; the busiest rank's with `layout.imbalance`."""
    assert model.moe is not None
    rows = rank_tokens(model, layout) / layout.tp * model.moe.top_k * layout.etp
    return Rows(rows, rows * layout.imbalance, rows * layout.imbalance)


def expert_work(model: ModelConfig, layout: Layout, software: Software, rows: Rows | None = None) -> Iterator[Item]:
    """Router, dispatch, experts, and their way back."""
    moe = model.moe
    assert moe is not None
    rows, ranks = rows or even_rows(model, layout), layout.ep * layout.etp
    T, H, E, size, wide = rank_tokens(model, layout), model.hidden, moe.experts, *_sizes(layout)
    t, f, local = T // layout.tp, model.expert_hidden // layout.etp, E * layout.etp // ranks

    def send(phase: Phase, operation: str, size_bytes: float, again: tuple[str, ...] = (), axis: str = "ep") -> Item:
        return Item(phase, DISPATCH, Collective(axis, operation, int(size_bytes)), again)

    for axis in () if moe.balance == "global" else ("tp", "cp"):  # the load of whole sequences
        if getattr(layout, axis) > 1:
            yield send(Phase.F, "all_reduce", layout.micro_batch * E * wide, FULL, axis)
    if layout.tp > 1 and not layout.sequence_parallel:  # each tensor rank cuts its part out, and all get the whole again
        yield send(Phase.F, "all_gather", size * T * H, axis="tp")
        yield send(Phase.I, "all_gather", size * T * H, axis="tp")
    yield Item(Phase.F, ROUTING, Product(t, E, H), FULL)
    yield Item(Phase.I, ROUTING, Product(t, H, E))
    yield Item(Phase.W, ROUTING, Product(E, H, t))
    yield Item(Phase.F, ROUTING, Pass(wide * t * (2 * H + 6 * E), 12), FULL)
    yield Item(Phase.I, ROUTING, Pass(wide * t * (2 * H + 6 * E), 12))
    if ranks > 1:
        yield send(Phase.F, "all_to_all", E * layout.etp * COUNT_BYTES, FULL)
        yield send(Phase.F, "all_to_all", rows.sent * size * H, FULL)
        yield send(Phase.F, "all_to_all", rows.sent * wide, FULL)
        yield send(Phase.F, "all_to_all", rows.received * size * H)
        yield send(Phase.I, "all_to_all", rows.sent * size * H)
        yield send(Phase.I, "all_to_all", rows.received * size * H)
        yield send(Phase.I, "all_to_all", rows.received * wide)
    # rows are gathered where they leave, put in order where they arrive, and the other way round when they come back and are summed
    moved = size * H * (2 * rows.sent + 2 * rows.received)
    yield Item(Phase.F, DISPATCH, Pass(2 * moved, 8), FULL)
    yield Item(Phase.I, DISPATCH, Pass(2 * moved, 8))
    m, up = round(rows.computed / local), f * (1 + model.gated)
    for outputs, inputs, name in ((up, H, "up"), (H, f, "down")):
        yield Item(Phase.F, EXPERTS, Product(m, outputs, inputs, local, f"experts.{name}"), FULL)
        yield Item(Phase.I, EXPERTS, Product(m, inputs, outputs, local, f"experts.{name}"))
        yield Item(Phase.W, EXPERTS, Product(outputs, inputs, m, local, f"experts.{name}"))
        yield Item(Phase.W, ADDING, Pass(software.accumulate_bytes * local * outputs * inputs, 0))
    yield Item(Phase.F, EXPERTS, Pass(size * rows.computed * (up + f), 2), FULL)
    yield Item(Phase.I, EXPERTS, Pass(size * rows.computed * 2 * (up + f), 5))
    kept = size * rows.computed * (H + up + f) + wide * (rows.computed + 4 * t * E)
    yield Item(Phase.F, EXPERTS, Keep(kept + size * t * H, ("none", "selective")))  # the router keeps its input too


def _sizes(layout: Layout) -> tuple[int, int]:
    return DTYPE_BYTES[layout.dtype], statistics_bytes(layout.dtype)
