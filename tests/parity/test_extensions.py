"""Extensions through the documented interfaces, and the order of communication.

A schedule with another placement and a second loss is compared with the serial run.
The predicted order of communication is compared with each entry of the ranks' ledgers.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from frontier_llm import schedule
from frontier_llm.comm import Axis
from frontier_llm.model import Microbatch, losses
from frontier_llm.schedule import Action, Kind, Placement, ScheduleRule, build, posted_ahead
from frontier_llm.schedule.dry_run import Call, CollectiveLists, check_order, steps
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.step import train_step
from tests.harness.dry_run import calls
from tests.harness.marks import but_first, thorough
from tests.harness.pool import RankPool
from tests.parity.cases import Case, pairwise
from tests.parity.compare import differences, gather
from tests.parity.three_steps import RankResult, train_case
from tests.parity.three_steps import build as build_case

# ------------------------------------------------------------------------------------------------------- extensions


def v_placement(stages: int, chunks: int) -> Placement:
    """Positions go down the ranks and up again, so that the embedding and the head are both on rank 0."""
    return Placement((*range(stages), *reversed(range(stages))))


def v_order(placement: Placement, microbatches: int, rank: int) -> list[Action]:
    """Process two microbatches at a time, all forwards and then all backwards."""
    down, up = placement.positions_of(rank)
    order = []
    for first in range(0, microbatches, 2):
        pair = range(first, min(first + 2, microbatches))
        order += [Action(Kind.FORWARD, microbatch, position) for position in (down, up) for microbatch in pair]
        order += [Action(Kind.BACKWARD, microbatch, position) for position in (up, down) for microbatch in pair]
    return order


def small_activations(x_SBH: torch.Tensor, batch: Microbatch, tp: Axis) -> torch.Tensor:
    """Return this rank's contribution to the mean square of the last block's output over all targets."""
    return x_SBH.square().mean(-1).sum() / batch.global_targets


schedule.register("toy-v", ScheduleRule(v_order, v_placement, chunks=(2,)))
losses.register("small-activations", losses.LossTerm(small_activations))


def train_case_here(rank: int, case: Case) -> RankResult:
    """Import this module on the ranks, which registers the toy extensions there.

    `costs` does not include their traffic.
    """
    return train_case(rank, case)._replace(traffic=[])


@pytest.mark.thorough
@pytest.mark.parametrize("family", but_first(["gpt", "llama"], in_ci=1))
@pytest.mark.parametrize(("tp", "overlap"), [thorough(1, True), (2, False)])
def test_a_v_is_trained_as_one_rank_trains(ranks: RankPool, family: str, tp: int, overlap: bool) -> None:
    """Tied embeddings are one tensor on rank 0 and need no sum over pipeline ranks. Untied embeddings are tested
    too.
    """
    case = Case(family, tp=tp, pp=2, schedule="toy-v", overlap_messages=overlap, settings=("parallel.chunks=2",))
    assert make_plan(case.config(), case.world_size).placement.ends == (0,)
    serial = gather(ranks.run(1, train_case_here, case.serial()))
    assert differences(gather(ranks.run(case.world_size, train_case_here, case)), serial) == []


def train_case_with_term(rank: int, case: Case) -> tuple[RankResult, list[float]]:
    """Also return the values of the loss term that two further steps report."""
    results = train_case_here(rank, case)
    state = build_case(rank, case)
    return results, [train_step(state).further_losses["small-activations"] for _ in range(2)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "parallel",
    but_first(
        [{"pp": 2, "dp": 2, "schedule": "zb-h1"}, {"tp": 2, "pp": 2, "sequence_parallel": True}, {"tp": 2}], in_ci=2
    ),
    ids=str,
)
def test_a_second_loss_is_trained_and_reported_as_one_rank_does(ranks: RankPool, parallel: dict) -> None:
    weights = ("train.loss_weights={small-activations: 0.5}",)
    case = Case("llama", **parallel, settings=weights)
    one = Case("llama", settings=weights)
    without = Case("llama")
    serial = ranks.run(1, train_case_with_term, one)
    here = ranks.run(case.world_size, train_case_with_term, case)
    assert differences(gather([results for results, _ in here]), gather([serial[0][0]])) == []
    for _, values in here:
        assert values == pytest.approx(serial[0][1], rel=1e-9)
    plain = differences(gather([serial[0][0]]), gather(ranks.run(1, train_case_here, without)))
    assert any("gradient of layers.0" in line for line in plain), "the term has to pull"


# ------------------------------------------------------------------------------------------------- order and ledger


class Recorded(NamedTuple):
    """One rank's ledger of a step, and its number of entries when each action began."""

    calls: list[Call]
    begins: list[tuple[Action | None, int]]


def record(rank: int, case: Case) -> Recorded:
    state = build_case(rank, case)
    train_step(state)  # the second step also completes the weight gathers that the first step started
    begins: list[tuple[Action | None, int]] = []
    entries = state.mesh.ledger.recent = deque()
    state.pipeline.on_action = lambda action: begins.append((action, len(entries)))
    train_step(state)
    return Recorded([(call.axis, call.operation) for call in entries], begins)


def learned(recorded: dict[int, Recorded]) -> CollectiveLists:
    """Return the communication of one rank per pipeline stage besides its messages.

    It is taken from the first action of each kind, and from each action that starts dp sums.
    """
    inside: dict[tuple[Kind, int], list[Call]] = {}
    instead: dict[Action, list[Call]] = {}
    behind = {}
    for stage, (entries, begins) in recorded.items():
        before = entries[: begins[0][1]]
        for (action, first), (_, end) in itertools.pairwise(begins):
            if action is None or not action.kind.computes:
                continue
            own = [call for call in entries[first:end] if call[0] != "dp"]
            assert inside.setdefault((action.kind, action.position), own) == own, (
                f"{action} communicates unlike its kind"
            )
            if len(own) < end - first:
                instead[action] = entries[first:end]
        behind[stage] = entries[begins[-1][1] :]
    return CollectiveLists(inside, instead, before, behind)


# The first 40 cases contain all settings.
PARALLEL = [case for case in pairwise()[:40] if case.world_size > 1]


@pytest.mark.thorough
@pytest.mark.parametrize("case", but_first(PARALLEL, 8, in_ci=10), ids=str)
def test_each_ledger_is_its_restriction_of_the_order(ranks: RankPool, case: Case) -> None:
    plan = make_plan(case.config(), case.world_size)
    recorded = ranks.run(case.world_size, record, case)
    places = [plan.grid.coordinates(rank) for rank in range(case.world_size)]
    first = {place["pp"]: recorded[rank] for rank, place in enumerate(places) if place["tp"] == place["dp"] == 0}
    collectives = learned(first)
    strict = build(case.schedule, case.pp, plan.microbatches, case.chunks)
    check_order(steps(strict, collectives, case.tp, case.dp))
    results = strict
    if case.overlap_messages:
        results = replace(strict, actions=tuple(tuple(posted_ahead(actions)) for actions in strict.actions))
    for place, (entries, _) in zip(places, recorded, strict=True):
        assert entries == list(calls(results, place["pp"], collectives)), place
