"""Two interleaved microbatches: the all-to-alls of one overlap the compute of the other.

The results are bit-equal to running one after the other.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from frontier_llm.comm import Axis, Pending
from frontier_llm.comm.ledger import Call
from frontier_llm.schedule import Action, Kind, beside, build, dry_run, posted_ahead, units
from frontier_llm.training.step import train_step
from tests.harness.marks import thorough
from tests.harness.pool import RankPool
from tests.parity.cases import Case
from tests.parity.three_steps import build as build_case

# The package has a function with the module's name, so a plain import would return the function.
dispatch: Any = import_module("frontier_llm.parallel.expert.dispatch")
plan: Any = import_module("frontier_llm.parallel.expert.plan")
PAIRED = Case("deepseek", pp=2, dp=2, schedule="dualpipe-v", settings=("parallel.expert=2",))


def off(case: Case) -> Case:
    """Return the same case without interleaving."""
    return replace(case, settings=(*case.settings, "comm.overlap_experts=false"))


def two_steps(rank: int, case: Case) -> tuple[list[float], list[torch.Tensor], int]:
    """Return losses and norms, the weights after two steps, and the number of times that a computing action starts or
    continues.
    """
    state = build_case(rank, case, "fp32")
    turns = []
    state.pipeline.on_action = lambda action: turns.append(action)
    results = [train_step(state) for _ in range(2)]
    state.optimizer.wait_for_gather()
    computed = [action for action in turns if action is not None and action.kind.computes]
    return (
        [n for r in results for n in (r.loss, r.gradient_norm)],
        [b.weights.clone() for b in state.optimizer.buckets],
        len(computed),
    )


@pytest.mark.parametrize(
    "case",
    [
        PAIRED,
        thorough(replace(PAIRED, settings=(*PAIRED.settings, "comm.in_flight=one"))),
        thorough(Case("mixtral", tp=2, pp=2, dp=2, schedule="dualpipe-v", settings=("parallel.expert=2",), transport="torch")),  # noqa: E501
        thorough(Case(
            "olmoe", pp=2, dp=4, schedule="dualpipe-v", recompute="full", ranks_per_node=2,
            settings=("parallel.expert=4", "parallel.expert_all_to_all=hierarchical", "batch.global_batch=24"),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_a_pair_gives_the_bits_of_one_after_the_other(ranks: RankPool, case: Case) -> None:
    together, apart = (ranks.run(case.world_size, two_steps, each) for each in (case, off(case)))
    for (numbers, weights, turns), (theirs, their_weights, actions) in zip(together, apart, strict=True):
        assert numbers == theirs and all(torch.equal(a, b) for a, b in zip(weights, their_weights, strict=True))
        assert turns > actions, "the interleaving changes hands within pairs"


class Flight(NamedTuple):
    """One all-to-all of rows or of row counts: the action that started it, and the actions that computed until its
    wait.
    """

    what: str
    began: Action
    overlapped: list[Action]


def flights(rank: int, case: Case) -> list[Flight]:
    """Return all all-to-alls of one step in the order of their waits.

    The order of a rank's actions does not depend on the load of the machine.
    """
    state = build_case(rank, case)
    log: list[Action | Call] = []
    ended: list[Flight] = []
    state.pipeline.on_action = lambda action: log.append(action) if action else None
    start_rows = dispatch.start_all_to_all_rows
    start_numbers = plan.start_all_to_all_into

    class Noted:
        def __init__(self, what: str, pending: Pending) -> None:
            self.what = what
            self.pending = pending
            self.begun = len(log) - 1

        def wait(self) -> None:
            ended.append(
                Flight(self.what, log[self.begun], [action for action in log[self.begun + 1 :] if action.kind.computes])
            )
            self.pending.wait()

    def noted_rows(x: torch.Tensor, received: list[int], sent: list[int], axis: Axis) -> tuple[torch.Tensor, Pending]:
        arriving, pending = start_rows(x, received, sent, axis)
        return arriving, Noted("rows", pending)

    def noted_numbers(arriving: torch.Tensor, x: torch.Tensor, axis: Axis) -> Pending:
        return Noted("numbers", start_numbers(arriving, x, axis))

    with (
        patch.object(dispatch, "start_all_to_all_rows", noted_rows),
        patch.object(plan, "start_all_to_all_into", noted_numbers),
    ):
        train_step(state)
    return ended


def test_rows_and_their_numbers_are_on_their_way_while_the_other_microbatch_computes(ranks: RankPool) -> None:
    """With experts in every layer each all-to-all of a pair overlaps compute. Without interleaving none does.

    Outside of pairs no other action runs between start and wait.
    """
    case = replace(PAIRED, family="mixtral")
    of = beside(build("dualpipe-v", 2, 4, 2, pairs=True))
    partner = of | {forward: backward for backward, forward in of.items()}
    for ended in ranks.run(4, flights, case):
        inside = Counter(flight.what for flight in ended if flight.began in partner)
        assert inside["rows"] >= 10 and inside["numbers"] >= 3
        for flight in ended:
            assert flight.overlapped[:1] == ([partner[flight.began]] if flight.began in partner else [])
    for ended in ranks.run(4, flights, off(case)):
        assert not any(flight.overlapped for flight in ended)


def switches_and_calls(rank: int, case: Case) -> list[tuple[Action, list[dry_run.Call]]]:
    """Return one step's actions with the ledger entries of each. A pair switches several times between its two
    actions.
    """
    state = build_case(rank, case)
    turns: list[tuple[Action, int]] = []
    entries = state.mesh.ledger.recent = deque()
    state.pipeline.on_action = lambda action: turns.append((action or turns[-1][0], len(entries)))
    train_step(state)
    calls = [(call.axis, call.operation) for call in entries]
    return [(action, calls[first:end]) for (action, first), (_, end) in pairwise(turns)]


def test_each_ledger_is_its_restriction_of_the_order(ranks: RankPool) -> None:
    """A pair counts as one event of the order. Its calls have the same sequence on all ranks and for all pairs.

    No message is sent within a pair.
    """
    schedule = build("dualpipe-v", 2, 4, 2, pairs=True)
    inside: dict[tuple[tuple[Kind, int], ...], list[dry_run.Call]] = {}
    instead: dict[Action, list[dry_run.Call]] = {}
    for rank, turns in enumerate(ranks.run(4, switches_and_calls, replace(PAIRED, family="mixtral"))):
        for unit in units(posted_ahead(schedule.actions[rank // 2], True), True):
            calls: list[dry_run.Call] = []
            while turns and turns[0][0] in unit:
                calls += [call for call in turns.pop(0)[1] if call[0] not in ("dp", "edp")]
            if not unit[0].kind.computes:
                channel = schedule.placement.channel(unit[0].kind, unit[0].position).value
                assert calls == [(f"pp.{channel}", "send" if unit[0].kind.sends else "recv")]
                continue
            assert inside.setdefault(tuple((action.kind, action.position) for action in unit), calls) == calls, unit
            assert {axis for axis, _ in calls} == {"ep"} or unit[0].kind is Kind.BACKWARD_WEIGHT
            instead[unit[-1]] = [("dp", operation) for _, operation in calls]  # the two replicas shard the experts
        assert not turns
    assert any(len(kinds) > 1 for kinds in inside)
    dry_run.check_order(dry_run.steps(schedule, dry_run.CollectiveLists(instead=instead), dp=2))


def failing(rank: int, kind: Kind) -> str:
    """Return the error of a step in which sending rows fails, in the first pair's forward or backward."""
    state = build_case(rank, replace(PAIRED, family="mixtral"))
    turns = list[Action]()
    state.pipeline.on_action = lambda action: turns.append(action) if action else None
    pairs = beside(build("dualpipe-v", 2, 4, 2, pairs=True))
    halves = pairs.keys() if kind is Kind.BACKWARD else pairs.values()
    leave = dispatch.leave

    def fail(*args: Any) -> Any:
        if turns[-1] in halves:
            raise ValueError(f"{kind.name} failed")
        return leave(*args)

    with patch.object(dispatch, "leave", fail):
        try:
            train_step(state)
        except ValueError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD], ids=lambda kind: kind.name)
def test_an_error_in_one_half_ends_the_step_with_that_error(ranks: RankPool, kind: Kind) -> None:
    """The error occurs on all ranks here, so that no rank waits for another."""
    assert set(ranks.run(4, failing, kind)) == {f"{kind.name} failed"}
