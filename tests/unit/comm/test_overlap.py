"""Overlap of communication changes only the time of a step. Each switch gives the same bits in every kind of layout,
and leaves communication in flight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from frontier_llm.comm import DONE, build_mesh
from frontier_llm.config import RunConfig
from frontier_llm.errors import LayoutError
from frontier_llm.optim import Bucket
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import TrainState, build_state
from frontier_llm.training.evaluate import held_out_loss
from frontier_llm.training.step import train_step
from tests.harness.marks import but_first, thorough
from tests.harness.pool import RankPool
from tests.harness.timeline import ROWS, MeasuredTimeline, draw, write_chrome_trace
from tests.parity.cases import Case
from tests.parity.three_steps import Source

SMALL_BUCKETS = 2_000  # elements: at least a dozen buckets, so that gathers end at different layers
LAYOUTS = [
    Case("llama", dp=2),
    Case("gpt", dp=2, pp=2, recompute="full"),  # a tied embedding on both ends
    Case("mpt", dp=2, pp=2, schedule="interleaved"),
    Case("llama", dp=2, tp=2, sequence_parallel=True, recompute="selective"),
    Case("llama", dp=2, pp=2, schedule="zb-h1"),
    Case("gpt", dp=2, zero=0),
    Case("llama", dp=4, transport="torch"),
]


class Outcome(NamedTuple):
    """Results of one rank after three steps with an evaluation between them."""

    numbers: list[float]
    weights: list[torch.Tensor]
    under_way: int  # buckets whose gather was not complete when a step returned


def _config(case: Case, comm: dict[str, Any], dtype: str) -> RunConfig:
    config = case.config(dtype)
    return config.model_copy(
        update={
            "comm": config.comm.model_copy(
                update={"transport": case.transport, "bucket_elements": SMALL_BUCKETS, **comm}
            )
        }
    )


def _state(rank: int, case: Case, comm: dict[str, Any], dtype: str = "fp32") -> TrainState:
    config = _config(case, comm, dtype)
    plan = make_plan(config, case.world_size)
    mesh = build_mesh(plan.grid, rank, plan.placement, config.model.tied_embeddings, 60.0, config.comm)
    return build_state(config, plan, mesh, torch.device("cpu"), Source(case, mesh.dp.rank))


def _three_steps(rank: int, case: Case, comm: dict[str, Any], dtype: str = "fp32") -> Outcome:
    state = _state(rank, case, comm, dtype)
    numbers = []
    under_way = 0
    for step in range(3):
        result = train_step(state)
        numbers += [result.loss, result.gradient_norm]
        under_way += sum(bucket.arriving is not DONE for bucket in state.optimizer.buckets)
        if step == 1:
            numbers.append(held_out_loss(state, Source(case, state.mesh.dp.rank), 8, lambda: False))
    return Outcome(numbers, [bucket.weights.clone() for bucket in state.optimizer.buckets], under_way)


def _assert_same_bits(ours: list[Outcome], theirs: list[Outcome]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.numbers == other.numbers
        assert all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("case", but_first(LAYOUTS[3:] + LAYOUTS[:3], in_ci=3), ids=str)
def test_overlapping_the_weights_changes_no_bit(ranks: RankPool, case: Case) -> None:
    waited, overlapped = (
        ranks.run(case.world_size, _three_steps, case, {"overlap_weights": on}) for on in (False, True)
    )
    _assert_same_bits(overlapped, waited)
    assert all(outcome.under_way == 0 for outcome in waited)
    for outcome in overlapped:  # without ZeRO there is nothing to gather
        assert outcome.under_way == (3 * len(outcome.weights) if case.zero else 0)


def _arrivals(rank: int) -> tuple[list[int], list[int], list[int]]:
    """Return the first uses of the buckets in flight at three points in time.

    They are after a step, after reading a weight of the first block, and after reading a weight of the last block.
    """
    state = _state(rank, Case("llama", dp=2), {"overlap_weights": True})
    train_step(state)

    def under_way() -> list[int]:
        return sorted(bucket.first_use for bucket in state.optimizer.buckets if bucket.arriving is not DONE)

    after_step = under_way()
    blocks = state.stages[0].blocks
    _ = blocks[0].attention.qkv.weight
    after_first = under_way()
    _ = blocks[-1].mlp.down.weight
    after_last = under_way()
    state.optimizer.wait_for_gather()
    return after_step, after_first, after_last


def test_a_parameter_waits_for_its_own_bucket_alone(ranks: RankPool) -> None:
    for after_step, after_first, after_last in ranks.run(2, _arrivals):
        assert len(after_step) > 10
        assert len(after_first) == len(after_step) - 1 and len(after_last) == len(after_step) - 2


def _gather_order(rank: int) -> list[int]:
    state = _state(rank, Case("llama", dp=2), {})
    started: list[int] = []
    honest = Bucket.start_gather

    def noted(bucket: Bucket) -> None:
        started.append(bucket.first_use)
        honest(bucket)

    with patch.object(Bucket, "start_gather", noted):
        train_step(state)
    return started


def test_gathers_start_in_the_order_of_the_next_forward(ranks: RankPool) -> None:
    for spread in ranks.run(2, _gather_order):
        assert len(spread) > 10 and spread == sorted(spread)


def _stale(rank: int) -> list[float]:
    """Read parameters without waiting for their gather. The result must be wrong; otherwise gathers end so early that
    the tests above would not detect a missing wait.
    """
    state = _state(rank, Case("llama", dp=2), {"overlap_weights": True})
    losses = []
    for _ in range(3):
        losses.append(train_step(state).loss)
        kept = [bucket.arriving for bucket in state.optimizer.buckets]
        for bucket in state.optimizer.buckets:
            bucket.arriving = DONE
        losses.append(held_out_loss(state, Source(Case("llama", dp=2), state.mesh.dp.rank), 8, lambda: False))
        for pending in kept:
            pending.wait()
    return losses


def test_weights_that_are_not_waited_for_are_seen(ranks: RankPool) -> None:
    honest = ranks.run(2, _three_steps, Case("llama", dp=2), {"overlap_weights": True})[0].numbers
    assert ranks.run(2, _stale)[0][3] != honest[4]  # the evaluation after the second step


@pytest.mark.parametrize("case", but_first([case for case in LAYOUTS if case.pp > 1]), ids=str)
def test_posting_receives_ahead_changes_no_bit(ranks: RankPool, case: Case) -> None:
    late, ahead = (ranks.run(case.world_size, _three_steps, case, {"overlap_messages": on}) for on in (False, True))
    _assert_same_bits(ahead, late)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "chunks", "recompute", "sequence_parallel", "tolerance"),
    [
        thorough("fp64", 2, "none", True, 1e-12),
        ("fp64", 3, "full", True, 1e-12),
        thorough("fp32", 6, "none", True, 1e-5),
        thorough("bf16", 2, "none", True, 0.02),
        thorough("fp64", 4, "full", False, 1e-12),
    ],
)
def test_tensor_chunks_stay_within_rounding(
    ranks: RankPool, dtype: str, chunks: int, recompute: str, sequence_parallel: bool, tolerance: float
) -> None:
    """Sums go over the same ranks in the same order, but a library's product may round differently for another number
    of rows. The difference is a few units in the last place (1e-16, 6e-8 and 4e-3), and the model amplifies it.
    """
    case = Case("gpt", tp=2, sequence_parallel=sequence_parallel, recompute=recompute)
    whole, cut = (ranks.run(2, _three_steps, case, {"tensor_chunks": count}, dtype) for count in (1, chunks))
    assert cut[0].numbers == pytest.approx(whole[0].numbers, rel=tolerance)


def test_chunks_must_divide_a_ranks_part_of_the_sequence() -> None:
    with pytest.raises(
        LayoutError, match=r"5 does not divide the 6 tokens that a rank has of each sequence of 12[\s\S]*use one of"
    ):
        make_plan(_config(Case("llama", tp=2, sequence_parallel=True), {"tensor_chunks": 5}, "fp32"), 2)
    with pytest.raises(LayoutError, match=r"5 does not divide the 12 tokens that a rank has of each sequence of 12"):
        make_plan(_config(Case("llama", tp=2), {"tensor_chunks": 5}, "fp32"), 2)
    with pytest.raises(LayoutError, match="without tensor parallelism"):
        make_plan(_config(Case("llama", dp=2), {"tensor_chunks": 2}, "fp32"), 2)


class Traced(NamedTuple):
    """A switch, the call that it hides, and the row on which a rank works during such a call."""

    case: Case
    on: dict[str, Any]
    off: dict[str, Any]
    call: str
    beside: str


TRACED = {
    "gradients": Traced(
        Case("llama", dp=2), {"overlap_gradients": True}, {"overlap_gradients": False}, "dp reduce_scatter", "compute"
    ),
    "weights": Traced(
        Case("llama", dp=2), {"overlap_weights": True}, {"overlap_weights": False}, "dp all_gather", "compute"
    ),
    "messages": Traced(
        Case("llama", pp=2), {"overlap_messages": True}, {"overlap_messages": False}, "pp.backward recv", "compute"
    ),
    "chunks": Traced(
        Case("llama", tp=2, sequence_parallel=True),
        {"tensor_chunks": 3},
        {"tensor_chunks": 1},
        "tp all_gather",
        "in flight",
    ),
    "sums": Traced(Case("llama", tp=2), {"tensor_chunks": 3}, {"tensor_chunks": 1}, "tp all_reduce", "in flight"),
}


def _two_steps(rank: int, case: Case, comm: dict[str, Any]) -> MeasuredTimeline:
    state = _state(rank, case, comm)
    timeline = MeasuredTimeline(rank)
    timeline.attach(state.mesh.ledger)
    state.pipeline.on_action = lambda action: timeline.at(action.kind.name.lower() if action else "")
    train_step(state)
    train_step(state)
    state.optimizer.wait_for_gather()
    return timeline


def _crossed(path: Path, call: str, beside: str) -> int:
    """Count how often rank 0 of a Chrome trace begins something on the row `beside` while a `call` is in flight. On the
    row "compute" ends are counted too.
    """
    bars = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    flights = [
        (bar["ts"], bar["ts"] + bar["dur"])
        for bar in bars
        if bar["tid"] == ROWS.index("in flight") and bar["name"] == call
    ]
    turning = [bar for bar in bars if bar["tid"] == ROWS.index(beside) and (beside == "compute" or bar["name"] == call)]
    turns = [bar["ts"] for bar in turning] + [bar["ts"] + bar["dur"] for bar in turning if beside == "compute"]
    assert flights and turns
    return sum(begin < turn < end for begin, end in flights for turn in turns)


@pytest.mark.parametrize("switch", but_first(list(TRACED), 2))
def test_the_timeline_shows_what_each_switch_puts_under_way(ranks: RankPool, switch: str, tmp_path: Path) -> None:
    """The order of one rank's actions does not depend on the load of the machine."""
    case, on, off, call, beside = TRACED[switch]
    crossed = []
    for name, comm in (("on", on), ("off", off)):
        timelines = ranks.run(case.world_size, _two_steps, case, comm)
        write_chrome_trace(tmp_path / f"{name}.json", timelines)
        crossed.append(_crossed(tmp_path / f"{name}.json", call, beside))
        draw(tmp_path / f"{name}.png", timelines)
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert crossed[0] > 10 and crossed[1] == 0
