"""ZeRO-1 equals plain AdamW bit for bit. A step with a gradient that is not finite changes nothing on any rank.

Lower precisions stay close to float64.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from frontier_llm.training.build import TrainState
from frontier_llm.training.step import StepResult, train_step
from tests.harness.marks import thorough
from tests.harness.pool import RankPool
from tests.parity.cases import Case
from tests.parity.compare import gather
from tests.parity.three_steps import build, train_case


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", dp=2, tp=2, sequence_parallel=True),
        *map(thorough, [Case("gpt", dp=2), Case("mpt", dp=2, pp=2), Case("llama", dp=4)]),
    ],
    ids=str,
)
def test_zero_equals_plain_adamw_bitwise(ranks: RankPool, case: Case) -> None:
    """With two replicas a sum has two summands, whose order does not matter.

    With four, gloo's ring uses the same order for all-reduce and reduce-scatter only by chance.
    """
    sharded, plain = (
        gather(ranks.run(case.world_size, train_case, Case(**{**vars(case), "zero": zero}))) for zero in (1, 0)
    )
    same = np.array_equal if case.dp == 2 else (lambda a, b: np.allclose(a, b, rtol=1e-9, atol=1e-11))
    assert sharded.drift == plain.drift == ()
    for name, tensor in plain.final.items():
        assert same(sharded.final[name], tensor), name
        assert same(sharded.gradients[name], plain.gradients[name]), name
    assert sharded.norms == plain.norms if case.dp == 2 else np.allclose(sharded.norms, plain.norms, rtol=1e-12)


def optimizer_elements(rank: int, case: Case) -> tuple[int, int]:
    state = build(rank, case)
    return sum(s["master"].numel() for s in state.optimizer.states), sum(
        b.weights.numel() for b in state.optimizer.buckets
    )


def test_zero_keeps_one_share_of_the_optimizer_state(ranks: RankPool) -> None:
    for own, everything in ranks.run(4, optimizer_elements, Case("llama", dp=4)):
        assert 4 * own == everything
    for own, everything in ranks.run(2, optimizer_elements, Case("llama", dp=2, zero=0)):
        assert own == everything


class Poisoned(NamedTuple):
    """Results of one rank around a step in which one rank's gradient was replaced."""

    steps: list[StepResult]
    unchanged: bool
    skipped_steps: int
    updates: int
    scales: list[float]


def _bits(state: TrainState) -> list[torch.Tensor]:
    weights = [bucket.weights for bucket in state.optimizer.buckets]
    moments = [tensor for s in state.optimizer.states for tensor in s.values()]
    return [tensor.clone() for tensor in weights + moments]


def poisoned(rank: int, case: Case, culprit: int, value: float, dtype: str) -> Poisoned:
    """Run three steps. In the second, one element of one rank's gradient is set to `value` before the sums."""
    state = build(rank, case, dtype)
    finish = state.sync.finish

    def spoil() -> None:
        if state.current_step == 1 and rank == culprit:
            state.optimizer.buckets[0].parameters[0].main_grad.view(-1)[0] = value
        finish()

    state.sync.finish = spoil  # type: ignore[method-assign]
    steps = [train_step(state)]
    scales = [state.scaler.scale]
    before = _bits(state)
    steps.append(train_step(state))
    scales.append(state.scaler.scale)
    unchanged = all(torch.equal(old, new) for old, new in zip(before, _bits(state), strict=True))
    steps.append(train_step(state))
    return Poisoned(steps, unchanged, state.skipped_steps, state.optimizer.updates, scales)


@pytest.mark.parametrize(
    ("case", "culprit"),
    [
        (Case("llama"), 0),
        (Case("gpt", tp=2, sequence_parallel=True), 1),
        (Case("gpt", pp=2), 0),
        (Case("mpt", pp=2, tp=2, zero=0), 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("value", [float("nan"), thorough(float("inf"))], ids=["nan", "inf"])
def test_a_step_that_is_not_finite_changes_nothing_anywhere(
    ranks: RankPool, case: Case, culprit: int, value: float
) -> None:
    for outcome in ranks.run(case.world_size, poisoned, case, culprit, value, "fp64"):
        assert [step.skipped for step in outcome.steps] == [False, True, False]
        assert outcome.unchanged
        assert (outcome.skipped_steps, outcome.updates) == (1, 2)
        assert outcome.scales == [1.0, 1.0]


def test_overflow_halves_the_fp16_loss_scale_on_every_rank(ranks: RankPool) -> None:
    case = Case("llama", tp=2, pp=2)
    for outcome in ranks.run(4, poisoned, case, 2, float("inf"), "fp16"):
        assert [step.skipped for step in outcome.steps] == [False, True, False]
        assert outcome.unchanged
        first, second = outcome.scales
        assert second == first / 2
        assert outcome.steps[2].loss_scale == second


def losses(rank: int, case: Case, dtype: str) -> list[float]:
    state = build(rank, case, dtype)
    return [train_step(state).loss for _ in range(3)]


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.05), thorough("fp32", 1e-5), thorough("fp16", 0.01)])
def test_lower_precisions_stay_near_float64(ranks: RankPool, dtype: str, tolerance: float) -> None:
    """The unit roundoffs are 6e-8, 4e-3 and 5e-4. The loss after a few layers amplifies them about tenfold."""
    case = Case("llama", tp=2, pp=2, sequence_parallel=True)
    exact, rounded = (ranks.run(4, losses, case, kind)[0] for kind in ("fp64", dtype))
    np.testing.assert_allclose(rounded, exact, rtol=tolerance)
    assert rounded != exact


def threads(rank: int) -> int:
    gc.collect()
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_finished_run_lets_go_of_its_memory_and_groups(ranks: RankPool) -> None:
    """A process may build several runs (benchmarks, tests).

    If finished runs kept their process groups, the groups' threads would remain.
    """
    before = ranks.run(2, threads)
    for _ in range(2):
        ranks.run(2, train_case, Case("gpt", pp=2, transport="torch"))
    assert ranks.run(2, threads) == before
