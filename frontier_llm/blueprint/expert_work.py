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
# GPU operations that the host launches in a dispatch (parallel/expert/dispatch.py) after it has waited for the numbers
# of rows and before the rows are sent. They are a copy to the host, the indices of the rows, the gathering of rows and
# weights, and two messages. The copy counts as two operations.
LAUNCHES_AFTER_WAIT = 10


class Rows(NamedTuple):
    """Numbers of token rows of one microbatch and layer on one rank, padding rows included
    (`parallel/expert/dispatch.py`).

    With the two-stage all-to-all, `sent` and `received` count the second stage, inside the node.
    """

    sent: float  # rows that this rank sends to experts
    received: float  # rows that arrive; with a capacity limit all of them are kept until backward
    computed: float  # rows that this rank's experts compute
    # for the two-stage all-to-all: number of nodes, and rows that this rank sends to and receives from other nodes in
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
    ranks = layout.ep * layout.etp
    T = rank_tokens(model, layout)
    H = model.hidden
    E = moe.experts
    size = DTYPE_BYTES[layout.dtype]
    wide = statistics_bytes(layout.dtype)
    t = T // layout.tp

    def send(
        phase: Phase,
        operation: str,
        size_bytes: float,
        again: tuple[str, ...] = (),
        axis: str = "ep",
        under: Under = Under.OTHER,
    ) -> Item:
        return Item(phase, DISPATCH, Collective(axis, operation, int(size_bytes), under), again)

    def there_and_back(
        axis: str,
        sent: float,
        received: float,
        numbers: int,
        weights: int,
        chosen: int = 0,
    ) -> Iterator[Item]:
        """Yield the all-to-alls of dispatch and combine along `axis`, forward and backward.

        First, `numbers` row counts are sent. With each row, `weights` router weights and `chosen` expert indices are
        sent. A shared expert, if there is one, overlaps the dispatch in forward and the gradient of the dispatch in
        backward. With two stages it overlaps only the stage between nodes.
        """
        under = Under.SHARED if moe.shared_hidden and axis != "ep.node" else Under.OTHER
        yield send(Phase.F, "all_to_all", numbers * COUNT_BYTES, FULL, axis)
        yield send(
            Phase.F,
            "all_to_all",
            sent * size * H,
            FULL,
            axis,
            under,
        )
        yield send(Phase.F, "all_to_all", sent * weights * wide, FULL, axis)
        if chosen:
            yield send(Phase.F, "all_to_all", sent * chosen * CHOICE_BYTES, FULL, axis)
        yield send(Phase.F, "all_to_all", received * size * H, axis=axis)
        yield send(Phase.I, "all_to_all", sent * size * H, axis=axis)
        yield send(Phase.I, "all_to_all", received * size * H, axis=axis, under=under)
        yield send(Phase.I, "all_to_all", received * weights * wide, axis=axis)

    # A balance loss per sequence needs the experts' load over the complete sequence, so the loads are summed over tp
    # and cp.
    for axis in () if moe.balance == "global" else ("tp", "cp"):
        if getattr(layout, axis) > 1:
            yield send(
                Phase.F,
                "all_reduce",
                layout.micro_batch * E * wide,
                FULL,
                axis,
                Under.NOTHING,
            )
    # without sequence parallelism each tensor rank routes its part of the tokens, and the outputs are gathered
    if layout.tp > 1 and not layout.sequence_parallel:
        yield send(Phase.F, "all_gather", size * T * H, axis="tp", under=Under.NOTHING)
        yield send(Phase.I, "all_gather", size * T * H, axis="tp", under=Under.NOTHING)
    yield Item(Phase.F, ROUTING, Product(t, E, H), FULL)
    yield Item(Phase.I, ROUTING, Product(t, H, E))
    yield Item(Phase.W, ROUTING, Product(E, H, t))
    yield Item(Phase.F, ROUTING, Pass(wide * t * (2 * H + 6 * E), 12), FULL)
    yield Item(Phase.I, ROUTING, Pass(wide * t * (2 * H + 6 * E), 12))
    if moe.shared_gate:
        yield from _shared_gate_work(T if not layout.sequence_parallel else t, H, size)
    yield Item(Phase.F, DISPATCH, HostWait(_host_waits(moe, rows, ranks) * LAUNCHES_AFTER_WAIT), FULL)
    if rows.nodes > 1:
        yield from there_and_back(
            "ep.rail",
            rows.to_nodes,
            rows.from_nodes,
            rows.nodes,
            moe.top_k,
            moe.top_k,
        )
    gathered = software.expert_rows_gathered and layout.etp > 1 and rows.nodes == 1
    if gathered:
        if layout.ep > 1:
            yield from there_and_back("ep.once", rows.sent / layout.etp, rows.received / layout.etp, E, 1)
        for phase in (Phase.F, Phase.I):
            again = FULL if phase is Phase.F else ()
            yield send(phase, "all_gather", rows.received * size * H, again, "tp", Under.NOTHING)
            yield send(phase, "reduce_scatter", rows.received * size * H, axis="tp", under=Under.NOTHING)
    elif ranks > rows.nodes:
        yield from there_and_back(
            "ep" if rows.nodes == 1 else "ep.node",
            rows.sent,
            rows.received,
            E * layout.etp // rows.nodes,
            1,
        )
    # Rows are gathered before the dispatch and reordered after it. The combine reverses both and sums the rows.
    moved = size * H * 2 * (rows.sent + rows.received + rows.to_nodes + rows.from_nodes)
    yield Item(Phase.F, DISPATCH, Pass(2 * moved, 8), FULL)
    yield Item(Phase.I, DISPATCH, Pass(2 * moved, 8))
    yield from _experts_products(model, moe, layout, software, rows)


def _experts_products(
    model: ModelConfig,
    moe: MoeConfig,
    layout: Layout,
    software: Software,
    rows: Rows,
) -> Iterator[Item]:
    """Yield the matrix products of this rank's experts, and the tensors that are kept for backward."""
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
    yield Item(Phase.F, EXPERTS, Pass(size * held * (up + f), 1), FULL)
    yield Item(Phase.I, EXPERTS, Pass(size * held * (2 * up + f), 1))
    kept = size * held * (H + up + f * (1 + 2 * (model.activation == "geglu_tanh"))) + wide * (
        held + 4 * t * moe.experts
    )
    yield Item(Phase.F, EXPERTS, Keep(kept + size * t * H, ("none", "selective")))  # last term: the router's input


def _shared_gate_work(rows: int, H: int, size: int) -> Iterator[Item]:
    """Yield the work of scaling the shared expert's output by a sigmoid of the token, for `rows` tokens of this rank.

    Elements have `size` bytes.
    """
    yield Item(Phase.F, ROUTING, Product(rows, 1, H), FULL)
    yield Item(Phase.I, ROUTING, Product(rows, H, 1))
    yield Item(Phase.W, ROUTING, Product(1, H, rows))
    yield Item(Phase.F, ROUTING, Pass(2 * size * rows * H, 2), FULL)
    # backward of output x gate: the gradients of both factors, and the sum of the gate's gradient over H
    yield Item(Phase.I, ROUTING, Pass(5 * size * rows * H, 4))
    yield Item(Phase.F, ROUTING, Keep(size * rows * (H + 1), ("none", "selective")))
