"""An update before all ranks have ended the step, validated after: the bits of the synchronous one, also where it is
undone and done again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from frontier_llm.optim import Zero
from frontier_llm.parallel.pipeline import Engine
from frontier_llm.topology.plan import plan_problems
from frontier_llm.training.evaluate import held_out_loss
from frontier_llm.training.step import StepResult, local_gradients, train_step
from tests.harness.marks import but_first, thorough
from tests.harness.pool import RankError, RankPool
from tests.parity.cases import Case
from tests.parity.play import Source, build

STEPS = 9
NOT_FINITE = 4  # the step whose gradient is spoilt on the last rank, if one is
FP16 = ("precision.initial_loss_scale=131072", "precision.loss_scale_window=1")  # doubles until it is too much


class Outcome(NamedTuple):
    """One rank's steps."""

    results: list[StepResult]
    held_out: list[float | None]  # of an evaluation in the middle and at the end
    bits: list[torch.Tensor]  # of weights and state after each step
    stood: list[bool]  # of its early updates, in order
    updates: int


@contextmanager
def watched(mistake: str) -> Iterator[list[bool]]:
    """Whether the early updates stood; with one of two mistakes on the way."""
    validate = Zero.validate
    run = Engine.run
    stood = []

    def noted(self: Zero, stands: bool) -> None:
        stood.append(stands)
        validate(self, stands or mistake == "undo nothing")

    def stale(self: Engine, batch: Any, loss_scale: float = 1.0) -> Any:
        if self._ahead_of is not None and mistake == "keep stale forwards":
            self._ahead_of = batch
        return run(self, batch, loss_scale)

    with patch.object(Zero, "validate", noted), patch.object(Engine, "run", stale):
        yield stood


def steps(rank: int, case: Case, dtype: str, spoilt: bool = False, mistake: str = "") -> Outcome:
    """Nine steps, with an evaluation and a repeated backward between."""
    state = build(rank, case, dtype)
    finish = state.sync.finish

    def spoil() -> None:
        finish()
        if spoilt and state.current_step == NOT_FINITE and rank == case.world_size - 1:
            bucket = state.optimizer.buckets[-1]
            bucket.norm_share(bucket.gradients)[0][0] = float("nan")

    state.sync.finish = spoil  # type: ignore[method-assign]
    results = []
    held_out = []
    bits = []
    with watched(mistake) as stood:
        for step in range(STEPS):
            results.append(train_step(state))
            bits += [bucket.weights.clone() for bucket in state.optimizer.buckets]
            bits += [values.clone() for states in state.optimizer.states for values in states.values()]
            if step == 5:  # what looks for wrong arithmetic plays another step in between
                local_gradients(state, state.feed)
            if step in (2, STEPS - 1):
                held_out.append(held_out_loss(state, Source(case, state.mesh.dp.rank), 8, lambda: False))
    return Outcome(results, held_out, bits, stood, state.optimizer.updates)


def named(family: str, clip: float, *settings: str, **layout: Any) -> Case:
    always = (f"train.steps={STEPS}", "optimizer.warmup_steps=0", f"optimizer.clip_norm={clip}")
    return Case(family, **{"schedule": "zb-h2", "settings": (*always, *settings), **layout})


def after(case: Case) -> Case:
    return replace(case, settings=(*case.settings, "optimizer.validated=after"))


def same(one: Outcome, other: Outcome) -> bool:
    alike = all(torch.equal(a, b) for a, b in zip(one.bits, other.bits, strict=True))
    return (
        alike
        and str(one.results) == str(other.results)
        and one.held_out == other.held_out
        and one.updates == other.updates
    )


@pytest.mark.parametrize(
    ("case", "dtype", "spoilt", "why"),
    [
        (named("mpt", 100, pp=4), "bf16", True, "skipped"),
        (named("llama", 2.6, pp=2, dp=2, overlap_weights=True), "fp64", False, "clipped"),
        thorough(named("gpt", 100, *FP16, pp=2), "fp16", False, "skipped"),
        pytest.param(
            named("llama", 2.6, pp=2, tp=2, overlap_messages=False),
            "fp64",
            False,
            "clipped",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            named("llama", 100, "optimizer.name=muon", pp=2, dp=2), "fp64", True, "skipped", marks=pytest.mark.thorough
        ),
        pytest.param(
            named("mpt", 100, pp=4, schedule="interleaved-zb"), "bf16", True, "skipped", marks=pytest.mark.thorough
        ),
        pytest.param(
            named("llama", 100, "comm.in_flight=one", pp=2, dp=2, zero=0, documents=True),
            "bf16",
            True,
            "skipped",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
def test_the_bits_are_those_of_the_synchronous_step(
    ranks: RankPool, case: Case, dtype: str, spoilt: bool, why: str
) -> None:
    before = ranks.run(case.world_size, steps, case, dtype, spoilt)
    validated = ranks.run(case.world_size, steps, after(case), dtype, spoilt)
    for one, other in zip(before, validated, strict=True):
        assert same(one, other)
        assert not one.stood
    first = validated[0]
    norms = [result.gradient_norm for result in first.results]
    assert {True, False} == set(first.stood), (first.stood, norms)  # some were undone, others stood
    assert (why == "skipped") == any(result.skipped for result in first.results)


def test_an_update_that_is_not_undone_shows(ranks: RankPool) -> None:
    case = named("mpt", 100, pp=2)
    before = ranks.run(2, steps, case, "bf16", True)[0]
    assert not same(before, ranks.run(2, steps, after(case), "bf16", True, "undo nothing")[0])


def test_forwards_on_weights_that_were_undone_cannot_be_used(ranks: RankPool) -> None:
    """Autograd itself notices that the weights behind them have changed."""
    with pytest.raises(RankError, match="modified by an inplace operation"):
        ranks.run(2, steps, after(named("mpt", 100, pp=2)), "bf16", True, "keep stale forwards")


@pytest.mark.parametrize("layout", but_first([{"family": "mpt", "schedule": "1f1b"}, {"family": "deepseek"}]), ids=str)
def test_where_there_is_nothing_to_gain_steps_are_synchronous(ranks: RankPool, layout: dict[str, str]) -> None:
    """1F1B's first rank begins first and ends last; a selection bias follows the whole step's load."""
    assert not ranks.run(2, steps, after(named(clip=100, pp=2, **layout)), "bf16")[0].stood


def test_engines_that_cannot_undo_are_refused() -> None:
    fsdp = after(Case("llama", dp=2, settings=("parallel.data_mode=fsdp", "parallel.zero=0")))
    assert "optimizer.validated" in [problem.where for problem in plan_problems(fsdp.config(), 2)]
