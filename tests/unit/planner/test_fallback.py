"""The two plans of a job: overrides of the run's own layout, and of a roomier layout. The roomier layout needs less
memory, for a run that is out of memory.
"""

from __future__ import annotations

from frontier_llm.config import RunConfig, load_run, phases_of
from frontier_llm.planner.emit import plan_overrides
from frontier_llm.planner.predict import plans_of as simulated_plans

RUN = (
    "machine=frontier",
    "model=llama-tiny",
    "data.train=a b",
    "batch.global_batch=64",
    "train.phases=[{steps: 3, batch: {global_batch: 96, micro_batch: 6}}, {steps: 2, data: {train: [c d]}}]",
)


def run(*words: str) -> RunConfig:
    return load_run("bench", [*RUN, *words])


def plans_of(*words: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    roomier = simulated_plans(run("batch.micro_batch=4"), 8)[-1]
    return plan_overrides(run("batch.micro_batch=8", *words), roomier)


def test_a_phase_with_a_microbatch_of_its_own_follows_the_roomier_plan() -> None:
    """Regression: with the roomier plan, a phase kept its own microbatch, and the run was out of memory again."""
    own, roomier = (run("batch.micro_batch=8", *words) for words in plans_of())
    assert [phase.config.batch.micro_batch for phase in phases_of(own)] == [6, 8]
    assert [phase.config.batch.micro_batch for phase in phases_of(roomier)] == [4, 4]
    for plan in (own, roomier):
        assert [phase.config.batch.global_batch for phase in phases_of(plan)] == [96, 64]
        assert [phase.steps for phase in phases_of(plan)] == [3, 2]
        assert [phase.config.data for phase in phases_of(plan)] == [phase.config.data for phase in phases_of(run())]


def test_another_algorithm_of_collectives_is_another_plan() -> None:
    """Regression: after a new submission with another algorithm, the run did not try its own layout again."""
    flat, roomier = plans_of()
    hierarchical, same = plans_of("comm.algorithms=hierarchical")
    assert roomier == same and flat != hierarchical
    assert run(*hierarchical).comm.algorithms == "hierarchical"
    assert run("comm.algorithms=hierarchical", *roomier).comm.algorithms == "flat"
