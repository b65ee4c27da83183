"""Name + sizes → Schedule: first the order of compute on every stage, then one pass that adds the communication.

Sources: GPipe (Huang et al. 2019), 1F1B (PipeDream-Flush, Narayanan et al. 2021), interleaved 1F1B (Narayanan et al., SC21,
section 2.2), ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain, product

from frontier_llm.errors import LayoutError, Problem, suggest
from frontier_llm.schedule.actions import FORWARD_ONLY, Action, Kind, Schedule
from frontier_llm.schedule.channels import channel_of, chunk_at_peer, peer_of, received_by, sent_by

Order = list[Action]
Rule = Callable[[Action, int, int, int], Kind | None]


@lru_cache(maxsize=32)
def build(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule `name` for `stages` pipeline ranks, `microbatches` per step and replica, `chunks` virtual stages per rank.

    Any count of microbatches >= 1 is legal for every schedule. Raises LayoutError for an unknown name, a size below 1, or
    chunks > 1 with a schedule that has no virtual stages.
    """
    problems = [
        Problem(f"schedule {what}", f"{size} is below 1", "use 1 or more")
        for what, size in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks))
        if size < 1
    ]
    if name not in ORDERS:
        problems.append(Problem("parallel.schedule", f"{name!r} is not a schedule", suggest(name, ORDERS)))
    elif chunks > 1 and name != "interleaved":
        problems.append(
            Problem("parallel.chunks", f"{chunks} chunks need the interleaved schedule, not {name}", "set parallel.schedule=interleaved")
        )
    if problems:
        raise LayoutError(problems)
    orders = [ORDERS[name](stage, stages, microbatches, chunks) for stage in range(stages)]
    return Schedule(name, stages, microbatches, chunks, with_communication(orders, chunks))


def forward_only(schedule: Schedule) -> Schedule:
    """The same pipeline without gradients, for evaluation: each stage's forwards in the order in which it trains.

    (All microbatches through chunk 0, then all through chunk 1, would leave the last stage with every message of the wrap-around
    undelivered, and with bounded sends in a deadlock.)
    """
    orders = [[action for action in schedule.compute_actions(stage) if action.kind is Kind.FORWARD] for stage in range(schedule.stages)]
    actions = with_communication(orders, schedule.chunks)
    return Schedule(FORWARD_ONLY, schedule.stages, schedule.microbatches, schedule.chunks, actions)


# ------------------------------------------------------------------------------------------------- order of compute


def _gpipe(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """All forwards, then all backwards."""
    return [*_all(Kind.FORWARD, microbatches), *_all(Kind.BACKWARD, microbatches)]


def _one_f_one_b(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """As many forwards as there are stages behind, then forward and backward in turn; min(m, pp - stage) in flight."""
    forwards, backwards = _all(Kind.FORWARD, microbatches), _all(Kind.BACKWARD, microbatches)
    return _alternate(forwards, backwards, warmup=stages - 1 - stage)


def _interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """Microbatches pass through a rank's chunks in rounds of pp, with twice the warm-up distance between neighbours.

    An incomplete last round is played as a full one whose missing microbatches are skipped: what is left of a legal order
    is legal, so no count of microbatches can deadlock. (Rounds shortened to the remainder do, for remainders below pp.)
    """
    if chunks == 1:
        return _one_f_one_b(stage, stages, microbatches, chunks)
    full = -(-microbatches // stages) * stages
    rounds = range(0, full, stages)

    def passes(kind: Kind, through: Sequence[int]) -> Order:
        return [Action(kind, first + place, chunk) for first in rounds for chunk in through for place in range(stages)]

    forwards = passes(Kind.FORWARD, range(chunks))
    backwards = passes(Kind.BACKWARD, range(chunks)[::-1])
    order = _alternate(forwards, backwards, warmup=2 * (stages - 1 - stage) + (chunks - 1) * stages)
    return [action for action in order if action.microbatch < microbatches]


def _zero_bubble_h1(stage: int, stages: int, microbatches: int, chunks: int) -> Order:
    """1F1B with backward split: W of a microbatch follows `stage` inputs' gradients late and fills the drain's bubbles.

    The delay equals the forwards that a later stage has fewer in flight, so every stage holds min(m, pp) microbatches,
    which is what 1F1B holds on its first stage.
    """
    forwards, inputs = _all(Kind.FORWARD, microbatches), _all(Kind.BACKWARD_INPUT, microbatches)
    order: Order = []
    for action in _alternate(forwards, inputs, warmup=stages - 1 - stage):
        order.append(action)
        late = action.microbatch - stage
        if action.kind is Kind.BACKWARD_INPUT and late >= 0:
            order.append(Action(Kind.BACKWARD_WEIGHT, late))
    order += [Action(Kind.BACKWARD_WEIGHT, index) for index in range(max(0, microbatches - stage), microbatches)]
    return order


ORDERS: dict[str, Callable[[int, int, int, int], Order]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble_h1,
}


def _all(kind: Kind, microbatches: int) -> Order:
    return [Action(kind, microbatch) for microbatch in range(microbatches)]


def _alternate(forwards: Order, backwards: Order, warmup: int) -> Order:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    pairs = chain.from_iterable(zip(forwards[warmup:], backwards[:steady], strict=True))
    return [*forwards[:warmup], *pairs, *backwards[steady:]]


# ---------------------------------------------------------------------------------------------------- communication


def with_communication(orders: Sequence[Order], chunks: int) -> tuple[tuple[Action, ...], ...]:
    """SEND and RECV for any order of compute.

    A send stands directly after the compute that makes its message. A receive is posted one compute action ahead of the one
    that consumes it, so the transfer overlaps that compute and a channel never has more than two receives pending (on ROCm a
    receive that pends for long holds up compute: pytorch issue 172668). Where the compute in between sends on the same
    channel, the send goes first: behind the receive it would wait for the neighbour's next message.
    Receives are posted in the order in which the peer sends, which is what a FIFO channel delivers.
    """
    stages = len(orders)
    return tuple(tuple(_communicate(orders, stage, stages, chunks)) for stage in range(stages))


def _communicate(orders: Sequence[Order], stage: int, stages: int, chunks: int) -> Order:
    arriving = {kind: iter(_arrivals(orders, kind, stage, chunks)) for kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)}
    posted: set[tuple[Kind, int, int]] = set()
    played: Order = []
    order = orders[stage]
    sends = _each(sent_by, order, stage, stages, chunks)
    needs = [*_each(received_by, order, stage, stages, chunks), None]  # nothing follows the last
    streams = {kind: channel_of(kind, stage, stages) for kind in Kind if not kind.computes}

    def post_for(index: int) -> None:
        """Receives, up to the one that the action at `index` waits for."""
        kind = needs[index]
        while kind and (kind, order[index].microbatch, order[index].chunk) not in posted:
            receive = next(arriving[kind])
            posted.add((kind, receive.microbatch, receive.chunk))
            played.append(receive)

    for index, (action, send) in enumerate(zip(order, sends, strict=True)):
        ahead = needs[index + 1]
        post_for(index)
        if not (send and ahead and streams[send] is streams[ahead]):
            post_for(index + 1)
        played.append(action)
        if send:
            played.append(Action(send, action.microbatch, action.chunk))
        post_for(index + 1)
    return played


def _arrivals(orders: Sequence[Order], kind: Kind, stage: int, chunks: int) -> Order:
    """The receives of one kind in the order in which the peer sends them."""
    stages = len(orders)
    peer = peer_of(kind, stage, stages)
    send = Kind.SEND_FORWARD if kind is Kind.RECV_FORWARD else Kind.SEND_BACKWARD
    here = [chunk_at_peer(send, peer, chunk, stages) for chunk in range(chunks)]
    sends = _each(sent_by, orders[peer], peer, stages, chunks)
    return [Action(kind, action.microbatch, here[action.chunk]) for action, sent in zip(orders[peer], sends, strict=True) if sent is send]


def _each(rule: Rule, order: Order, stage: int, stages: int, chunks: int) -> list[Kind | None]:
    """`rule` for every action: asked once per kind and chunk, which is all that it depends on."""
    answers = {(kind, chunk): rule(Action(kind, 0, chunk), stage, stages, chunks) for kind, chunk in product(Kind, range(chunks))}
    return [answers[action.kind, action.chunk] for action in order]
