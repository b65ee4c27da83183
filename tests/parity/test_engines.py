"""The engines are interchangeable: torch's FSDP and DeepSpeed's ZeRO train as the native ZeRO does.

Each engine resumes the others' checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch

from frontier_llm.comm import build_mesh
from frontier_llm.config import RunConfig
from frontier_llm.errors import BackendError
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import TrainState, build_state
from frontier_llm.training.guard import ReplicaCheck
from frontier_llm.training.step import StepResult, train_step
from tests.harness.marks import but_first, exhaustive, thorough
from tests.harness.pool import RankPool
from tests.harness.saving import checkpoints_of, save_step
from tests.parity.cases import Case
from tests.parity.compare import Tensors, assemble
from tests.parity.sabotage import SABOTAGES
from tests.parity.three_steps import Piece, Source

KINDS = ("master", "exp_avg", "exp_avg_sq")
ENGINES = ("native", "fsdp", "zero-1")


def config_of(case: Case, engine: str, dtype: str, deepspeed_config: str | None = None) -> RunConfig:
    config = case.config(dtype)
    parallel = config.parallel
    optimizer = config.optimizer
    parallel = parallel.model_copy(update={"data_mode": "fsdp"} if engine == "fsdp" else {"data_shard": None})
    if engine.startswith("zero"):
        optimizer = optimizer.model_copy(update={"engine": "deepspeed", "deepspeed_config": deepspeed_config})
    return config.model_copy(update={"parallel": parallel, "optimizer": optimizer})


def build(rank: int, case: Case, engine: str, dtype: str, deepspeed_config: str | None = None) -> TrainState:
    config = config_of(case, engine, dtype, deepspeed_config)
    plan = make_plan(config, case.world_size)
    mesh = build_mesh(plan.grid, rank, plan.placement, config.model.tied_embeddings, 60.0, config.comm)
    return build_state(config, plan, mesh, torch.device("cpu"), Source(case, mesh.dp.rank))


class Outcome(NamedTuple):
    """Step results of one rank, and its share of the optimizer state at the end."""

    steps: list[StepResult]
    state: dict[str, list[Piece]]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def norms(self) -> list[float]:
        return [step.gradient_norm for step in self.steps]


def state_of(state: TrainState) -> dict[str, list[Piece]]:
    """Return all rectangles of optimizer state that this rank holds, by kind."""
    parts = state.optimizer.state()
    return {
        kind: [
            Piece(
                p.name,
                p.global_shape,
                p.rectangle.offset,
                p.rectangle.shape,
                0,
                p.rectangle.numel,
                p.tensors[kind].flatten().numpy().copy(),
            )
            for p in parts
        ]
        for kind in KINDS
    }


def three_steps(rank: int, case: Case, engine: str, dtype: str, sabotage: str | None = None) -> Outcome:
    """Run three steps, and an evaluation's forward passes after the first."""
    with SABOTAGES[sabotage]() if sabotage else nullcontext():
        state = build(rank, case, engine, dtype)
        assert state.mesh.ledger.not_counted == {"native": "", "fsdp": "fsdp"}.get(engine, "deepspeed")
        steps = [train_step(state)]
        with torch.no_grad():
            state.evaluator.run(state.feed.step(0))
        steps += [train_step(state) for _ in range(2)]
        ReplicaCheck(state.optimizer, state.mesh).check(3, state.mesh.world)
        return Outcome(steps, state_of(state))


def gathered(ranks: list[Outcome], kind: str) -> Tensors:
    tensors, drift = assemble([outcome.state[kind] for outcome in ranks], kind)
    assert drift == []
    return tensors


def assert_equal_training(
    ranks: RankPool, case: Case, engine: str, dtype: str, loss: float, state: float, sabotage: str | None = None
) -> None:
    """Compare an engine with the native engine.

    `loss` bounds the relative difference of losses and norms.
    `state` bounds the difference of each kind of state relative to its largest value.
    """
    theirs = ranks.run(case.world_size, three_steps, case, engine, dtype, sabotage)
    ours = ranks.run(case.world_size, three_steps, case, "native", dtype)
    assert all(outcome.steps == theirs[0].steps for outcome in theirs)  # all ranks have the same results
    np.testing.assert_allclose(theirs[0].losses, ours[0].losses, rtol=loss)
    np.testing.assert_allclose(theirs[0].norms, ours[0].norms, rtol=10 * loss)
    for kind in KINDS:
        expected = gathered(ours, kind)
        found = gathered(theirs, kind)
        assert found.keys() == expected.keys()
        if case.tp * case.pp == 1:  # each element is on one rank, or on one rank of each copy
            held = sum(piece.values.size for outcome in theirs for piece in outcome.state[kind])
            copies = case.dp // (case.config().parallel.data_shard or case.dp)
            assert held == copies * sum(tensor.size for tensor in expected.values())
        largest = max(np.abs(tensor).max() for tensor in expected.values())
        for name, tensor in expected.items():
            np.testing.assert_allclose(found[name], tensor, rtol=0, atol=state * largest, err_msg=f"{kind} of {name}")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", dp=2),
        thorough(Case("llama", tp=2, dp=2, sequence_parallel=True, recompute="full")),
        exhaustive(Case("gpt", dp=4, settings=("parallel.data_shard=2",))),
        exhaustive(Case("gpt", cp=2, dp=2, settings=("model.sequence_length=16",))),
        thorough(Case("mpt", dp=4, schedule="gpipe", documents=True)),
    ],
    ids=str,
)
def test_fsdp_is_exact(ranks: RankPool, case: Case) -> None:
    """In float64 only the order of the sums differs."""
    assert_equal_training(ranks, case, "fsdp", "fp64", 1e-11, 1e-9)


# In fp32 the order of sums changes the seventh digit, and Adam's first steps divide by a small root.
# In bf16 at stage 1 the engine receives the layers' fp32 sums, so that only the norm's last digit differs.
# FSDP rounds each microbatch's gradient to bf16.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "engine", "dtype", "loss", "state"),
    [
        exhaustive(Case("gpt", dp=2), "zero-1", "fp32", 1e-6, 1e-3),
        thorough(Case("gpt", dp=2), "zero-1", "bf16", 1e-6, 1e-3),
        exhaustive(Case("llama", tp=2, dp=2, sequence_parallel=True), "zero-1", "bf16", 1e-6, 1e-3),
        exhaustive(Case("gpt", pp=2, dp=2), "zero-1", "fp32", 1e-6, 1e-3),
        (Case("mpt", pp=2, dp=2, schedule="interleaved", recompute="full"), "zero-1", "bf16", 1e-6, 1e-3),
        thorough(Case("llama", pp=2, dp=2, schedule="zb-h1", micro_batch=2), "zero-1", "fp32", 1e-6, 1e-3),
        exhaustive(Case("gpt", tp=2, pp=2), "zero-1", "fp32", 1e-6, 1e-3),
        thorough(Case("llama", tp=2, dp=2, sequence_parallel=True), "fsdp", "bf16", 5e-3, 0.3),
        exhaustive(Case("neox"), "fsdp", "fp32", 1e-6, 1e-3),
    ],
    ids=str,
)  # fmt: skip
def test_engines_train_as_ours_does(
    ranks: RankPool, case: Case, engine: str, dtype: str, loss: float, state: float
) -> None:
    if engine != "fsdp":
        pytest.importorskip("deepspeed", reason="pip install --no-build-isolation deepspeed==0.19.8")
    assert_equal_training(ranks, case, engine, dtype, loss, state)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("engine", "case"), [thorough("fsdp", Case("llama", tp=2, dp=2)), ("zero-1", Case("gpt", pp=2, dp=2))], ids=str
)
def test_a_replica_counted_twice_is_seen(ranks: RankPool, engine: str, case: Case) -> None:
    """Prove that the comparison can fail: the planted mistake counts tp-replicated and tied parameters twice."""
    if engine != "fsdp":
        pytest.importorskip("deepspeed", reason="pip install --no-build-isolation deepspeed==0.19.8")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equal_training(ranks, case, engine, "fp32", 1e-6, 1e-3, "double-counted-norm")


def under_json(rank: int, case: Case, engine: str, deepspeed_config: str) -> tuple[list[float], bool, int]:
    """Return the losses, whether optimizer state is offloaded, and the gradient bucket size, as DeepSpeed reports
    them.
    """
    state = build(rank, case, engine, "bf16", deepspeed_config)
    zero: Any = state.optimizer._zero  # type: ignore[attr-defined]
    return [train_step(state).loss for _ in range(3)], bool(zero.cpu_offload), int(zero.reduce_bucket_size)


@pytest.mark.thorough
def test_a_deepspeed_json_is_obeyed(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="pip install --no-build-isolation deepspeed==0.19.8")
    path = tmp_path / "ds.json"
    case = Case("gpt", dp=4)
    path.write_text(
        json.dumps({"zero_optimization": {"reduce_bucket_size": 3000, "offload_optimizer": {"device": "cpu"}}})
    )
    native = ranks.run(4, three_steps, case, "native", "bf16")[0].losses
    for losses, offloaded, bucket in ranks.run(4, under_json, case, "zero-1", str(path)):
        assert losses == pytest.approx(native, rel=1e-6)
        assert (offloaded, bucket) == (True, 3000)


def misplaced(rank: int, case: Case) -> str:
    """Return the error that is raised if the state is not at the place that DeepSpeed reports."""
    from frontier_llm.optim.deepspeed_zero import DeepSpeedZero

    honest = DeepSpeedZero._runs

    def shifted(self: DeepSpeedZero, parameter: Any) -> Iterator[tuple[int, torch.Tensor, int, int]]:
        yield from ((first, flat, place + 1, numel - 1) for first, flat, place, numel in honest(self, parameter))

    with patch.object(DeepSpeedZero, "_runs", shifted), pytest.raises(BackendError) as error:
        build(rank, case, "zero-1", "bf16")
    return str(error.value)


@pytest.mark.thorough
def test_state_elsewhere_than_deepspeed_says_stops_the_run(ranks: RankPool) -> None:
    pytest.importorskip("deepspeed", reason="pip install --no-build-isolation deepspeed==0.19.8")
    for said in ranks.run(2, misplaced, Case("llama", dp=2)):
        assert "DeepSpeed reports a wrong place for the optimizer state of" in said


def save_and_go_on(rank: int, case: Case, engine: str, directory: Path) -> Outcome:
    """Run two steps, save a checkpoint and run a third step. The returned state is the checkpoint's."""
    state = build(rank, case, engine, "bf16")
    steps = [train_step(state) for _ in range(2)]
    at_save = state_of(state)
    save_step(state, directory, step=2, samples=16, tokens=192)
    return Outcome([*steps, train_step(state)], at_save)


def resume(rank: int, case: Case, engine: str, directory: Path) -> Outcome:
    """Run the third step from the checkpoint. The returned state equals the loaded state."""
    state = build(rank, case, engine, "bf16")
    checkpoints = checkpoints_of(state, directory)
    progress = checkpoints.newest()
    assert progress is not None and state.optimizer.updates == 2
    state.current_step = progress.step
    loaded = state_of(state)
    checkpoints.close()
    return Outcome([train_step(state)], loaded)


LAYOUTS = {
    "native": Case("gpt", tp=2, pp=2),
    "fsdp": Case("gpt", tp=2, dp=2, sequence_parallel=True),
    "zero-1": Case("gpt", pp=2, dp=2),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("writer", "readers"),
    [("native", ENGINES), thorough("fsdp", ("native", "zero-1")), exhaustive("zero-1", ("native", "fsdp"))],
)
def test_any_engine_resumes_any_engines_checkpoint(
    ranks: RankPool, writer: str, readers: tuple[str, ...], tmp_path: Path
) -> None:
    """The resumed run also has another layout: its state is bit-equal, and its next loss differs by the order of bf16
    sums.

    The checkpoint format does not depend on the engine. Files of every engine are read by the native engine and by one
    other engine. Files of the native engine are read by every engine.
    """
    if writer.startswith("zero"):
        pytest.importorskip("deepspeed", reason="pip install --no-build-isolation deepspeed==0.19.8")
    case = LAYOUTS[writer]
    written = ranks.run(case.world_size, save_and_go_on, case, writer, tmp_path)
    for reader in readers:
        case = LAYOUTS[reader]
        loaded = ranks.run(case.world_size, resume, case, reader, tmp_path)
        for kind in KINDS:
            expected = gathered(written, kind)
            found = gathered(loaded, kind)
            assert found.keys() == expected.keys()
            for name in expected:
                np.testing.assert_array_equal(found[name], expected[name], err_msg=f"{reader}: {kind} of {name}")
        assert loaded[0].losses[0] == pytest.approx(written[0].losses[2], rel=2e-3), reader


def skipped_step(
    rank: int, case: Case, engine: str, dtype: str, fault: str, deepspeed_config: str | None = None
) -> tuple[list[StepResult], bool, float]:
    """Run four steps and skip the second: one rank's gradient is not finite (`nan`), or it counts as a `spike`.

    Return the results, whether the second step left the state unchanged, and the number of updates.
    """
    state = build(rank, case, engine, dtype, deepspeed_config)
    steps = [train_step(state)]
    before = state_of(state)
    run = state.pipeline.run

    def spoil(batch: Callable[[int], Any], loss_scale: float) -> dict[str, torch.Tensor]:
        return run(batch, float("nan") if rank == 1 else loss_scale)

    if fault == "nan":
        with patch.object(state.pipeline, "run", spoil):
            steps.append(train_step(state))
    else:
        with patch.object(state.spikes, "is_spike", lambda *_: True):
            steps.append(train_step(state))
    after = state_of(state)
    unchanged = all(
        np.array_equal(a.values, b.values) for kind in KINDS for a, b in zip(before[kind], after[kind], strict=True)
    )
    steps += [train_step(state), train_step(state)]
    return steps, unchanged, float(state.optimizer.updates)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "engine, dtype, fault",
    but_first(
        [
            ("zero-1", "bf16", "spike"),
            ("zero-1", "bf16", "nan"),
            ("zero-1", "fp32", "nan"),
            ("zero-1 offload", "bf16", "nan"),
            ("fsdp", "fp32", "nan"),
        ],
        in_ci=2,
    ),
)
def test_a_skipped_step_changes_nothing_under_any_engine(
    ranks: RankPool, tmp_path: Path, engine: str, dtype: str, fault: str
) -> None:
    if engine != "fsdp":
        pytest.importorskip("deepspeed", reason="pip install --no-build-isolation deepspeed==0.19.8")
    offload = None
    if engine.endswith("offload"):
        offload = str(tmp_path / "ds.json")
        Path(offload).write_text(json.dumps({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}))
    case = Case("llama", dp=4)
    reference = ranks.run(4, skipped_step, case, "native", dtype, fault)[0][0]
    for steps, unchanged, updates in ranks.run(4, skipped_step, case, engine.split()[0], dtype, fault, offload):
        assert [step.skipped for step in steps] == [False, True, False, False]
        assert unchanged and updates == 3
        for step, expected in zip(steps[2:], reference[2:], strict=True):
            assert step.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5 if dtype == "fp32" else 1e-2)
