"""A run that changes its batch, context and rotary scaling in phases.

An interrupted run gives the same results. So does a run that is built with the settings of the last phase.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from frontier_llm.checkpoint.weights import CheckpointWeights
from frontier_llm.comm import build_mesh, serial_mesh
from frontier_llm.config import RunConfig, load_run, phases_of
from frontier_llm.data.identity import course, wanted
from frontier_llm.data.loader import open_run_batches
from frontier_llm.data.position import START
from frontier_llm.run import run_dir
from frontier_llm.run.signals import SignalWatcher
from frontier_llm.topology.plan import make_plan
from frontier_llm.training import loop
from frontier_llm.training.build import build_state
from frontier_llm.training.step import StepResult, train_step
from tests.harness.pool import RankPool

PHASES = (
    "[{steps: 2}, {steps: 2, batch: {global_batch: 4, micro_batch: 2}},"
    " {steps: 2, model: {sequence_length: 96, rope_theta: 50000.0, rope_scaling: {kind: linear, factor: 2}}}]"
)
WORDS = [
    "model=llama-tiny",
    "batch.global_batch=2",
    "batch.micro_batch=1",
    "optimizer.schedule=constant",
    f"train.phases={PHASES}",
]


def trained(directory: Path, steps: int) -> dict[int, float]:
    """Train up to `steps` and return the loss of each step of the run so far."""
    config = load_run("bench", [*WORDS, "train.save_final=true", f"train.run_dir={directory}", f"train.steps={steps}"])
    with SignalWatcher() as signals:
        assert loop.train(config, None, signals) == 0
    return {row["step"]: row["loss"] for row in run_dir.steps(directory)}


def weights(directory: Path) -> dict[str, np.ndarray]:
    source = CheckpointWeights(directory / "checkpoints" / "step_00000006")
    return {name: source.read(name, "master") for name in source.tensors}


def test_a_run_resumed_inside_or_at_the_border_of_a_phase_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 6)
    assert len(whole) == 6
    final = weights(tmp_path / "whole")
    for stops in ((3,), (2, 4)):
        parts = tmp_path / "-".join(map(str, stops))
        losses = [trained(parts, stop) for stop in (*stops, 6)]
        assert losses[-1] == whole
        assert all(np.array_equal(values, final[name]) for name, values in weights(parts).items())
    source = CheckpointWeights(tmp_path / "whole" / "checkpoints" / "step_00000006")
    length = 2 * 32 * 2 + 4 * 32 * 2 + 2 * 96 * 2
    assert (source.manifest.progress.consumed_samples, source.manifest.progress.tokens) == (16, length)
    # Export, generation and evaluation use this model.
    assert source.model.sequence_length == 96 and source.model.rope_scaling is not None
    # The last step of this checkpoint was in phase 2.
    assert CheckpointWeights(tmp_path / "2-4" / "checkpoints" / "step_00000004").model.rope_scaling is None
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["number"]) for row in rows if row["kind"] == "phase"] == [(2, 2), (4, 3)]
    assert [row["consumed_tokens"] for row in rows if row["kind"] == "step"][-1] == length


def _last_phase(rank: int, words: list[str], world_size: int, built: bool) -> list[tuple[float, float]]:
    """Return loss and gradient norm of two steps of the last phase.

    With `built`, the run is built with the settings of the last phase. Otherwise it is built with the settings of
    the first phase, and changes to the last phase before its first step.
    """
    config: RunConfig = load_run("bench", [*WORDS, *words, "precision.dtype=fp64", "data.seed=7"])
    phase = phases_of(config)[-1]
    plan = make_plan(config, world_size)
    mesh = build_mesh(plan.grid, rank, plan.placement) if world_size > 1 else serial_mesh()
    position = list(course(config, START, {}))[-2][1].enter(wanted(phase.config, {}))
    source = open_run_batches(phase.config, position, phase.first, mesh.dp.rank, mesh.dp.size)
    chosen = phase.config if built else config
    state = build_state(chosen, make_plan(chosen, world_size), mesh, torch.device("cpu"), source)
    if not built:
        state.enter(state.phases[-1], source)
    state.current_step = phase.first
    results: list[StepResult] = [train_step(state) for _ in range(2)]
    return [(result.loss, result.gradient_norm) for result in results]


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence_parallel=true"],
        ["parallel.context=2", "parallel.pipeline=2"],
    ],
)
def test_an_entered_phase_trains_as_a_run_built_for_it_on_any_layout(layout: list[str], ranks: RankPool) -> None:
    serial = _last_phase(0, [], 1, built=True)
    assert _last_phase(0, [], 1, built=False) == serial
    for entered in ranks.run(4, _last_phase, layout, 4, False):
        assert np.allclose(entered, serial, rtol=1e-10, atol=0)
