"""Tests in float64 that experts on several ranks compute the same as one rank, and that one rank computes the same as
the oracle.
"""

from __future__ import annotations

import pytest

from tests.harness.families import EXPERT_FAMILIES
from tests.harness.marks import but_first, exhaustive, thorough
from tests.harness.pool import RankPool
from tests.parity.cases import Case
from tests.parity.compare import Run, differences, gather
from tests.parity.three_steps import train_case
from tests.parity.witness import witness

_SERIAL: dict[Case, Run] = {}


def run(ranks: RankPool, case: Case, sabotage: str | None = None) -> Run:
    """Run a case. Serial runs are kept and not repeated."""
    if case in _SERIAL and sabotage is None:
        return _SERIAL[case]
    results = gather(ranks.run(case.world_size, train_case, case, sabotage))
    if case == case.serial() and sabotage is None:
        _SERIAL[case] = results
    return results


def experts(ep: int, etp: int = 1, *more: str) -> tuple[str, ...]:
    return (f"parallel.expert={ep}", f"parallel.expert_tensor={etp}", *more)


@pytest.mark.parametrize("documents", [exhaustive(False), True], ids=["one-document", "document-resets"])
# deepseek uses all features of expert layers.
@pytest.mark.parametrize("family", [family if family == "deepseek" else thorough(family) for family in EXPERT_FAMILIES])
def test_the_serial_run_equals_the_oracle(ranks: RankPool, family: str, documents: bool) -> None:
    case = Case(family, documents=documents)
    serial = run(ranks, case)
    assert differences(serial, witness(case, serial.initial)) == []


LAYOUTS = [
    Case("mixtral", tp=2, settings=experts(2)),
    Case("olmoe", tp=2, dp=2, settings=experts(4)),
    Case("mixtral", dp=2, settings=experts(2)),
    Case("olmoe", tp=2, dp=2, sequence_parallel=True, settings=experts(2), zero=0),
    Case("olmoe", tp=2, dp=2, pp=2, settings=experts(2), micro_batch=2, schedule="zb-h1", recompute="full"),
    Case("deepseek", dp=4, settings=experts(2), transport="torch", bucket_elements=3_000),
    Case(
        "deepseek",
        tp=2,
        pp=2,
        dp=2,
        settings=experts(4),
        sequence_parallel=True,
        schedule="interleaved",
        recompute="selective",
    ),
    Case("deepseek", tp=4, settings=experts(1), overlap_weights=True, recompute="full"),
    Case("mixtral", tp=2, dp=2, settings=experts(2, 2)),
    Case("deepseek", tp=2, dp=2, sequence_parallel=True, settings=experts(1, 4), documents=True),
    Case("mixtral", pp=2, dp=4, settings=experts(4), schedule="gpipe", order="tp-pp-dp"),
    Case("olmoe", tp=2, cp=2, dp=2, sequence_parallel=True, settings=experts(4)),
    Case("deepseek", cp=2, pp=2, dp=2, settings=experts(2), documents=True),
    Case("mixtral", tp=2, dp=2, settings=experts(2, 2, "optimizer.name=muon")),
    # Schedules of pairs: rows are sent while the other microbatch computes.
    Case("deepseek", pp=2, dp=2, settings=experts(2), schedule="dualpipe-v"),
    Case("deepseek", tp=2, pp=2, dp=2, settings=experts(4), schedule="dualpipe-v", transport="torch", recompute="full"),
]


@pytest.mark.parametrize("case", but_first(LAYOUTS, 2, in_ci=8), ids=str)
def test_every_layout_computes_what_one_rank_computes(ranks: RankPool, case: Case) -> None:
    """Compares loss, gradients, norm, initial weights and parameters after three steps.

    Replicas must be bitwise equal, and calls and bytes must equal the closed form.
    """
    assert differences(run(ranks, case), run(ranks, case.serial())) == []


CROWDED = ("model.moe.capacity=0.75", "model.moe.balance_weight=0")


@pytest.mark.thorough
def test_what_is_beyond_an_experts_capacity_is_dropped(ranks: RankPool) -> None:
    """Each microbatch has one sequence, which is not split over tensor ranks, because the oracle applies a capacity to
    one sequence.
    """
    case = Case("mixtral", dp=2, settings=(*CROWDED, *experts(2)))
    serial = run(ranks, case.serial())
    assert differences(serial, witness(case.serial(), serial.initial)) == []
    assert differences(run(ranks, case), serial) == []
    assert serial.losses != run(ranks, Case("mixtral")).losses


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        Case("mixtral", dp=4, settings=experts(2, 2, *CROWDED)),
        Case(
            "mixtral",
            dp=4,
            settings=experts(4, 1, "parallel.expert_all_to_all=hierarchical", *CROWDED),
            ranks_per_node=2,
            recompute="full",
        ),
    ],
    ids=str,
)
def test_with_a_capacity_as_many_rows_travel_as_may_and_the_same_count(ranks: RankPool, case: Case) -> None:
    """Calls and bytes equal the closed form. With a capacity it does not depend on the routing."""
    assert differences(run(ranks, case), run(ranks, case.serial())) == []


def nodes(ep: int, etp: int = 1, *more: str) -> tuple[str, ...]:
    return experts(ep, etp, "parallel.expert_all_to_all=hierarchical", *more)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        Case("olmoe", tp=2, dp=2, settings=nodes(4), ranks_per_node=2),
        exhaustive(Case("deepseek", dp=4, settings=nodes(4), ranks_per_node=2, recompute="full", micro_batch=2)),
        exhaustive(Case("mixtral", tp=2, dp=2, sequence_parallel=True, settings=nodes(2, 2), ranks_per_node=2)),
        thorough(
            Case(
                "olmoe",
                pp=2,
                dp=4,
                settings=nodes(4, 1, "model.moe.capacity=8"),
                ranks_per_node=1,
                schedule="zb-h1",
                order="tp-dp-pp",
            )
        ),
        thorough(
            Case("deepseek", dp=8, settings=nodes(8, 1, "comm.in_flight=one"), ranks_per_node=4, transport="torch")
        ),
    ],
    ids=str,
)
def test_a_token_that_goes_once_to_each_node_computes_the_same(ranks: RankPool, case: Case) -> None:
    """Ranks are assigned to two or more simulated nodes. Rows between nodes and inside a node equal the closed form."""
    assert differences(run(ranks, case), run(ranks, case.serial())) == []


# a large weight, so that a wrong load changes the parameters
GLOBAL = ("model.moe.balance=global", "model.moe.balance_weight=0.3")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more",
    [exhaustive(()), ("model.moe.selection_bias=true", "model.moe.score=sigmoid")],
    ids=["softmax", "sigmoid"],
)
def test_the_balance_of_the_global_batch_is_the_oracles_whatever_the_layout(
    ranks: RankPool, more: tuple[str, ...]
) -> None:
    """The load includes the complete previous step: all microbatches, replicas and parts of sequences."""
    case = Case(
        "olmoe",
        tp=2,
        cp=2,
        dp=2,
        sequence_parallel=True,
        micro_batch=2,
        recompute="full",
        settings=(*GLOBAL, *more, *experts(4)),
    )
    serial = run(ranks, case.serial())
    assert differences(serial, witness(case.serial(), serial.initial)) == []
    assert differences(run(ranks, case), serial) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mistake", "case", "reddens"),
    [
        ("dropped-expert-sum", Case("mixtral", dp=2), "gradient of layers.0.moe.experts"),
        exhaustive("mean-over-expert-replicas", Case("mixtral", tp=2), "gradient of layers.0.moe.experts"),
        exhaustive("unsorted-scatter", Case("mixtral", dp=2, settings=experts(2)), "losses"),
        ("missing-norm-sum", Case("olmoe", tp=2, settings=experts(2)), "gradient of layers.0.moe.router"),
        exhaustive("double-counted-norm", Case("deepseek", tp=2, settings=experts(2)), "norms"),
        thorough(
            "own-load", Case("olmoe", dp=2, settings=GLOBAL), "parameters after three steps of layers.0.moe.router"
        ),
    ],
    ids=lambda value: str(value),
)
def test_sabotage_turns_the_comparison_red(ranks: RankPool, mistake: str, case: Case, reddens: str) -> None:
    found = differences(run(ranks, case, mistake), run(ranks, case.serial()))
    assert any(reddens in line for line in found), found
