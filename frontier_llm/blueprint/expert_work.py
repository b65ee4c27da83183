"""Work of a layer's experts on one rank: lists of computation, communication and bytes kept for backward.

The work of a layer without its experts is in `blueprint/work.py`. A row is one token for one of its experts. The
routers decide how many rows a rank receives. By default, every rank receives an equal number of rows, times `imbalance`
for the busiest rank. Tests instead give the real numbers (`Rows`), and compare the lists with the bytes that a run has
sent. With a capacity limit the number of sent rows is fixed. T is the number of tokens of a microbatch. A tensor rank
routes T / tp tokens, and each token makes top_k x etp rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, comb
from typing import NamedTuple

from frontier_llm.blueprint.items import (
    FULL,
    Collective,
    HostWait,
    Item,
    Keep,
    Pass,
    Phase,
    Product,
    Software,
    Under,
    rank_tokens,
    weight_gradient,
)
from frontier_llm.blueprint.layout import DTYPE_BYTES, Layout, statistics_bytes
from frontier_llm.config import ModelConfig, MoeConfig

ROUTING = "router"
EXPERTS = "experts' products"
DISPATCH = "tokens to experts and back"
COUNT_BYTES = 8
CHOICE_BYTES = 4
# GPU operations that the host launches in a dispatch (parallel/expert/plan.py) after it has waited for the numbers
# of rows and before the rows are sent. They are a copy to the host, the indices of the rows, the gathering of rows and
# weights, and two messages. The copy counts as two operations.
LAUNCHES_AFTER_WAIT = 10


class Rows(NamedTuple):
    """Numbers of token rows of one microbatch and layer on one rank, padding rows included
    (`parallel/expert/plan.py`).

    With the two-stage all-to-all, `sent` and `received` count the second stage, inside the node.
    """

    sent: float  # rows that this rank sends to experts
    received: float  # rows that arrive; with a capacity limit all of them are kept until backward
    computed: float  # rows that this rank's experts compute.
    # For the two-stage all-to-all: number of nodes, and rows that this rank sends to and receives from other nodes in
    # the first stage
    nodes: int = 1
    to_nodes: float = 0
    from_nodes: float = 0


def room_of(moe: MoeConfig, tokens: int) -> int | None:
    """Return the capacity of an expert: the rows that it accepts from a rank's `tokens`. None means no limit."""
    if moe.capacity is None:
        return None
    return ceil(tokens * moe.top_k / moe.experts * moe.capacity)


def most_rows(room: int, experts: int, tokens: int, choices: int) -> int:
    """Return the largest number of rows that `experts` experts may receive from `tokens` tokens, each with `choices`
    experts.

    Each expert accepts `room` rows. With a capacity limit exactly this many rows are sent, padded if necessary.
    """
    return min(room * experts, tokens * min(choices, experts))


def nodes_of_a_token(experts: int, top_k: int, nodes: int) -> float:
    """Return the mean number of nodes with at least one expert of a token, if all choices are equally likely."""
    return nodes * (1 - comb(experts - experts // nodes, top_k) / comb(experts, top_k))


def even_rows(model: ModelConfig, layout: Layout) -> Rows:
    """Return the number of rows of a rank if every expert is chosen equally often.

    The rows of the rank's experts are multiplied by `layout.imbalance`, up to the capacity limit.
    """
    assert model.moe is not None
    tokens = rank_tokens(model, layout) // layout.tp
    nodes = layout.expert_nodes
    busy = layout.imbalance
    rows = tokens * model.moe.top_k * layout.etp
    capacity = model.moe.capacity
    if capacity is not None:
        return _bounded_rows(model.moe, layout, tokens, rows * min(busy, capacity))
    if nodes == 1:
        return Rows(rows, rows * busy, rows * busy)
    travelling = tokens * nodes_of_a_token(model.moe.experts, model.moe.top_k, nodes)
    return Rows(
        sent=rows,
        received=rows * busy,
        computed=rows * busy,
        nodes=nodes,
        to_nodes=travelling,
        from_nodes=travelling,
    )


def _bounded_rows(moe: MoeConfig, layout: Layout, tokens: int, computed: float) -> Rows:
    room = room_of(moe, tokens)
    nodes = layout.expert_nodes
    ranks = layout.ep * layout.etp
    assert room is not None
    local = moe.experts * layout.etp // ranks
    choices = moe.top_k
    along_rail = 0
    if nodes > 1:
        along_rail = nodes * most_rows(room * moe.experts // nodes, 1, tokens, nodes)
        room = room * nodes
        tokens = along_rail
        ranks = ranks // nodes
    rows = ranks * most_rows(room, local, tokens, choices)
    return Rows(
        sent=rows,
        received=rows,
        computed=computed,
        nodes=nodes,
        to_nodes=along_rail,
        from_nodes=along_rail,
    )


def _host_waits(moe: MoeConfig, rows: Rows, ranks: int) -> int:
    """Return the number of times that the host waits for row counts from the device in one layer."""
    if moe.capacity is not None:
        return 0
    if rows.nodes > 1:
        return 2
    return int(ranks > 1)


def expert_work(model: ModelConfig, layout: Layout, software: Software, rows: Rows | None = None) -> Iterator[Item]:
    """Yield the work of router, dispatch, experts and combine. `rows` defaults to `even_rows`."""
    moe = model.moe
    assert moe is not None
    rows = rows or even_rows(model, layout)
    yield from _load_sums(moe, layout)
    yield from _gathers_of_outputs(model, layout)
    yield from _routing(model, moe, layout)
    if moe.shared_gate:
        yield from _shared_gate_work(model, layout)
    yield from _dispatch_and_combine(model, layout, software, rows)
    yield from _experts_products(model, layout, software, rows)


def _send(
    phase: Phase,
    axis: str,
    operation: str,
    size_bytes: float,
    again: tuple[str, ...] = (),
    under: Under = Under.NOTHING,
) -> Item:
    """Return a collective of the experts. `again` are the recompute modes that repeat it."""
    return Item(phase, DISPATCH, Collective(axis, operation, int(size_bytes), under), again)


def _load_sums(moe: MoeConfig, layout: Layout) -> Iterator[Item]:
    """Yield the all-reduces of the experts' load over the ranks that share a sequence.

    A balance loss per sequence needs the load of the complete sequence.
    """
    if moe.balance == "global":
        return
    size_bytes = layout.micro_batch * moe.experts * statistics_bytes(layout.dtype)
    for axis, degree in (("tp", layout.tp), ("cp", layout.cp)):
        if degree > 1:
            yield _send(Phase.F, axis, "all_reduce", size_bytes, FULL)


def _gathers_of_outputs(model: ModelConfig, layout: Layout) -> Iterator[Item]:
    """Yield the all-gathers over tp of the experts' outputs.

    They are needed without sequence parallelism, because each tensor rank routes its part of the tokens.
    """
    if layout.tp == 1 or layout.sequence_parallel:
        return
    size_bytes = DTYPE_BYTES[layout.dtype] * rank_tokens(model, layout) * model.hidden
    yield _send(
        Phase.F,
        "tp",
        "all_gather",
        size_bytes,
    )
    yield _send(
        Phase.I,
        "tp",
        "all_gather",
        size_bytes,
    )


def _routing(model: ModelConfig, moe: MoeConfig, layout: Layout) -> Iterator[Item]:
    """Yield the router's products, and the passes for softmax, choice of experts and balance loss."""
    t = rank_tokens(model, layout) // layout.tp
    H = model.hidden
    E = moe.experts
    passes = Pass(statistics_bytes(layout.dtype) * t * (2 * H + 6 * E), 12)
    yield Item(Phase.F, ROUTING, Product(t, E, H), FULL)
    yield Item(Phase.I, ROUTING, Product(t, H, E))
    yield Item(Phase.W, ROUTING, Product(E, H, t))
    yield Item(Phase.F, ROUTING, passes, FULL)
    yield Item(Phase.I, ROUTING, passes)


def _shared_gate_work(model: ModelConfig, layout: Layout) -> Iterator[Item]:
    """Yield the work of scaling the shared expert's output by a sigmoid of the token."""
    t = rank_tokens(model, layout) // layout.sequence_shards
    H = model.hidden
    size = DTYPE_BYTES[layout.dtype]
    yield Item(Phase.F, ROUTING, Product(t, 1, H), FULL)
    yield Item(Phase.I, ROUTING, Product(t, H, 1))
    yield Item(Phase.W, ROUTING, Product(1, H, t))
    yield Item(Phase.F, ROUTING, Pass(2 * size * t * H, 2), FULL)
    # backward of output x gate: the gradients of both factors, and the sum of the gate's gradient over H
    yield Item(Phase.I, ROUTING, Pass(5 * size * t * H, 4))
    yield Item(Phase.F, ROUTING, Keep(size * t * (H + 1), ("none", "selective")))


class _Exchange(NamedTuple):
    """Dispatch and combine along one axis: the rows that are sent, and what is sent with them."""

    axis: str
    sent: float  # rows to experts
    received: float  # rows from other ranks
    counts: int  # row counts that are sent before the rows
    weights: int = 1  # router weights of each row
    choices: int = 0  # expert indices of each row


def _dispatch_and_combine(model: ModelConfig, layout: Layout, software: Software, rows: Rows) -> Iterator[Item]:
    """Yield the transfer of rows to experts and back, and the passes over memory that order and sum the rows."""
    moe = model.moe
    assert moe is not None
    ranks = layout.ep * layout.etp
    row_bytes = DTYPE_BYTES[layout.dtype] * model.hidden
    yield Item(
        Phase.F,
        DISPATCH,
        HostWait(_host_waits(moe, rows, ranks) * LAUNCHES_AFTER_WAIT),
        FULL,
    )
    for exchange in _exchanges(moe, layout, software, rows):
        yield from _all_to_alls(exchange, row_bytes, statistics_bytes(layout.dtype), bool(moe.shared_hidden))
    if _gathers_rows(layout, software, rows):
        for phase, again in ((Phase.F, FULL), (Phase.I, ())):
            yield _send(phase, "tp", "all_gather", rows.received * row_bytes, again)
            yield _send(phase, "tp", "reduce_scatter", rows.received * row_bytes)
    # Rows are gathered before the dispatch and reordered after it. The combine reverses both and sums the rows.
    moved = row_bytes * 2 * (rows.sent + rows.received + rows.to_nodes + rows.from_nodes)
    yield Item(
        Phase.F,
        DISPATCH,
        Pass(2 * moved, 8),
        FULL,
    )
    yield Item(
        Phase.I,
        DISPATCH,
        Pass(2 * moved, 8),
    )


def _gathers_rows(layout: Layout, software: Software, rows: Rows) -> bool:
    """Return True if a row is sent to one of the ranks that split its expert, and is then gathered over tp."""
    return software.expert_rows_gathered and layout.etp > 1 and rows.nodes == 1


def _exchanges(moe: MoeConfig, layout: Layout, software: Software, rows: Rows) -> Iterator[_Exchange]:
    """Yield the exchanges of one layer: with two stages first between nodes, then inside the node."""
    E = moe.experts
    etp = layout.etp
    if rows.nodes > 1:
        yield _Exchange(
            "ep.rail",
            rows.to_nodes,
            rows.from_nodes,
            rows.nodes,
            moe.top_k,
            moe.top_k,
        )
    if _gathers_rows(layout, software, rows):
        if layout.ep > 1:
            yield _Exchange(
                "ep.once",
                rows.sent / etp,
                rows.received / etp,
                E,
            )
    elif layout.ep * etp > rows.nodes:
        axis = "ep" if rows.nodes == 1 else "ep.node"
        yield _Exchange(
            axis,
            rows.sent,
            rows.received,
            E * etp // rows.nodes,
        )


def _all_to_alls(exchange: _Exchange, row_bytes: int, weight_bytes: int, has_shared: bool) -> Iterator[Item]:
    """Yield the all-to-alls of an exchange, forward and backward.

    A shared expert, if there is one, overlaps the dispatch in forward and the gradient of the dispatch in backward.
    With two stages it overlaps only the stage between nodes.
    """
    under_rows = Under.SHARED if has_shared and exchange.axis != "ep.node" else Under.OTHER

    def send(phase: Phase, size_bytes: float, again: tuple[str, ...] = (), under: Under = Under.OTHER) -> Item:
        return _send(phase, exchange.axis, "all_to_all", size_bytes, again, under)

    sent_bytes = exchange.sent * row_bytes
    received_bytes = exchange.received * row_bytes
    yield send(
        Phase.F,
        exchange.counts * COUNT_BYTES,
        FULL,
    )
    yield send(
        Phase.F,
        sent_bytes,
        FULL,
        under_rows,
    )
    yield send(
        Phase.F,
        exchange.sent * exchange.weights * weight_bytes,
        FULL,
    )
    if exchange.choices:
        yield send(Phase.F, exchange.sent * exchange.choices * CHOICE_BYTES, FULL)
    yield send(
        Phase.F,
        received_bytes,
    )
    yield send(
        Phase.I,
        sent_bytes,
    )
    yield send(
        Phase.I,
        received_bytes,
        under=under_rows,
    )
    yield send(
        Phase.I,
        exchange.received * exchange.weights * weight_bytes,
    )


def _experts_products(model: ModelConfig, layout: Layout, software: Software, rows: Rows) -> Iterator[Item]:
    """Yield the matrix products of this rank's experts, and the tensors that are kept for backward."""
    moe = model.moe
    assert moe is not None
    H = model.hidden
    f = model.expert_hidden // layout.etp
    local = moe.experts // layout.ep
    t = rank_tokens(model, layout) // layout.tp
    size = DTYPE_BYTES[layout.dtype]
    wide = statistics_bytes(layout.dtype)
    m = round(rows.computed / local)
    up = f * (1 + model.gated)
    held = rows.computed if moe.capacity is None else rows.received
    for outputs, inputs, name in ((up, H, "up"), (H, f, "down")):
        forward = Product(m, outputs, inputs, local, f"experts.{name}", fp8=True, grouped=True)
        yield Item(Phase.F, EXPERTS, forward, FULL)
        yield Item(Phase.I, EXPERTS, replace(forward, n=inputs, k=outputs))
        gradient = replace(forward, m=outputs, n=inputs, k=m)
        yield from weight_gradient(EXPERTS, gradient, software)
    yield Item(
        Phase.F,
        EXPERTS,
        Pass(size * held * (up + f), 1),
        FULL,
    )
    yield Item(
        Phase.I,
        EXPERTS,
        Pass(size * held * (2 * up + f), 1),
    )
    kept = size * held * (H + up + f * (1 + 2 * (model.activation == "geglu_tanh"))) + wide * (
        held + 4 * t * moe.experts
    )
    yield Item(Phase.F, EXPERTS, Keep(kept + size * t * H, ("none", "selective")))  # last term: the router's input
